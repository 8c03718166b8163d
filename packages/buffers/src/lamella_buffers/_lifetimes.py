"""Offsets for allocations that come and go: allocations alive together lie apart (interval colouring)."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Lifetime(Generic[K]):
    """Bytes that `key` held from tick `start` until just before tick `end`."""

    key: K
    nbytes: int
    start: int
    end: int


def peak_nbytes(trace: Iterable[Lifetime[K]]) -> int:
    """The most bytes alive at once: a lower bound for every placement."""
    changes = [change for life in trace for change in ((life.start, life.nbytes), (life.end, -life.nbytes))]
    peak = live = 0
    for _, nbytes in sorted(changes):  # within a tick ends come first: they are negative
        live += nbytes
        peak = max(peak, live)
    return peak


def place(traces: Sequence[Sequence[Lifetime[K]]]) -> dict[K, int]:
    """An offset for each allocation of several traces; traces never overlap in time.

    Allocations of equal size in a single trace take exactly `peak_nbytes` if placed in order of their starts: every
    earlier allocation met by a new allocation is alive at the new start. For unequal sizes no order is known to be
    best. Largest first, or slots as large as their largest occupant, often does better; the smallest result of the
    three wins.

    Args:
        traces: Traces in any order, repeated any number of times. An allocation in several traces has the same size and
            offset in all.

    Returns:
        The offset of each allocation, in bytes, from 0 on. Time grows with the number of overlapping pairs.
    """
    nbytes: dict[K, int] = {}
    met: dict[K, set[K]] = {}
    for trace in traces:
        in_order = sorted(trace, key=lambda life: life.start)
        nbytes |= {life.key: life.nbytes for life in in_order}
        _add_meetings(met, in_order)
    by_start = _place_in_order(list(nbytes), nbytes, met)
    by_size = _place_in_order(sorted(nbytes, key=lambda key: -nbytes[key]), nbytes, met)
    in_slots = _place_in_slots(nbytes, met)
    return min(by_start, by_size, in_slots, key=lambda offsets: extent(offsets, nbytes))


def extent(offsets: Mapping[K, int], nbytes: Mapping[K, int]) -> int:
    """The end of the last placed allocation."""
    return max((offset + nbytes[key] for key, offset in offsets.items()), default=0)


def _add_meetings(met: dict[K, set[K]], in_order: Iterable[Lifetime[K]]) -> None:
    """Note for each allocation the overlapping lifetimes, in both directions."""
    alive: list[Lifetime[K]] = []
    for life in in_order:
        # Half-open: a lifetime that ends at this start has given its bytes back, and its place may be taken.
        alive = [other for other in alive if other.end > life.start]
        mine = met.setdefault(life.key, set())
        # Both directions: either of the two may be placed first.
        for other in alive:
            mine.add(other.key)
            met[other.key].add(life.key)
        alive.append(life)


def _place_in_order(order: Iterable[K], nbytes: Mapping[K, int], met: Mapping[K, set[K]]) -> dict[K, int]:
    """Give each allocation the smallest sufficient gap between overlapping ones, or else the end."""
    offsets: dict[K, int] = {}
    for key in order:
        occupied = sorted((offsets[other], offsets[other] + nbytes[other]) for other in met[key] if other in offsets)
        offsets[key] = _smallest_gap(occupied, nbytes[key])
    return offsets


def _place_in_slots(nbytes: Mapping[K, int], met: Mapping[K, set[K]]) -> dict[K, int]:
    """Colour the allocations as if of equal size; a colour's slot is as large as its largest occupant."""
    # Offsets of allocations of size 1 are the numbers of the slots.
    slots = _place_in_order(nbytes, dict.fromkeys(nbytes, 1), met)
    sizes = [0] * extent(slots, dict.fromkeys(slots, 1))
    for key, slot in slots.items():
        sizes[slot] = max(sizes[slot], nbytes[key])
    offsets = list(accumulate(sizes, initial=0))
    return {key: offsets[slot] for key, slot in slots.items()}


def _smallest_gap(occupied: Iterable[tuple[int, int]], nbytes: int) -> int:
    best: tuple[int, int] | None = None
    end = 0
    for start, stop in occupied:
        if start - end >= nbytes and (best is None or start - end < best[0]):
            best = (start - end, end)
        end = max(end, stop)  # they may overlap: each met the new allocation, but not each other
    return end if best is None else best[1]
