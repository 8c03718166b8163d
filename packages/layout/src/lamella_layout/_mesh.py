"""Chunk tables of a tensor on a mesh: who holds which boxes, for any placements and any order of the cuts."""

from collections.abc import Sequence
from itertools import product
from math import prod

from torch.distributed.tensor.placement_types import Placement, Shard, _StridedShard

from lamella_layout._checks import check_at_least_one, check_dim, check_rank, normal_dim
from lamella_layout._chunk import Chunk
from lamella_layout._ragged import RaggedShard, ragged_rows
from lamella_layout._range import Range
from lamella_layout._region import Region


def mesh_region(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    placements: Sequence[Placement],
    coordinate: Sequence[int],
    *,
    order: Sequence[int] | None = None,
) -> Region:
    """Return what the rank at `coordinate` of a mesh holds of a tensor.

    Args:
        shape: Of the global tensor.
        mesh_shape: Ranks along each axis of the mesh.
        placements: One an axis: `Shard`, `_StridedShard`, `RaggedShard`, of which the last goes with none of the
            others; `Replicate` and `Partial` cut nothing.
        coordinate: Of the rank, one entry an axis.
        order: Axes in the order in which they cut. None means left to right, as DTensor does. On a (dp, tp) mesh
            (1, 0) puts TP outermost; on an (outer, inner) mesh it is HFSDP: inner first, then outer within the
            inner shard.

    Returns:
        The region, equal to torch's own shards for every `placements` when `order` is None.

    Raises:
        ValueError: lengths differ from the mesh's, a dim or coordinate is out of range, `order` is no permutation
            of the axes, or it comes with a `_StridedShard`, which says the order already; a `RaggedShard` beside
            another, or one of other rows than the tensor's or for another number of ranks than its axes have.

    Effects: none.
    """
    _check_mesh(mesh_shape, placements, order)
    _check_coordinate(mesh_shape, coordinate)
    _check_dims(shape, placements)
    region = Region.whole(shape)
    if any(isinstance(placement, RaggedShard) for placement in placements):
        return _cut_ragged(region, mesh_shape, placements, coordinate)
    for axis in range(len(mesh_shape)) if order is None else order:
        region = _cut(region, placements[axis], mesh_shape[axis], coordinate[axis])
    return region


def mesh_chunks(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    placements: Sequence[Placement],
    *,
    order: Sequence[int] | None = None,
) -> tuple[tuple[Chunk, ...], ...]:
    """Return the global boxes that each rank of a mesh holds, ranks in row-major order; none where it holds nothing.

    Takes the arguments of `mesh_region`. Effects: none.
    """
    _check_mesh(mesh_shape, placements, order)
    coordinates = product(*(range(num_ranks) for num_ranks in mesh_shape))
    return tuple(mesh_region(shape, mesh_shape, placements, at, order=order).chunks for at in coordinates)


def strided_placements(
    mesh_shape: Sequence[int], placements: Sequence[Placement], *, order: Sequence[int]
) -> tuple[Placement, ...]:
    """Return placements with which DTensor, going left to right, cuts as `order` does.

    An axis becomes a `_StridedShard` when axes to its right cut the same dim before it; `split_factor` counts the
    blocks they make. Exact when the dim divides by all its axes. Otherwise torch may differ from `order`: of 9 rows
    on a (4, 2) mesh cut in order (1, 0), it gives row 8 to rank (3, 0), not (3, 1). Compare `mesh_chunks` of both
    before wrapping a local tensor in a plain `DTensor`.

    Args:
        mesh_shape: Ranks along each axis of the mesh.
        placements: One an axis, none of them `_StridedShard`.
        order: Axes in the order in which they cut.

    Raises:
        ValueError: See `mesh_region`; or some dims are counted from the first and some from the last, which may or may
            not be the same: only the tensor could tell.

    Effects: none.
    """
    _check_mesh(mesh_shape, placements, order)
    if len({placement.dim < 0 for placement in placements if isinstance(placement, Shard)}) > 1:
        raise ValueError(f"Expected dims all counted from the first, or all from the last, got {tuple(placements)!r}.")
    return tuple(_strided(axis, mesh_shape, placements, order) for axis in range(len(mesh_shape)))


def _cut(region: Region, placement: Placement, num_shards: int, rank: int) -> Region:
    if isinstance(placement, _StridedShard):
        return region.strided_shard(placement.dim, num_shards, rank, split_factor=int(placement.split_factor))
    return region.shard(placement.dim, num_shards, rank) if isinstance(placement, Shard) else region


def _cut_ragged(
    region: Region, mesh_shape: Sequence[int], placements: Sequence[Placement], coordinate: Sequence[int]
) -> Region:
    rows, shape = ragged_rows(placements, coordinate), region.shape
    cuts = [
        (placement, num_ranks)
        for placement, num_ranks in zip(placements, mesh_shape, strict=True)
        if isinstance(placement, RaggedShard | Shard | _StridedShard)
    ]
    num_rows, num_ranks = shape[0] if shape else None, prod(num_ranks for _, num_ranks in cuts)
    for cut, _ in cuts:
        if not isinstance(cut, RaggedShard) or (cut.bounds[-1], cut.num_shards) != (num_rows, num_ranks):
            raise ValueError(
                f"Expected ragged placements of {num_rows} rows over {num_ranks} ranks, with no Shard beside them, got "
                f"{tuple(placements)!r} on a mesh of {tuple(mesh_shape)!r}."
            )
    assert rows is not None
    return region.take(Chunk.of([rows, *(Range(0, size) for size in shape[1:])]))


def _strided(axis: int, mesh_shape: Sequence[int], placements: Sequence[Placement], order: Sequence[int]) -> Placement:
    placement = placements[axis]
    if not isinstance(placement, Shard):
        return placement
    earlier = list(order)[: list(order).index(axis)]
    split_factor = prod(mesh_shape[other] for other in earlier if other > axis and placements[other] == placement)
    return placement if split_factor == 1 else _StridedShard(placement.dim, split_factor=split_factor)


def _check_dims(shape: Sequence[int], placements: Sequence[Placement]) -> None:
    """Refuse dims in terms of the whole tensor, before the cuts change its shape."""
    for placement in placements:
        if isinstance(placement, Shard | _StridedShard):
            check_dim(normal_dim(placement.dim, len(shape)), shape)


def _check_coordinate(mesh_shape: Sequence[int], coordinate: Sequence[int]) -> None:
    if len(coordinate) != len(mesh_shape):
        raise ValueError(f"Expected one coordinate an axis ({len(mesh_shape)} axes), got {tuple(coordinate)!r}.")
    for rank, num_ranks in zip(coordinate, mesh_shape, strict=True):
        check_rank(rank, num_ranks)


def _check_mesh(mesh_shape: Sequence[int], placements: Sequence[Placement], order: Sequence[int] | None) -> None:
    for num_ranks in mesh_shape:
        check_at_least_one("ranks along every axis", num_ranks)
    if len(placements) != len(mesh_shape):
        raise ValueError(f"Expected one placement an axis ({len(mesh_shape)} axes), got {len(placements)}.")
    if order is None:
        return
    if sorted(order) != list(range(len(mesh_shape))):
        raise ValueError(f"Expected an order of the axes 0..{len(mesh_shape) - 1}, each once, got {tuple(order)!r}.")
    if any(isinstance(placement, _StridedShard) for placement in placements):
        raise ValueError(
            f"Expected plain Shard placements together with an order, got {tuple(placements)!r}. "
            "A _StridedShard says the order itself: leave one of the two out."
        )
