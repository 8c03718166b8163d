"""Every ZeRO stage as placements: the place of each tensor between uses, along one mesh axis."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True)
class AxisPlacement:
    """How a unit's tensors lie along one mesh axis between uses. The named placements below are all.

    A replicated parameter is a copy in the compute dtype, beside the main weights. It is made anew at the first use
    after a step of a `torch.optim` optimizer, a state dict was taken or loaded, `mark_updated()`, or the last backward
    of a step (`set_is_last_backward`).

    Attributes:
        parameters: The placement of compute's parameters.
        gradients: `Shard`: reduced after each microbatch. `Replicate`: kept whole, and reduced after the step's last.
            `Partial`: reduced along the inner axis after each microbatch, along the outer axis after the last.
        optimizer: The placement of main weights and optimizer state.
    """

    parameters: Placement
    gradients: Placement
    optimizer: Placement

    def __repr__(self) -> str:
        kinds = f"parameters={self.parameters}, gradients={self.gradients}, optimizer={self.optimizer}"
        return _NAMES.get(self, f"AxisPlacement({kinds})")


DDP = AxisPlacement(Replicate(), Replicate(), Replicate())
ZERO1 = AxisPlacement(Replicate(), Replicate(), Shard(0))
ZERO2 = AxisPlacement(Replicate(), Shard(0), Shard(0))
ZERO3 = AxisPlacement(Shard(0), Shard(0), Shard(0))
HSDP = AxisPlacement(Replicate(), Partial(), Replicate())
HFSDP = AxisPlacement(Replicate(), Partial(), Shard(0))

_NAMES = {DDP: "DDP", ZERO1: "ZERO1", ZERO2: "ZERO2", ZERO3: "ZERO3", HSDP: "HSDP", HFSDP: "HFSDP"}


@dataclass(frozen=True)
class Strategy:
    """The consequences of the placements for a unit.

    Attributes:
        keeps_copy: The whole parameters stay between uses.
        reduces_once: Gradients are kept whole until the step's last backward.
        reduces_outer_once: Gradients are reduced over the outer axis in the step's last backward only.
    """

    keeps_copy: bool = False
    reduces_once: bool = False
    reduces_outer_once: bool = False
