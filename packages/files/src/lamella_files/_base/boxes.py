"""Boxes of tensors: the whole, parts as views, places in memory, overlaps."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, product
from typing import Final

import torch

from lamella_layout import Chunk, Range, Region

_MAX_NUMEL: Final = 1 << 58  # torch counts bytes in 63 bits, for elements of up to sixteen; empty dims count as one.


def whole_box(shape: Sequence[int]) -> Chunk:
    """The box of a whole tensor."""
    return Chunk((0,) * len(shape), tuple(shape))


def are_sizes(sizes: Iterable[object]) -> bool:
    """Whether torch could count the elements and bytes of a tensor of such sizes, in any dtype."""
    numel = 1
    for size in sizes:
        if type(size) is not int or size < 0:
            return False
        numel *= max(size, 1)
    return numel <= _MAX_NUMEL


def box_of(tensor: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    """A box of a tensor, as a view."""
    if tuple(tensor.shape) == chunk.sizes:
        return tensor
    return tensor[tuple(slice(along.start, along.stop) for along in chunk.ranges)]


def places_in_memory(region: Region) -> list[Chunk]:
    """The place of each of a region's chunks in the local tensor, in the order of `region.chunks`."""
    return [Chunk.of(ranges) for ranges in product(*map(_places_along, region.runs))]


def first_overlap(chunks: Sequence[Chunk]) -> tuple[Chunk, Chunk] | None:
    """Two overlapping chunks, if any.

    Time is quadratic in the number of chunks beside each other along dim 0.
    """
    disjoint: list[Chunk] = []
    for chunk in sorted(chunk for chunk in chunks if chunk.numel):
        if not chunk.sizes:
            disjoint = disjoint[:1]
        else:
            disjoint = [other for other in disjoint if other.offsets[0] + other.sizes[0] > chunk.offsets[0]]
        for other in disjoint:
            if chunk.intersection(other).numel:
                return other, chunk
        disjoint.append(chunk)
    return None


def _places_along(runs: tuple[Range, ...]) -> Iterator[Range]:
    ends = accumulate(run.numel for run in runs)
    return (Range(end - run.numel, end) for run, end in zip(runs, ends, strict=True))
