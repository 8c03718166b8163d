"""The placement of one tensor of a flat layout: sharded along dim 0 at explicit bounds."""

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property, lru_cache
from math import prod

from torch.distributed.tensor.placement_types import Placement

from lamella_layout._checks import Shape, check_at_least_one, check_rank
from lamella_layout._range import Range


class RaggedShard(Placement):
    """Dim 0 sharded at given bounds: `rank` owns rows `bounds[rank]` to `bounds[rank + 1] - 1`, maybe none.

    `is_shard()` is False, because callers that see True go on to compute torch's even chunks. DTensor refuses to
    compute with unknown placements: a tensor class has to implement its own operations.

    Args:
        bounds: Indices of dim 0, in ascending order, from 0 to the number of rows: one more than ranks.
        stride: Step in ranks between neighbours along the axis. 1, unless several axes share the rows: the inner axis
            cuts first, so with HFSDP's outer axis of N ranks the inner axis has stride N.

    Raises:
        ValueError: The bounds do not begin at 0 or descend, or `stride` is below 1.
    """

    def __init__(self, bounds: Sequence[int], stride: int = 1) -> None:
        super().__init__()
        self.bounds = tuple(int(bound) for bound in bounds)
        self.stride = stride
        check_at_least_one("stride", stride)
        if len(self.bounds) < 2 or self.bounds[0] != 0 or list(self.bounds) != sorted(self.bounds):
            raise ValueError(f"Expected bounds from 0 on that never go down, got {self.bounds!r}.")

    @property
    def num_shards(self) -> int:
        """Count the ranks that share the rows, over all axes together."""
        return len(self.bounds) - 1

    @property
    def owner(self) -> int | None:
        """Return the single owner of all rows; None when several ranks share the rows or the tensor has none."""
        after = bisect_right(self.bounds, 0)
        is_alone = after < len(self.bounds) and self.bounds[after] == self.bounds[-1]
        return after - 1 if is_alone else None

    def rows(self, rank: int) -> Range:
        """Return the rows owned by `rank`."""
        check_rank(rank, self.num_shards)
        return Range(self.bounds[rank], self.bounds[rank + 1])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RaggedShard) and (self.bounds, self.stride) == (other.bounds, other.stride)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # computed once: bounds hold a number a rank, and DTensor's caches have placements in keys
        return hash((RaggedShard, self.bounds, self.stride))

    def __repr__(self) -> str:
        stride = "" if self.stride == 1 else f", stride={self.stride}"
        return f"RaggedShard({self.bounds!r}{stride})"

    def __reduce__(self) -> tuple[type["RaggedShard"], tuple[object, ...]]:
        # Placement is a C++ class: default pickling would lose `bounds` and `stride`.
        return RaggedShard, (self.bounds, self.stride)


def ragged_rows(placements: Sequence[Placement], coordinate: Sequence[int]) -> Range | None:
    """Return the rows owned by the rank at `coordinate` of a mesh; None when no axis is ragged.

    Args:
        placements: One per axis. Ragged placements share their bounds, each with its own stride.
        coordinate: Coordinate of the rank, one entry per axis.

    Raises:
        ValueError: Two ragged axes have different bounds.
    """
    ragged = [
        (placement, position)
        for placement, position in zip(placements, coordinate, strict=True)
        if isinstance(placement, RaggedShard)
    ]
    if not ragged:
        return None
    first = ragged[0][0]
    if any(placement.bounds != first.bounds for placement, _ in ragged):
        raise ValueError(f"Expected ragged axes with the same bounds, got {tuple(placements)!r}.")
    return first.rows(sum(placement.stride * position for placement, position in ragged))


@lru_cache(maxsize=1024)
def packed_placement(start: int, shape: Shape, shard_numel: int, num_shards: int, stride: int) -> RaggedShard:
    """Return the placement of a tensor that starts at element `start` of a buffer of equal shards.

    One object for equal tensors: bounds hold a number a rank, and a model's layers would hold as many lists as
    parameters.
    """
    if not prod(shape):  # Rank 0 has all rows of a tensor without elements, as in `FlatLayout.chunk`.
        return RaggedShard((0, *[shape[0]] * num_shards), stride)
    row_numel, cuts = prod(shape[1:]), (shard_numel * rank - start for rank in range(num_shards))
    # A cut inside the tensor falls between two rows, by `FlatLayout`'s checks.
    bounds = [0 if cut <= 0 else min(shape[0], cut // row_numel) for cut in cuts]
    return RaggedShard((*bounds, shape[0]), stride)
