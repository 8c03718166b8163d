"""A rank's part of a tensor after any number of cuts, in global coordinates.

A chunk of a chunk is one box, but DTensor's strided shards take a piece out of every block. Along one dim a region is
a few runs of indices; over all dims, the product of the runs. Products stay products under further cuts, so outer axes
(TP, EP) and inner axes (FSDP, HFSDP) compose by cutting in order.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from lamella_layout._arithmetic import torch_chunk
from lamella_layout._checks import check_at_least_one, check_dim, check_rank, normal_dim
from lamella_layout._chunk import Chunk
from lamella_layout._range import Range

Runs = tuple[Range, ...]


@dataclass(frozen=True)
class Region:
    """A part of a tensor: along each dim, runs of global indices in the order of local memory.

    `Region.whole((8, 2)).shard(0, 2, 1).shard(0, 2, 0)` is the first half of the second half of the rows.
    """

    runs: tuple[Runs, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Region":
        """Return the region of an uncut tensor."""
        return cls(tuple(_merge([Range(0, size)]) for size in shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the sizes of the local tensor; one may be 0."""
        return tuple(_numel(runs) for runs in self.runs)

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """Return the region's boxes in the order of local memory; none when the region is empty."""
        return tuple(Chunk.of(ranges) for ranges in product(*self.runs))

    def take(self, chunk: Chunk) -> "Region":
        """Keep one box of the local tensor.

        Args:
            chunk: Box in coordinates of the local tensor of shape `shape`.

        Raises:
            ValueError: The box reaches outside the local tensor.
        """
        shape = self.shape
        within = Chunk((0,) * len(shape), shape)
        if len(chunk.sizes) != len(shape) or within.intersection(chunk) != chunk:
            raise ValueError(f"Expected a box inside the local tensor of shape {shape!r}, got {chunk!r}.")
        return Region(tuple(_take(runs, indices) for runs, indices in zip(self.runs, chunk.ranges, strict=True)))

    def shard(self, dim: int, num_shards: int, rank: int) -> "Region":
        """Keep `rank`'s chunk of torch's `Shard(dim)` on an axis of `num_shards` ranks."""
        return self.strided_shard(dim, num_shards, rank, split_factor=1)

    def strided_shard(self, dim: int, num_shards: int, rank: int, *, split_factor: int) -> "Region":
        """Keep `rank`'s part of torch's `_StridedShard(dim)`: chunk `rank` of each of `split_factor` blocks.

        DTensor applies placements from left to right. When an axis to the right cuts first (TP, with the data-parallel
        axis to its left), cutting inside each of that axis's blocks preserves the order.
        """
        check_at_least_one("num_shards", num_shards)
        check_at_least_one("split_factor", split_factor)
        check_rank(rank, num_shards)
        dim = normal_dim(dim, len(self.runs))
        check_dim(dim, self.shape)
        runs = self.runs[dim]
        blocks = [torch_chunk(_numel(runs), split_factor, block) for block in range(split_factor)]
        pieces = [torch_chunk(block.numel, num_shards, rank).shift(block.start) for block in blocks]
        remaining_runs = _merge(run for piece in pieces for run in _take(runs, piece))
        return Region((*self.runs[:dim], remaining_runs, *self.runs[dim + 1 :]))


def region_of(chunk: Chunk, shape: Sequence[int], outer: Region | None) -> Region:
    """Map a chunk of a local tensor to the global tensor.

    Args:
        chunk: A rank's box of the local tensor.
        shape: Shape of the local tensor.
        outer: Region of the global tensor held by the local tensor; None when the two are the same.
    """
    if outer is None:
        return Region.whole(shape).take(chunk)
    if outer.shape != tuple(shape):
        raise ValueError(
            f"Expected a region of shape {tuple(shape)!r}, the tensor's in the layout, got one of {outer.shape!r}."
        )
    return outer.take(chunk)


def _numel(runs: Runs) -> int:
    return sum(run.numel for run in runs)


def _take(runs: Runs, positions: Range) -> Runs:
    """Keep the indices at local positions `positions`."""
    runs_taken, position = [], 0
    for run in runs:
        # Positions count from the start of the first run, indices from 0: intersect positions, return indices.
        offset = run.start - position
        runs_taken.append(run.shift(-offset).intersection(positions).shift(offset))
        position += run.numel
    return _merge(runs_taken)


def _merge(runs: Iterable[Range]) -> Runs:
    """Drop empty runs and join adjacent runs: equal regions then compare equal."""
    merged: list[Range] = []
    for run in runs:
        if merged and merged[-1].stop == run.start:
            merged[-1] = Range(merged[-1].start, run.stop)
        elif run.numel:
            merged.append(run)
    return tuple(merged)
