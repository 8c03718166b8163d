"""What a rank holds of a tensor after any number of cuts, in global coordinates.

A chunk of a chunk is a chunk, but DTensor's strided shards are not: they take a piece out of every block. Along one
dim the result is a few runs of indices; over all dims, every combination of them. That product is closed under
further cuts, so outer axes (TP, EP) and inner ones (FSDP, HFSDP) compose by cutting in their order.
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
    """A part of a tensor: along each dim, runs of global indices in the order in which they lie in local memory.

    `Region.whole((8, 2)).shard(0, 2, 1).shard(0, 2, 0)` reads as it cuts: the first half of the second half.
    """

    runs: tuple[Runs, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Region":
        """Start from all of a tensor.

        Effects: none.
        """
        return cls(tuple(_merge([Range(0, size)]) for size in shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the sizes of the local tensor that holds this part; may hold a 0."""
        return tuple(_numel(runs) for runs in self.runs)

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """Return the boxes that make up the part, in the order of local memory; none when it is empty."""
        return tuple(Chunk.of(ranges) for ranges in product(*self.runs))

    def take(self, chunk: Chunk) -> "Region":
        """Keep one box of the local tensor.

        Args:
            chunk: In coordinates of the local tensor, whose shape is `shape`.

        Raises:
            ValueError: the box reaches outside the local tensor.

        Effects: none.
        """
        shape = self.shape
        within = Chunk((0,) * len(shape), shape)
        if len(chunk.sizes) != len(shape) or within.intersection(chunk) != chunk:
            raise ValueError(f"Expected a box inside the local tensor of shape {shape!r}, got {chunk!r}.")
        return Region(tuple(_take(runs, indices) for runs, indices in zip(self.runs, chunk.ranges, strict=True)))

    def shard(self, dim: int, num_shards: int, rank: int) -> "Region":
        """Keep what torch's `Shard(dim)` leaves to `rank` of an axis of `num_shards` ranks.

        Effects: none.
        """
        return self.strided_shard(dim, num_shards, rank, split_factor=1)

    def strided_shard(self, dim: int, num_shards: int, rank: int, *, split_factor: int) -> "Region":
        """Keep what torch's `_StridedShard(dim)` leaves to `rank`: chunk `rank` of each of `split_factor` blocks.

        DTensor applies placements from left to right. When an axis to the right has cut first (TP, with the
        data-parallel axis to its left), that order is kept by cutting inside the blocks it will take.

        Effects: none.
        """
        check_at_least_one("num_shards", num_shards)
        check_at_least_one("split_factor", split_factor)
        check_rank(rank, num_shards)
        dim = normal_dim(dim, len(self.runs))
        check_dim(dim, self.shape)
        runs = self.runs[dim]
        blocks = [torch_chunk(_numel(runs), split_factor, block) for block in range(split_factor)]
        pieces = [torch_chunk(block.numel, num_shards, rank).shift(block.start) for block in blocks]
        kept = _merge(run for piece in pieces for run in _take(runs, piece))
        return Region((*self.runs[:dim], kept, *self.runs[dim + 1 :]))


def region_of(chunk: Chunk, shape: Sequence[int], inside: Region | None) -> Region:
    """Place a chunk of a local tensor in the global one.

    Args:
        chunk: What a layout leaves to a rank of the tensor it was given.
        shape: Of that tensor.
        inside: What that tensor is of the global one; None when it is the global tensor itself.
    """
    if inside is None:
        return Region.whole(shape).take(chunk)
    if inside.shape != tuple(shape):
        raise ValueError(
            f"Expected a region of shape {tuple(shape)!r}, as the layout has it, got one of {inside.shape!r}."
        )
    return inside.take(chunk)


def _numel(runs: Runs) -> int:
    return sum(run.numel for run in runs)


def _take(runs: Runs, wanted: Range) -> Runs:
    """Keep the indices at local positions `wanted`."""
    taken, position = [], 0
    for run in runs:
        # Positions count from the first run's start, indices from 0: intersect in positions, answer in indices.
        offset = run.start - position
        taken.append(run.shift(-offset).intersection(wanted).shift(offset))
        position += run.numel
    return _merge(taken)


def _merge(runs: Iterable[Range]) -> Runs:
    """Drop empty runs and join those that touch, so that equal regions compare equal."""
    merged: list[Range] = []
    for run in runs:
        if merged and merged[-1].stop == run.start:
            merged[-1] = Range(merged[-1].start, run.stop)
        elif run.numel:
            merged.append(run)
    return tuple(merged)
