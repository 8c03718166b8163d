"""Fused kernels of Liger in the place of a model's own forward, norms, rotations and products."""

import importlib.util
import sys
from types import ModuleType
from typing import Final, NamedTuple, cast

from torch import nn


def has_liger() -> bool:
    """True if liger-kernel is installed."""
    return importlib.util.find_spec("liger_kernel") is not None


def has_kernels(model_type: str) -> bool:
    """True for a model type with kernels of Liger's. Effects: imports liger-kernel, which must be installed."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    return model_type in MODEL_TYPE_TO_APPLY_LIGER_FN


class _Replacement(NamedTuple):
    """An attribute of a module or a class, and its value before the replacement."""

    owner: ModuleType | type
    name: str
    original: object


class Replacements:
    """The replacements of a library of kernels in transformers' modules, shared by all models of the process."""

    def __init__(self, replacements: tuple[_Replacement, ...] = ()) -> None:
        self._replacements = replacements

    def undo(self) -> None:
        """Put the original values back. Models with replaced kernels must not run afterwards."""
        for owner, name, original in self._replacements:
            setattr(owner, name, original)
        self._replacements = ()


_LOSSES: Final = ("cross_entropy", "fused_linear_cross_entropy")
"""Liger's losses, by the arguments of its functions."""

_SCALES_OF_LOGITS: Final = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Settings of models that change the logits of their head, which the loss in pieces cannot."""


def use_kernels(model: nn.Module, kernels: str) -> Replacements:
    """Replace the parts of a model by a library's kernels.

    Liger's loss reads the number of targets on the host, which stops launching in the middle of a step: the loss in
    pieces is 6 % of a step faster. A model that scales its logits keeps Liger's, for want of the other.

    Args:
        model: A model of transformers, not sharded yet. Changed in place.
        kernels: The library: "liger", or "none" to replace nothing. Not for layers that will be compiled: these ended
            in illegal memory accesses under torch 2.11.

    Returns:
        The replacements outside the model: rotary embeddings are functions of transformers' modules.
    """
    if kernels == "none":
        return Replacements()
    from transformers import PreTrainedModel
    from transformers.integrations.liger import apply_liger_kernel

    originals = [(owner, dict(vars(owner))) for owner in _shared_owners()]
    scales_logits = any(getattr(model.config, name, None) not in (None, 1.0) for name in _SCALES_OF_LOGITS)
    options = None if scales_logits else dict.fromkeys(_LOSSES, False)
    apply_liger_kernel(cast(PreTrainedModel, model), options)  # type: ignore[no-untyped-call]
    return Replacements(
        tuple(
            _Replacement(owner, name, original)
            for owner, attributes in originals
            for name, original in attributes.items()
            if vars(owner).get(name) is not original
        )
    )


def _shared_owners() -> list[ModuleType | type]:
    """Torch's functions, and the loaded modules of transformers' models with their classes."""
    modules = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("transformers.models.") and type(module) is ModuleType
    ]
    classes = [
        value
        for module in modules
        for value in list(vars(module).values())
        if isinstance(value, type) and value.__module__ == module.__name__
    ]
    return [nn.functional, *modules, *classes]
