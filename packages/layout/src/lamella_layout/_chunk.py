"""Boxes inside a tensor: the chunks of `Shard(dim)` and of checkpoints."""

from collections.abc import Iterable
from math import prod
from typing import NamedTuple

from lamella_layout._range import Range


class Chunk(NamedTuple):
    """The box of a tensor from `offsets`, spanning `sizes`; one entry per dim.

    A size of 0 marks an empty chunk: the rank owns no elements, and checkpoints must not write the chunk.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, ranges: Iterable[Range]) -> "Chunk":
        """Make a box from one range of indices per dim."""
        along = tuple(ranges)
        return cls(tuple(indices.start for indices in along), tuple(indices.numel for indices in along))

    @property
    def ranges(self) -> tuple[Range, ...]:
        """Return the box's range of indices along each dim."""
        return tuple(Range(offset, offset + size) for offset, size in zip(self.offsets, self.sizes, strict=True))

    @property
    def numel(self) -> int:
        """Count the elements of the box."""
        return prod(self.sizes)

    def intersection(self, other: "Chunk") -> "Chunk":
        """Return the common box; for disjoint boxes an empty box at the end of `self` nearer to `other`."""
        offsets, sizes = [], []
        # `Range.intersection` inlined: tables of tens of thousands of tensors call this method for every chunk.
        for start, size, theirs, span in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            first = min(max(start, theirs), start + size)
            offsets.append(first)
            sizes.append(max(0, min(start + size, theirs + span) - first))
        return Chunk(tuple(offsets), tuple(sizes))

    def relative_to(self, origin: "Chunk") -> "Chunk":
        """Return the same elements in coordinates counted from the first element of `origin`."""
        offsets = tuple(mine - theirs for mine, theirs in zip(self.offsets, origin.offsets, strict=True))
        return Chunk(offsets, self.sizes)
