"""Which units stay unsharded between forward and backward: as many as a budget of bytes holds, the last first."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from lamella_engine._ahead import Gatherable


class KeptForBackward:
    """The units that stay because a learned order said that backward begins with them.

    As with what is gathered ahead, all that is decided here follows from the program and from sizes that every rank
    knows.

    Attributes:
        budget: Bytes that these units may hold together.
    """

    def __init__(self) -> None:
        self.budget = 0
        self._planned: frozenset[int] = frozenset()
        # Weak, as a context's references to units are.
        self._units: dict[int, weakref.ref[Gatherable]] = {}

    def plan(self, units: Iterable[Gatherable]) -> None:
        """Choose what is to stay in the forward that begins.

        Args:
            units: Those that would go, in the order in which backward wants them. One that is too large is left out,
                since each that stays saves a gather.
        """
        left, planned = self.budget, set()
        for unit in units if left else ():
            if unit.index not in planned and unit.unsharded_nbytes <= left:
                planned.add(unit.index)
                left -= unit.unsharded_nbytes
        self._planned = frozenset(planned)

    def keeps(self, unit: Gatherable) -> bool:
        """Whether a unit stays whose forward ends: it was chosen, and earlier forwards have left room for it."""
        if unit.index not in self._planned:
            return False
        others = [other for ref in self._units.values() if (other := ref()) is not None and other is not unit]
        nbytes = sum(other.unsharded_nbytes for other in others if other.is_unsharded)
        fits = nbytes + unit.unsharded_nbytes <= self.budget
        if fits:
            self._units[unit.index] = weakref.ref(unit)
        return fits
