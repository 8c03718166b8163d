"""Offsets for allocations that come and go, so that those which are alive together lie apart: interval colouring."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Lifetime(Generic[K]):
    """Bytes that `what` held from tick `start` until just before tick `end`."""

    what: K
    nbytes: int
    start: int
    end: int


def peak_nbytes(trace: Iterable[Lifetime[K]]) -> int:
    """The most bytes that were alive at once: no placement of them can be smaller.

    Effects: none.
    """
    changes = [change for life in trace for change in ((life.start, life.nbytes), (life.end, -life.nbytes))]
    peak = live = 0
    for _, nbytes in sorted(changes):  # of one tick, what ends comes first: it is negative
        live += nbytes
        peak = max(peak, live)
    return peak


def place(traces: Sequence[Sequence[Lifetime[K]]]) -> dict[K, int]:
    """An offset for each allocation of several traces, of which one at a time happens.

    Allocations of equal size in a single trace take exactly `peak_nbytes`: in the order in which they begin, each finds
    all placed ones that it meets alive at one tick, its own start. With other sizes that is no rule, and none is known
    that is always best: the largest first, or slots as large as the largest that goes in, are often better. Of the
    three the smallest is taken.

    Args:
        traces: One after another, however often. What is of the same name in several has one size and gets one offset.

    Returns:
        The offset of each allocation, in bytes, from 0 on.

    Effects: none. Time grows with the pairs that meet.
    """
    nbytes: dict[K, int] = {}
    met: dict[K, set[K]] = {}
    for trace in traces:
        in_order = sorted(trace, key=lambda life: life.start)
        nbytes |= {life.what: life.nbytes for life in in_order}
        _add_meetings(met, in_order)
    by_start = _place_in_order(list(nbytes), nbytes, met)
    by_size = _place_in_order(sorted(nbytes, key=lambda what: -nbytes[what]), nbytes, met)
    in_slots = _place_in_slots(nbytes, met)
    return min(by_start, by_size, in_slots, key=lambda offsets: extent(offsets, nbytes))


def extent(offsets: Mapping[K, int], nbytes: Mapping[K, int]) -> int:
    """Where the last of the placed allocations ends.

    Effects: none.
    """
    return max((offset + nbytes[what] for what, offset in offsets.items()), default=0)


def _add_meetings(met: dict[K, set[K]], in_order: Iterable[Lifetime[K]]) -> None:
    """Note for each allocation which others were alive at some moment of its life."""
    alive: list[Lifetime[K]] = []
    for life in in_order:
        alive = [other for other in alive if other.end > life.start]
        mine = met.setdefault(life.what, set())
        for other in alive:
            mine.add(other.what)
            met[other.what].add(life.what)
        alive.append(life)


def _place_in_order(order: Iterable[K], nbytes: Mapping[K, int], met: Mapping[K, set[K]]) -> dict[K, int]:
    """Give each the smallest gap that holds it, between those it meets, or else the end."""
    offsets: dict[K, int] = {}
    for what in order:
        taken = sorted((offsets[other], offsets[other] + nbytes[other]) for other in met[what] if other in offsets)
        offsets[what] = _smallest_gap(taken, nbytes[what])
    return offsets


def _place_in_slots(nbytes: Mapping[K, int], met: Mapping[K, set[K]]) -> dict[K, int]:
    """Colour them as if all were of one size, and make each colour's slot as large as it must be."""
    slots = _place_in_order(nbytes, dict.fromkeys(nbytes, 1), met)
    sizes = [0] * extent(slots, dict.fromkeys(slots, 1))
    for what, slot in slots.items():
        sizes[slot] = max(sizes[slot], nbytes[what])
    offsets = list(accumulate(sizes, initial=0))
    return {what: offsets[slot] for what, slot in slots.items()}


def _smallest_gap(taken: Iterable[tuple[int, int]], nbytes: int) -> int:
    best: tuple[int, int] | None = None
    end = 0
    for start, stop in taken:
        if start - end >= nbytes and (best is None or start - end < best[0]):
            best = (start - end, end)
        end = max(end, stop)
    return end if best is None else best[1]
