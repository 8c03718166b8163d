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
    uncovered: list[Interval] = []
    for covered_start, covered_end in covered:
        if covered_start > start:
            uncovered.append((start, min(covered_start, end)))
        start = max(start, covered_end)
        if start >= end:
            return uncovered
    return [*uncovered, (start, end)]


def intersect(intervals: Iterable[Interval], times: Sequence[Interval]) -> list[Interval]:
    """Return the intersection of both sets. Costs a bisection of `times` per interval of `intervals`."""
    common: list[Interval] = []
    for start, end in intervals:
        index = max(0, bisect_right(times, start, key=lambda interval: interval[0]) - 1)
        while index < len(times) and times[index][0] < end:
            common_start, common_end = max(start, times[index][0]), min(end, times[index][1])
            if common_start < common_end:
                common.append((common_start, common_end))
            index += 1
    return common


def length(intervals: Iterable[Interval]) -> float:
    """Return the total length of disjoint intervals."""
    return sum(end - start for start, end in intervals)
