"""Boxes inside a tensor: what a checkpoint calls a chunk, and what `Shard(dim)` cuts."""

from collections.abc import Iterable
from math import prod
from typing import NamedTuple

from lamella_layout._range import Range


class Chunk(NamedTuple):
    """The box of a tensor that starts at `offsets` and spans `sizes`, one entry a dim.

    A size may be 0: the rank owns nothing, and the chunk must not be written anywhere.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, ranges: Iterable[Range]) -> "Chunk":
        """Make the box that spans one range of indices along each dim."""
        along = tuple(ranges)
        return cls(tuple(indices.start for indices in along), tuple(indices.numel for indices in along))

    @property
    def ranges(self) -> tuple[Range, ...]:
        """Return the range of indices that the box spans along each dim."""
        return tuple(Range(offset, offset + size) for offset, size in zip(self.offsets, self.sizes, strict=True))

    @property
    def numel(self) -> int:
        """Count the elements of the box."""
        return prod(self.sizes)

    def intersection(self, other: "Chunk") -> "Chunk":
        """Return the box in both; where they do not meet, an empty box at the nearer end of this one."""
        offsets, sizes = [], []
        # As `Range.intersection`, written out: tables of ten thousands of tensors are made of these.
        for start, size, theirs, span in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            first = min(max(start, theirs), start + size)
            offsets.append(first)
            sizes.append(max(0, min(start + size, theirs + span) - first))
        return Chunk(tuple(offsets), tuple(sizes))

    def relative_to(self, origin: "Chunk") -> "Chunk":
        """Return the same elements in the coordinates of `origin`, as if its first element were at 0."""
        offsets = tuple(mine - theirs for mine, theirs in zip(self.offsets, origin.offsets, strict=True))
        return Chunk(offsets, self.sizes)
