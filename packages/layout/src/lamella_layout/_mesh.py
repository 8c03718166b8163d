"""Chunk tables of a tensor on a mesh: the boxes of each rank, for any placements and any order of the cuts."""

from collections.abc import Callable, Sequence
from itertools import product
from math import prod

from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard

from lamella_layout._arithmetic import ceil_div
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
    """Return the region of a tensor held by the rank at `coordinate` of a mesh.

    Args:
        shape: Shape of the global tensor.
        mesh_shape: Number of ranks along each axis of the mesh.
        placements: One per axis: `Shard`, `_StridedShard` or `RaggedShard`; `Replicate` and `Partial` cut nothing.
            Ragged axes are one cut together, at bounds in the rows that earlier cuts leave.
        coordinate: Coordinate of the rank, one entry per axis.
        order: Axes in their order of cutting. None means DTensor's order, left to right. On a (dp, tp) mesh (1, 0)
            puts TP outermost; on an (outer, inner) mesh (1, 0) is HFSDP: inner first, then outer within the inner
            shard.

    Returns:
        The region, equal to torch's own shards for every placement of torch's when `order` is None.

    Raises:
        ValueError: Lengths differ from the mesh's; a dim or coordinate is out of range; `order` is no permutation
            of the axes, or comes with a `_StridedShard`, which fixes the order already; ragged axes have different
            bounds, differ from the rows left to cut or from their axes in ranks, or another axis cuts dim 0 between
            two.
    """
    _check_mesh(mesh_shape, placements, order)
    _check_coordinate(mesh_shape, coordinate)
    _check_dims(shape, placements)
    axes = range(len(mesh_shape)) if order is None else order
    ragged = [axis for axis in axes if isinstance(placements[axis], RaggedShard)]
    _check_ragged_together(shape, placements, axes, ragged)
    region = Region.whole(shape)
    for axis in axes:
        if axis not in ragged:
            region = _cut(region, placements[axis], mesh_shape[axis], coordinate[axis])
        elif axis == ragged[0]:
            region = _cut_ragged(region, mesh_shape, placements, coordinate)
    return region


def mesh_chunks(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    placements: Sequence[Placement],
    *,
    order: Sequence[int] | None = None,
) -> tuple[tuple[Chunk, ...], ...]:
    """Return each rank's boxes of the global tensor, possibly none; ranks in row-major order of the mesh.

    Arguments and errors as for `mesh_region`.
    """
    _check_mesh(mesh_shape, placements, order)
    coordinates = product(*(range(num_ranks) for num_ranks in mesh_shape))
    return tuple(mesh_region(shape, mesh_shape, placements, at, order=order).chunks for at in coordinates)


def mesh_owners(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    placements: Sequence[Placement],
    *,
    order: Sequence[int] | None = None,
) -> tuple[bool, ...]:
    """Tell for each rank whether the rank holds elements of a tensor; ranks in row-major order of the mesh.

    Equal to `bool` of each entry of `mesh_chunks`. Each dim is asked once, along the axes that cut it, and mostly by
    arithmetic alone: for a mesh of 16,384 ranks milliseconds in place of a second.

    Arguments and errors as for `mesh_region`.
    """
    _check_mesh(mesh_shape, placements, order)
    _check_dims(shape, placements)
    ranks = list(product(*map(range, mesh_shape)))
    if not prod(shape):
        return (False,) * len(ranks)
    owns = [True] * len(ranks)
    for dim, num_rows in enumerate(shape):
        axes = [axis for axis, placement in enumerate(placements) if _dim_of(placement, len(shape)) == dim]
        if axes:
            along = _owners_along(num_rows, mesh_shape, placements, axes, order)
            owns = [owned and along(tuple(at[axis] for axis in axes)) for owned, at in zip(owns, ranks, strict=True)]
    return tuple(owns)


def _dim_of(placement: Placement, ndim: int) -> int | None:
    if isinstance(placement, Shard | _StridedShard):
        return normal_dim(placement.dim, ndim)
    return 0 if isinstance(placement, RaggedShard) else None


def _owners_along(
    num_rows: int,
    mesh_shape: Sequence[int],
    placements: Sequence[Placement],
    axes: Sequence[int],
    order: Sequence[int] | None,
) -> Callable[[tuple[int, ...]], bool]:
    """Return the function that tells, by coordinates on the axes that cut a dim, whether a rank has rows of it."""
    cuts, sizes = [placements[axis] for axis in axes], [mesh_shape[axis] for axis in axes]
    if _in_equal_parts(num_rows, cuts, sizes):
        return lambda at: True
    if len(cuts) == 1 and not isinstance(cuts[0], _StridedShard | RaggedShard):
        num_owners = ceil_div(num_rows, ceil_div(num_rows, sizes[0]))
        return lambda at: at[0] < num_owners
    if all(isinstance(cut, RaggedShard) for cut in cuts):
        return lambda at: bool((ragged_rows(cuts, at) or Range(0, 0)).numel)
    # Any other mix: the regions of the rows alone, in a mesh without further cuts.
    alone = [_along_rows(placement) if axis in axes else Replicate() for axis, placement in enumerate(placements)]
    owns = {}
    for at in product(*map(range, sizes)):
        coordinate = [0] * len(mesh_shape)
        for axis, position in zip(axes, at, strict=True):
            coordinate[axis] = position
        owns[at] = bool(mesh_region((num_rows,), mesh_shape, alone, coordinate, order=order).chunks)
    return owns.__getitem__


def _in_equal_parts(num_rows: int, cuts: Sequence[Placement], sizes: Sequence[int]) -> bool:
    """Tell whether all ranks get equally many rows, with strided shards that undo the cuts of the axes behind."""
    if any(isinstance(cut, RaggedShard) for cut in cuts) or num_rows % prod(sizes):
        return False
    return all(
        int(cut.split_factor) == prod(sizes[i + 1 :]) for i, cut in enumerate(cuts) if isinstance(cut, _StridedShard)
    )


def _along_rows(placement: Placement) -> Placement:
    """Return the placement of one dim's rows alone."""
    if isinstance(placement, _StridedShard):
        return _StridedShard(0, split_factor=int(placement.split_factor))
    return placement if isinstance(placement, RaggedShard) else Shard(0)


def strided_placements(
    mesh_shape: Sequence[int], placements: Sequence[Placement], *, order: Sequence[int]
) -> tuple[Placement, ...]:
    """Return placements that make DTensor, cutting left to right, produce the cuts of `order`.

    An axis becomes a `_StridedShard` when axes to its right cut the same dim earlier; `split_factor` is the number of
    blocks made by the earlier axes. Exact when the number of ranks of all its axes divides the dim. Otherwise torch
    may differ from `order`: of 9 rows on a (4, 2) mesh cut in order (1, 0), torch gives row 8 to rank (3, 0), not
    (3, 1). Compare `mesh_chunks` of both before wrapping a local tensor in a plain `DTensor`.

    Args:
        mesh_shape: Number of ranks along each axis of the mesh.
        placements: One per axis, no `_StridedShard`. A `RaggedShard` stays as it is.
        order: Axes in their order of cutting.

    Raises:
        ValueError: See `mesh_region`. Also where some dims count from the first and some from the last: without the
            tensor's number of dims, -1 and 1 cannot be compared.
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
    """Cut by all ragged axes together."""
    rows, shape = ragged_rows(placements, coordinate), region.shape
    assert rows is not None
    along = zip(placements, mesh_shape, strict=True)
    cuts = [(placement, num) for placement, num in along if isinstance(placement, RaggedShard)]
    num_rows, num_ranks = shape[0] if shape else None, prod(num for _, num in cuts)
    for cut, _ in cuts:
        if (cut.bounds[-1], cut.num_shards) != (num_rows, num_ranks):
            raise ValueError(
                f"Expected ragged placements of {num_rows} rows over {num_ranks} ranks, got {tuple(placements)!r} on a "
                f"mesh of {tuple(mesh_shape)!r}. Bounds count the rows that earlier cuts leave; `order` tells which "
                "axis cuts earlier."
            )
    return region.take(Chunk.of([rows, *(Range(0, size) for size in shape[1:])]))


def _strided(axis: int, mesh_shape: Sequence[int], placements: Sequence[Placement], order: Sequence[int]) -> Placement:
    placement = placements[axis]
    if not isinstance(placement, Shard):
        return placement
    earlier = list(order)[: list(order).index(axis)]
    split_factor = prod(mesh_shape[other] for other in earlier if other > axis and placements[other] == placement)
    return placement if split_factor == 1 else _StridedShard(placement.dim, split_factor=split_factor)


def _check_ragged_together(
    shape: Sequence[int], placements: Sequence[Placement], axes: Sequence[int], ragged: Sequence[int]
) -> None:
    """Refuse an axis that cuts dim 0 between two ragged axes, whose bounds describe a single cut."""
    between = axes[axes.index(ragged[0]) : axes.index(ragged[-1])] if ragged else ()
    for axis in between:
        cut = placements[axis]
        if isinstance(cut, Shard | _StridedShard) and normal_dim(cut.dim, len(shape)) == 0:
            raise ValueError(
                f"Expected ragged axes with no cut of dim 0 between them, got one by axis {axis} of "
                f"{tuple(placements)!r} in the order {tuple(axes)!r}. Cut by the axis before both, or after both."
            )


def _check_dims(shape: Sequence[int], placements: Sequence[Placement]) -> None:
    """Check dims against the global tensor, before the cuts change its shape."""
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
