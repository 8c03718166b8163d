"""Units to gather before their turn, and to keep between forward and backward, by the order of earlier passes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter, call

import torch

from lamella_engine._options.options import ShardingOptions
from lamella_engine._tree.ahead import GatheredAhead
from lamella_engine._tree.order import LearnedOrders, ReplayedOrder
from lamella_engine._unit.unit import Unit

_unshards_in_backward = attrgetter("unshards_in_backward")


class Prefetch:
    """The order of a tree's units, learned and replayed, and the resulting choices of units to gather or keep.

    Args:
        units: The tree's units, by index; the tree adds to the list.
    """

    def __init__(self, units: Sequence[weakref.ref[Unit]]) -> None:
        self._units = units
        self._prefetched = GatheredAhead()
        self._planned_for_backward = KeptForBackward()
        self._learned = LearnedOrders()
        # Of the pass under way: begun by `begin_forward` or `begin_backward`, learned at the pass's end. A pass that an
        # exception ends teaches nothing: the next begins another.
        self._order = ReplayedOrder()

    def follow(self, options: ShardingOptions) -> None:
        """Let the budgets in some options count from now on."""
        self._prefetched.budget, self._planned_for_backward.budget = options.prefetch_budget, options.keep_budget

    def begin_forward(self, root: Unit) -> None:
        """Replay the last forward that began with `root`, and choose the units that stay for backward."""
        self._order = self._learned.begin_forward(root.index)
        if self._planned_for_backward.budget:
            backward = self._learned.backward_of_forward(root.index) if torch.is_grad_enabled() else ()
            self._planned_for_backward.plan(unit for unit in self._living(backward) if unit.is_regathered)

    def begin_backward(self) -> None:
        """Replay the last backward after the same forward, or the forward in reverse."""
        self._order = self._learned.begin_backward()

    def before_forward_of(self, running: Unit) -> list[Unit]:
        """The units to gather as a unit's forward begins: named by the user, or next in the learned order."""
        # Also for a unit with a list of the user's: the order of the pass must be recorded, and passed units freed.
        chosen = self._prefetched.choose(running, self._living(self._upcoming(running)))
        return _named(running.forward_prefetch) if running.forward_prefetch else chosen

    def before_backward_of(self, running: Unit) -> list[Unit]:
        """The same for a unit's backward, without units whose backward needs no parameters."""
        upcoming = filter(_unshards_in_backward, self._living(self._upcoming(running)))
        chosen = self._prefetched.choose(running, upcoming)
        if running.backward_prefetch:
            return list(filter(_unshards_in_backward, _named(running.backward_prefetch)))
        return chosen

    def _upcoming(self, running: Unit) -> Sequence[int]:
        """The units expected after the running unit; prefetched units that the order passed over are freed."""
        upcoming, passed = self._order.visit(running.index)
        if passed:
            self._prefetched.free(set(passed).difference(upcoming))
        return upcoming

    def note_end(self, unit: Unit) -> None:
        """Note that a unit's forward is over."""
        self._order.end(unit.index)

    def end_forward(self, root: Unit) -> None:
        """Learn a finished forward."""
        self._learned.end_forward(root.index, self._order, backward_follows=torch.is_grad_enabled())

    def end_backward(self) -> None:
        """Learn a finished backward."""
        self._learned.end_backward(self._order)

    def keeps(self, unit: Unit) -> bool:
        """Whether a unit stays unsharded behind its forward, by the budget of bytes."""
        return self._planned_for_backward.budget > 0 and self._planned_for_backward.keeps(unit)

    def first_of_next_forward(self) -> list[Unit]:
        """Up to two units that the next forward is likely to gather first, by the last forward with a backward."""
        units = [unit for unit in self._living(self._learned.last_forward) if unit.parameters.has_copies]
        if not units:
            return []
        first, *later_units = units
        return [first, *(_named(first.forward_prefetch) if first.forward_prefetch else later_units)[:1]]

    def count_ahead(self, unit: Unit) -> None:
        """Count a unit that was gathered before its pass began."""
        self._prefetched.add(unit)

    def _living(self, indices: Sequence[int]) -> Iterator[Unit]:
        # Lazy and without a Python frame an element: a unit asks for the next unit out of all units behind.
        return filter(None, map(call, map(self._units.__getitem__, indices)))


def _named(references: Iterable[Callable[[], Unit | None]]) -> list[Unit]:
    return [unit for reference in references if (unit := reference()) is not None]


class KeptForBackward:
    """The units that stay unsharded between forward and backward: backward begins with these units.

    As in prefetch, every choice follows from the program and from sizes known to every rank.

    Attributes:
        budget: Bytes that kept units may hold together.
    """

    def __init__(self) -> None:
        self.budget = 0
        self._planned: frozenset[int] = frozenset()
        # Weak: modules own units, and a strong reference would keep a deleted model's memory.
        self._units: dict[int, weakref.ref[Unit]] = {}

    def plan(self, units: Iterable[Unit]) -> None:
        """Choose the units that stay unsharded in the forward that begins.

        Args:
            units: Units that would be freed, in backward's order. A unit too large for the budget is left out, since
                each kept unit saves a gather.
        """
        remaining_nbytes, planned = self.budget, set()
        for unit in units:
            if unit.index not in planned and unit.parameters.unsharded_nbytes <= remaining_nbytes:
                planned.add(unit.index)
                remaining_nbytes -= unit.parameters.unsharded_nbytes
        self._planned = frozenset(planned)

    def keeps(self, unit: Unit) -> bool:
        """Whether a unit stays at the end of its forward: chosen, and with room left by earlier forwards."""
        if unit.index not in self._planned:
            return False
        other_units = [other for ref in self._units.values() if (other := ref()) is not None and other is not unit]
        nbytes = sum(other.parameters.unsharded_nbytes for other in other_units if other.weights.is_unsharded)
        fits = nbytes + unit.parameters.unsharded_nbytes <= self.budget
        if fits:
            # Never removed: a unit that was freed since counts nothing while it is sharded.
            self._units[unit.index] = weakref.ref(unit)
        return fits
