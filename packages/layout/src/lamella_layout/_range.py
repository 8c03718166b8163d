"""Half-open ranges of flat elements, the result type of every layout."""

from typing import NamedTuple


class Range(NamedTuple):
    """Elements `start` to `stop - 1` of a flat buffer or of a flattened tensor.

    Test for emptiness with `numel == 0`: a tuple of two numbers is always true, empty range or not.
    """

    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Count the elements of the range."""
        return self.stop - self.start

    def intersection(self, other: "Range") -> "Range":
        """Return the common elements; for disjoint ranges an empty range at the end of `self` nearer to `other`."""
        start = min(max(self.start, other.start), self.stop)
        return Range(start, max(start, min(self.stop, other.stop)))

    def shift(self, num_elements: int) -> "Range":
        """Return the same elements, counted from an origin `num_elements` earlier."""
        return Range(self.start + num_elements, self.stop + num_elements)
