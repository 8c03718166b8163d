"""Prefetch: the units gathered before their turn, one unit or as many as a budget of bytes holds."""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable
from itertools import islice

from lamella_engine._unit.unit import Unit
from lamella_engine._unit.weights import Residency


class GatheredAhead:
    """The units prefetched by a learned order, until their run.

    Every choice follows from the program and from sizes known to every rank: ranks with the same program choose alike.

    Attributes:
        budget: The most bytes of prefetched units together; the first unit counts as fitting. None means one unit.
    """

    def __init__(self) -> None:
        self.budget: int | None = None
        # Added by `choose` and `add`; a unit's own turn removes it. Weak: modules own units, and prefetch must not keep
        # a deleted model's memory.
        self._units: dict[int, weakref.ref[Unit]] = {}

    def free(self, units: Container[int]) -> None:
        """Free prefetched units passed over by the order, to make room for the next prefetch.

        Effects: the gather stream waits for the compute stream; not a collective.
        """
        for unit in self._waiting():
            if unit.index in units:
                unit.weights.reshard()

    def choose(self, running: Unit, upcoming: Iterable[Unit]) -> list[Unit]:
        """The units to prefetch now.

        Args:
            running: The unit that begins to run.
            upcoming: The units expected after the running unit, in order.
        """
        self._units.pop(running.index, None)
        if self.budget is not None:
            chosen = self._within(self.budget, running, upcoming)
        else:
            # A unit waits already: a second gather would hold a third unit's bytes, more than the default promises.
            for ref in self._units.values():
                if (unit := ref()) is not None and unit.weights.residency is Residency.UNSHARDING:
                    return []
            chosen = list(islice(upcoming, 1))
        for unit in chosen:
            if unit.weights.residency not in (Residency.UNSHARDING, Residency.UNSHARDED):
                self._units[unit.index] = weakref.ref(unit)
        return chosen

    def add(self, unit: Unit) -> None:
        """Count a prefetched unit."""
        self._units[unit.index] = weakref.ref(unit)

    def _within(self, budget: int, running: Unit, upcoming: Iterable[Unit]) -> list[Unit]:
        """As many upcoming units as fit beside the units prefetched already.

        The first unit too large ends the choice; no smaller unit is taken instead. Unsharded units cost
        nothing, except the running unit, which is freed before its next turn.
        """
        nbytes = sum(unit.parameters.unsharded_nbytes for unit in self._waiting())
        chosen: dict[int, Unit] = {}
        for unit in upcoming:
            is_there = unit.weights.residency in (Residency.UNSHARDING, Residency.UNSHARDED)
            if unit.index in chosen or (is_there and unit is not running):
                continue
            if nbytes and nbytes + unit.parameters.unsharded_nbytes > budget:
                break
            nbytes += unit.parameters.unsharded_nbytes
            chosen[unit.index] = unit
        chosen.pop(running.index, None)
        return list(chosen.values())

    def _waiting(self) -> list[Unit]:
        """Prefetched units with a gather not waited for; a unit may have been resharded meanwhile."""
        at_work = Residency.UNSHARDING
        return [u for ref in self._units.values() if (u := ref()) is not None and u.weights.residency is at_work]
