"""Every ZeRO stage as placements: what lies where between uses, along one mesh axis."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from lamella_engine._sharding import DataAxes


@dataclass(frozen=True)
class AxisPlacement:
    """How a unit's tensors lie along one mesh axis between uses. The named ones below are all there are.

    A replicated parameter is a copy in the compute dtype, beside the main weights. It is made anew at the first use
    after a step of a `torch.optim` optimizer, a state dict was taken or loaded, `mark_updated()`, or the last backward
    of a step (`set_is_last_backward`).

    Attributes:
        parameters: Of compute's parameters.
        gradients: `Shard`: reduced after each microbatch. `Replicate`: kept whole, and reduced after the step's last.
            `Partial`: reduced along the other axis after each microbatch, along this one after the last.
        optimizer: Of main weights and optimizer state.
    """

    parameters: Placement
    gradients: Placement
    optimizer: Placement


DDP = AxisPlacement(Replicate(), Replicate(), Replicate())
ZERO1 = AxisPlacement(Replicate(), Replicate(), Shard(0))
ZERO2 = AxisPlacement(Replicate(), Shard(0), Shard(0))
ZERO3 = AxisPlacement(Shard(0), Shard(0), Shard(0))
HSDP = AxisPlacement(Replicate(), Partial(), Replicate())
HFSDP = AxisPlacement(Replicate(), Partial(), Shard(0))

_NAMES = {DDP: "DDP", ZERO1: "ZERO1", ZERO2: "ZERO2", ZERO3: "ZERO3", HSDP: "HSDP", HFSDP: "HFSDP"}


@dataclass(frozen=True)
class Strategy:
    """What the placements make a unit do.

    Attributes:
        keeps_copy: The whole parameters stay between uses.
        reduces_once: Gradients are kept whole until the step's last backward.
        reduces_outer_once: Gradients are reduced over the outer axis in the step's last backward only.
    """

    keeps_copy: bool = False
    reduces_once: bool = False
    reduces_outer_once: bool = False


def strategy_of(
    placements: AxisPlacement | tuple[AxisPlacement, ...] | None, axes: DataAxes
) -> tuple[DataAxes, Strategy]:
    """Read a unit's placements.

    Args:
        placements: One for each axis of the mesh; None means what FSDP2 does.
        axes: Of the mesh.

    Returns:
        The axes, of which none is sharded any more for DDP, and what follows.

    Raises:
        ValueError: Another number of placements than axes, an unknown one, or one that its axis cannot have.

    Effects: none.
    """
    if placements is None:
        return axes, Strategy()
    given = placements if isinstance(placements, tuple) else (placements,)
    if len(given) != axes.mesh.ndim or axes.shard_axis is None:
        raise ValueError(
            f"Expected one of `placements` for each of the {axes.mesh.ndim} axes of {axes.mesh}, got {len(given)}. On "
            "a 2-D mesh they are the outer axis's (HSDP, HFSDP) and the inner one's."
        )
    inner = given[-1]
    for placement, possible in zip(given, _possible(given), strict=True):
        if placement not in possible:
            raise ValueError(
                f"Expected one of {', '.join(_NAMES[each] for each in possible)} among `placements` for this axis, got "
                f"{_NAMES.get(placement, placement)}."
            )
    if inner == DDP:
        axes = replace(axes, shard_axis=None, replicate_axis=0, names=((), axes.names[0]))
    elif given[0] == HFSDP:
        axes = replace(axes, replicate_axis=None, outer_axis=axes.replicate_axis)
    keeps_copy = inner.parameters.is_replicate()
    return axes, Strategy(keeps_copy, inner.gradients.is_replicate(), len(given) == 2)


def _possible(given: tuple[AxisPlacement, ...]) -> tuple[tuple[AxisPlacement, ...], ...]:
    """What each axis can have."""
    if len(given) == 1:
        return ((DDP, ZERO1, ZERO2, ZERO3),)
    return (HSDP, HFSDP), ((ZERO3,) if given[0] == HFSDP else (ZERO1, ZERO2, ZERO3))
