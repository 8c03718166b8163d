"""From placements to a unit's strategy: the axes left to shard over, and the tensors kept between uses."""

from __future__ import annotations

from dataclasses import replace

from lamella_engine._options.placements import DDP, HFSDP, HSDP, ZERO1, ZERO2, ZERO3, AxisPlacement, Strategy
from lamella_engine._parameters.sharding import DataAxes


def strategy_of(
    placements: AxisPlacement | tuple[AxisPlacement, ...] | None, axes: DataAxes
) -> tuple[DataAxes, Strategy]:
    """Read a unit's placements.

    Args:
        placements: One for each axis of the mesh; None means FSDP2's behaviour.
        axes: The data axes of the mesh.

    Returns:
        The axes (for DDP without a shard axis), and the strategy.

    Raises:
        ValueError: The numbers of placements and axes differ, or a placement is unknown or impossible on its axis.
    """
    if placements is None:
        return axes, Strategy()
    axis_placements = placements if isinstance(placements, tuple) else (placements,)
    if len(axis_placements) != axes.mesh.ndim or axes.shard_axis is None:
        raise ValueError(
            f"Expected one of `placements` for each of the {axes.mesh.ndim} axes of {axes.mesh}, got "
            f"{len(axis_placements)}. On a 2-D mesh they are the outer axis's (HSDP, HFSDP) and the inner one's."
        )
    inner = axis_placements[-1]
    for placement, possible in zip(axis_placements, _possible(axis_placements), strict=True):
        if placement not in possible:
            raise ValueError(
                f"Expected one of {', '.join(map(str, possible))} among `placements` for this axis, got {placement}."
            )
    if inner == DDP:
        axes = replace(axes, shard_axis=None, replicate_axis=0, names=((), axes.names[0]))
    elif axis_placements[0] == HFSDP:
        axes = replace(axes, replicate_axis=None, outer_axis=axes.replicate_axis)
    keeps_copy = inner.parameters.is_replicate()
    return axes, Strategy(keeps_copy, inner.gradients.is_replicate(), len(axis_placements) == 2)


def _possible(axis_placements: tuple[AxisPlacement, ...]) -> tuple[tuple[AxisPlacement, ...], ...]:
    """The possible placements of each axis."""
    if len(axis_placements) == 1:
        return ((DDP, ZERO1, ZERO2, ZERO3),)
    return (HSDP, HFSDP), ((ZERO3,) if axis_placements[0] == HFSDP else (ZERO1, ZERO2, ZERO3))
