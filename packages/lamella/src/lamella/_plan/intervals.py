"""Times that are covered: disjoint (start, stop) pairs in ascending order."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def joined(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the times in at least one of the intervals."""
    union: list[Interval] = []
    for start, stop in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = union[-1][0], max(stop, union[-1][1])
        else:
            union.append((start, stop))
    return union


def length(times: Iterable[Interval]) -> float:
    """Return the total of disjoint times."""
    return sum(stop - start for start, stop in times)


def covered(interval: Interval, times: Sequence[Interval]) -> float:
    """Return the part of an interval that disjoint times in ascending order cover."""
    start, stop = interval
    index = max(0, bisect_right(times, start, key=lambda other: other[0]) - 1)
    total = 0.0
    while index < len(times) and times[index][0] < stop:
        total += max(0.0, min(stop, times[index][1]) - max(start, times[index][0]))
        index += 1
    return total
