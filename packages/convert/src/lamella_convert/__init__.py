"""Checkpoints of any format opened, translated, converted, compared and verified.

Names are imported on first use: listing the tensors in a file needs neither the writers nor a live model.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

from lamella_convert._errors import ModelUnknown as ModelUnknown
from lamella_convert._errors import SizeUnknown as SizeUnknown
from lamella_convert._translation.rules import Rule as Rule
from lamella_convert._translation.rules import Rules as Rules
from lamella_convert._translation.rules import parameter_shapes as parameter_shapes
from lamella_convert._translation.terms import Grouped as Grouped
from lamella_convert._translation.terms import Join as Join
from lamella_convert._translation.terms import Padded as Padded
from lamella_convert._translation.terms import Stack as Stack
from lamella_convert._translation.translate import Translated as Translated
from lamella_convert._translation.translate import translate as translate

if TYPE_CHECKING:
    from lamella_convert._formats.megatron_files import MegatronCheckpoint as MegatronCheckpoint
    from lamella_convert._formats.megatron_files import open_megatron as open_megatron
    from lamella_convert._formats.open import Format as Format
    from lamella_convert._formats.open import OpenCheckpoint as OpenCheckpoint
    from lamella_convert._formats.open import open_checkpoint as open_checkpoint
    from lamella_convert._formats.untrained import keep_published as keep_published
    from lamella_convert._tools.between import MegatronOptions as MegatronOptions
    from lamella_convert._tools.convert import Conversion as Conversion
    from lamella_convert._tools.convert import convert as convert
    from lamella_convert._tools.diff import Diff as Diff
    from lamella_convert._tools.diff import Difference as Difference
    from lamella_convert._tools.diff import diff as diff
    from lamella_convert._tools.inspect import Inspection as Inspection
    from lamella_convert._tools.inspect import inspect as inspect
    from lamella_convert._tools.megatron_save import StoredPart as StoredPart
    from lamella_convert._tools.megatron_save import save_fsdp_dtensor as save_fsdp_dtensor
    from lamella_convert._tools.megatron_save import save_torch_dist as save_torch_dist
    from lamella_convert._tools.open_both import open_both as open_both
    from lamella_convert._tools.plan import Target as Target
    from lamella_convert._tools.safetensors_save import save_safetensors as save_safetensors
    from lamella_convert._tools.verify import verify as verify
    from lamella_convert._translation.families import Family as Family
    from lamella_convert._translation.families import find_family as find_family
    from lamella_convert._translation.families import known_model_types as known_model_types
    from lamella_convert._translation.hybrid_stack import logical_name as logical_name
    from lamella_convert._translation.hybrid_stack import logical_names as logical_names
    from lamella_convert._translation.hybrid_stack import regrouped as regrouped
    from lamella_convert._translation.megatron import Dialect as Dialect
    from lamella_convert._translation.megatron import MtpLayer as MtpLayer
    from lamella_convert._translation.megatron import canonical_name as canonical_name
    from lamella_convert._translation.megatron_args import Counters as Counters
    from lamella_convert._translation.megatron_args import sizes_of_args as sizes_of_args
    from lamella_convert._translation.megatron_model import from_megatron_model as from_megatron_model
    from lamella_convert._translation.megatron_model import global_expert as global_expert
    from lamella_convert._translation.megatron_model import to_megatron_model as to_megatron_model

_LATER: Final = {
    "lamella_convert._formats.megatron_files": ("MegatronCheckpoint", "open_megatron"),
    "lamella_convert._formats.open": ("Format", "OpenCheckpoint", "open_checkpoint"),
    "lamella_convert._formats.untrained": ("keep_published",),
    "lamella_convert._tools.between": ("MegatronOptions",),
    "lamella_convert._tools.convert": ("Conversion", "convert"),
    "lamella_convert._tools.megatron_save": ("StoredPart", "save_fsdp_dtensor", "save_torch_dist"),
    "lamella_convert._tools.open_both": ("open_both",),
    "lamella_convert._tools.diff": ("Diff", "Difference", "diff"),
    "lamella_convert._tools.inspect": ("Inspection", "inspect"),
    "lamella_convert._tools.plan": ("Target",),
    "lamella_convert._tools.safetensors_save": ("save_safetensors",),
    "lamella_convert._tools.verify": ("verify",),
    "lamella_convert._translation.families": ("Family", "find_family", "known_model_types"),
    "lamella_convert._translation.hybrid_stack": ("logical_name", "logical_names", "regrouped"),
    "lamella_convert._translation.megatron": ("Dialect", "MtpLayer", "canonical_name"),
    "lamella_convert._translation.megatron_args": ("Counters", "sizes_of_args"),
    "lamella_convert._translation.megatron_model": ("from_megatron_model", "global_expert", "to_megatron_model"),
}
_HOMES: Final = {name: module for module, names in _LATER.items() for name in names}

if not TYPE_CHECKING:  # A type checker that saw `__getattr__` would accept any name of the module.

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        exported = globals()[name] = getattr(import_module(_HOMES[name]), name)
        return exported


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
