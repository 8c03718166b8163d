"""Half-open ranges of flat elements: the one unit in which every layout answers."""

from typing import NamedTuple


class Range(NamedTuple):
    """Elements `start` to `stop - 1` of a flat buffer or of a flattened tensor.

    Ask for emptiness with `numel == 0`: a tuple of two is always true, so `if range_:` would be too.
    """

    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Count the elements of the range."""
        return self.stop - self.start

    def intersection(self, other: "Range") -> "Range":
        """Return the elements in both ranges; where they do not meet, an empty range at the nearer end of this one."""
        start = min(max(self.start, other.start), self.stop)
        return Range(start, max(start, min(self.stop, other.stop)))

    def shift(self, num_elements: int) -> "Range":
        """Return the same elements counted from an origin `num_elements` earlier."""
        return Range(self.start + num_elements, self.stop + num_elements)
