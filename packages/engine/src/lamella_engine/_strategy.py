"""From placements to what a unit does: which axes are left to shard over, and what is kept between uses."""

from __future__ import annotations

from dataclasses import replace

from lamella_engine._placements import DDP, HFSDP, HSDP, ZERO1, ZERO2, ZERO3, AxisPlacement, Strategy
from lamella_engine._sharding import DataAxes


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
                f"Expected one of {', '.join(map(str, possible))} among `placements` for this axis, got {placement}."
            )
    if inner == DDP:
        axes = replace(axes, shard_axis=None, replicate_axis=0, names=((), axes.names[0]))
    elif given[0] == HFSDP:
        axes = replace(axes, replicate_axis=None, outer_axis=axes.replicate_axis)
    keeps_copy = inner.parameters.is_replicate()
    return axes, Strategy(keeps_copy, inner.gradients.is_replicate(), len(given) == 2)


def _possible(given: tuple[AxisPlacement, ...]) -> tuple[tuple[AxisPlacement, ...], ...]:
    """The placements that each axis can have."""
    if len(given) == 1:
        return ((DDP, ZERO1, ZERO2, ZERO3),)
    return (HSDP, HFSDP), ((ZERO3,) if given[0] == HFSDP else (ZERO1, ZERO2, ZERO3))
