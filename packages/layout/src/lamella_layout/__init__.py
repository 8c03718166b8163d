"""Ownership of the elements of sharded tensors: layouts as arithmetic on integers, without process groups.

Placements are imported when they are first used: `torch.distributed.tensor` takes seconds, and chunks need none of it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

from lamella_layout._chunk import Chunk as Chunk
from lamella_layout._even import EvenLayout as EvenLayout
from lamella_layout._keep import Keep as Keep
from lamella_layout._keep import Rows as Rows
from lamella_layout._keep import Whole as Whole
from lamella_layout._range import Range as Range
from lamella_layout._region import Region as Region

if TYPE_CHECKING:
    from torch.distributed.tensor import Partial as Partial
    from torch.distributed.tensor import Replicate as Replicate
    from torch.distributed.tensor import Shard as Shard

    from lamella_layout._flat import FlatLayout as FlatLayout
    from lamella_layout._mesh import mesh_chunks as mesh_chunks
    from lamella_layout._mesh import mesh_owners as mesh_owners
    from lamella_layout._mesh import mesh_region as mesh_region
    from lamella_layout._mesh import strided_placements as strided_placements
    from lamella_layout._picture import picture as picture
    from lamella_layout._ragged import RaggedShard as RaggedShard
    from lamella_layout._ragged import ragged_rows as ragged_rows

_LATER: Final = {
    "torch.distributed.tensor": ("Partial", "Replicate", "Shard"),
    "lamella_layout._flat": ("FlatLayout",),
    "lamella_layout._mesh": ("mesh_chunks", "mesh_owners", "mesh_region", "strided_placements"),
    "lamella_layout._picture": ("picture",),
    "lamella_layout._ragged": ("RaggedShard", "ragged_rows"),
}
_HOMES: Final = {name: module for module, names in _LATER.items() for name in names}

if not TYPE_CHECKING:  # A type checker that saw it would take every name for one of the module's.

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        attribute = globals()[name] = getattr(import_module(_HOMES[name]), name)
        return attribute


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
