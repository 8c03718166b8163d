"""Which units are gathered before they run: the one that comes next, or as many as a budget of bytes holds."""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable
from itertools import islice
from typing import Protocol, TypeVar


class Gatherable(Protocol):
    """What there is to know of a unit before it is gathered ahead."""

    index: int

    @property
    def unsharded_nbytes(self) -> int:
        """What it weighs unsharded, as every rank counts it."""
        ...

    @property
    def is_unsharding(self) -> bool:
        """Whether a gather was started and not waited for."""
        ...

    @property
    def is_unsharded(self) -> bool:
        """Whether its modules hold unsharded parameters."""
        ...

    def reshard(self) -> None:
        """Free what was gathered."""
        ...


U = TypeVar("U", bound=Gatherable)


class GatheredAhead:
    """The units that were gathered because a learned order said so, and have not run yet.

    All that is decided here follows from the program and from sizes that every rank knows: ranks that run the same
    program decide alike.

    Attributes:
        budget: Bytes that these units may hold together. One unit may be ahead whatever its size; None means no more.
    """

    def __init__(self) -> None:
        self.budget: int | None = None
        # Weak, as a context's references to units are.
        self._units: dict[int, weakref.ref[Gatherable]] = {}

    def free(self, units: Container[int]) -> None:
        """Free those of them that the order has passed over: what comes next may need the room.

        Effects: the gather stream waits for the compute stream; not a collective.
        """
        for unit in self._waiting():
            if unit.index in units:
                unit.reshard()

    def choose(self, running: U, upcoming: Iterable[U]) -> list[U]:
        """The units to gather now.

        Args:
            running: The unit that begins to run.
            upcoming: What is expected after it, in order.
        """
        self._units.pop(running.index, None)
        if self.budget is not None:
            chosen = self._within(self.budget, running, upcoming)
        else:
            chosen = [] if self._waiting() else list(islice(upcoming, 1))
        for unit in chosen:
            if not (unit.is_unsharding or unit.is_unsharded):
                self._units[unit.index] = weakref.ref(unit)
        return chosen

    def add(self, unit: Gatherable) -> None:
        """Count a unit that was gathered before the pass that it is the first of."""
        self._units[unit.index] = weakref.ref(unit)

    def _within(self, budget: int, running: U, upcoming: Iterable[U]) -> list[U]:
        """As many of the upcoming units as fit beside those that are ahead already.

        None is left out for a later one that is smaller. A unit that is there already costs nothing, but the running
        one, where it comes again: it goes in between.
        """
        nbytes = sum(unit.unsharded_nbytes for unit in self._waiting())
        chosen: dict[int, U] = {}
        for unit in upcoming:
            is_there = unit.is_unsharding or unit.is_unsharded
            if unit.index in chosen or (is_there and unit is not running):
                continue
            if nbytes and nbytes + unit.unsharded_nbytes > budget:
                break
            nbytes += unit.unsharded_nbytes
            chosen[unit.index] = unit
        chosen.pop(running.index, None)
        return list(chosen.values())

    def _waiting(self) -> list[Gatherable]:
        """Those that still are what they were gathered for: somebody may have resharded one meanwhile."""
        return [unit for ref in self._units.values() if (unit := ref()) is not None and unit.is_unsharding]
