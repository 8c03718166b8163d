"""Sets of times: disjoint (start, end) pairs in ascending order, in microseconds."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the times covered by at least one interval; intervals in any order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def gaps(covered: Iterable[Interval], start: float, end: float) -> list[Interval]:
    """Return the times from `start` to `end` outside `covered`."""
    found: list[Interval] = []
    for left, right in covered:
        if left > start:
            found.append((start, min(left, end)))
        start = max(start, right)
        if start >= end:
            return found
    return [*found, (start, end)]


def intersect(few: Iterable[Interval], many: Sequence[Interval]) -> list[Interval]:
    """Return the times in both sets. Costs a bisection of `many` per interval of `few`."""
    common: list[Interval] = []
    for start, end in few:
        index = max(0, bisect_right(many, start, key=lambda interval: interval[0]) - 1)
        while index < len(many) and many[index][0] < end:
            left, right = max(start, many[index][0]), min(end, many[index][1])
            if left < right:
                common.append((left, right))
            index += 1
    return common


def length(intervals: Iterable[Interval]) -> float:
    """Return the total length of disjoint intervals."""
    return sum(end - start for start, end in intervals)
