"""Sharded along dim 0 where torch's `Shard(0)` would not cut: how one tensor of a flat layout lies."""

from collections.abc import Sequence

from torch.distributed.tensor.placement_types import Placement

from lamella_layout._checks import check_at_least_one, check_rank
from lamella_layout._range import Range


class RaggedShard(Placement):
    """Rows are cut at given bounds: `bounds[rank]` to `bounds[rank + 1] - 1` are the rank's, maybe none.

    It answers False to `is_shard()`, since whoever hears True goes on to compute torch's chunks. DTensor itself refuses
    to compute with a placement that it does not know; a tensor class has to bring what it can do.

    Args:
        bounds: Indices of dim 0, one more than ranks: from 0 to the number of rows, none below the one before.
        stride: How many ranks one step along the axis is. 1, unless several axes share the rows: an inner axis cuts
            first, and with HFSDP's outer axis of N ranks one step along the inner one is N.

    Raises:
        ValueError: The bounds do not begin at 0 or go down, or `stride` is below 1.
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
        """Count the ranks that share the rows, of all axes together."""
        return len(self.bounds) - 1

    @property
    def owner(self) -> int | None:
        """Return the one rank that has all rows; None where several share them, or there are none."""
        owners = [rank for rank in range(self.num_shards) if self.rows(rank).numel]
        return owners[0] if len(owners) == 1 else None

    def rows(self, rank: int) -> Range:
        """Return the rows that `rank` owns.

        Effects: none.
        """
        check_rank(rank, self.num_shards)
        return Range(self.bounds[rank], self.bounds[rank + 1])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RaggedShard) and (self.bounds, self.stride) == (other.bounds, other.stride)

    def __hash__(self) -> int:
        return hash((RaggedShard, self.bounds, self.stride))

    def __repr__(self) -> str:
        stride = "" if self.stride == 1 else f", stride={self.stride}"
        return f"RaggedShard({self.bounds!r}{stride})"

    def __reduce__(self) -> tuple[type["RaggedShard"], tuple[object, ...]]:
        # The base class is not Python's, and pickles nothing of ours.
        return RaggedShard, (self.bounds, self.stride)


def ragged_rows(placements: Sequence[Placement], coordinate: Sequence[int]) -> Range | None:
    """Return the rows that the rank at `coordinate` of a mesh owns, None where no axis is ragged.

    Args:
        placements: One an axis. Ragged ones cut the same rows at the same bounds, each with its own stride.
        coordinate: Of the rank, one entry an axis.

    Raises:
        ValueError: Two axes have different bounds.

    Effects: none.
    """
    ragged = [(each, at) for each, at in zip(placements, coordinate, strict=True) if isinstance(each, RaggedShard)]
    if not ragged:
        return None
    first = ragged[0][0]
    if any(each.bounds != first.bounds for each, _ in ragged):
        raise ValueError(f"Expected ragged axes with the same bounds, got {tuple(placements)!r}.")
    return first.rows(sum(each.stride * at for each, at in ragged))
