"""The order of units' runs: learned in one pass, replayed in the next pass for prefetch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Outlook(NamedTuple):
    """The neighbours of a running unit in an expected order. Both are empty off the order."""

    upcoming: Sequence[int] = ()  # units expected after the running unit
    passed: Sequence[int] = ()  # units expected before the running unit, which did not run


class ReplayedOrder:
    """Walks an expected order beside the real order.

    Units are named by integers. The real order is recorded; the expected order only gives the next units. A pass
    off the expected order gets no next unit until both meet again: a late gather, never a wrong result. Both
    orders follow from the program alone, so ranks with the same program agree on every prefetch.

    Args:
        expected: The order to replay; empty before the first pass.
    """

    def __init__(self, expected: Sequence[int] = ()) -> None:
        self._expected = expected
        self._cursor = 0  # in `expected`, behind the last unit common to both orders; never goes back
        # The real order, of begins and of ends: learned when the pass is over, and lost with a failed pass.
        self.seen: list[int] = []
        self.ended: list[int] = []

    def visit(self, unit: int) -> Outlook:
        """Record the run of `unit`, and look ahead."""
        self.seen.append(unit)
        try:
            position = self._expected.index(unit, self._cursor)
        except ValueError:
            # Off the order: the cursor stays, for the next unit common to both orders.
            return Outlook()
        passed = self._expected[self._cursor : position]
        self._cursor = position + 1
        return Outlook(self._expected[self._cursor :], passed)

    def end(self, unit: int) -> None:
        """Record the end of `unit`. Units nest: the ends come in another order than the begins."""
        self.ended.append(unit)


class LearnedOrders:
    """The orders of earlier passes: a forward order for each starting unit, and a backward order.

    A backward order is replayed after the same forward order only. After a new forward order, the reverse of the order
    of the forwards' ends stands in: the last unit to end is the first unit whose gradient arrives.
    """

    def __init__(self) -> None:
        # By a pass's first unit: validation of a part of the model must not unlearn training's order.
        self._forward: dict[int, tuple[int, ...]] = {}
        self._reverse: dict[int, tuple[int, ...]] = {}
        # Of the last forward with gradients: several forwards may come before one backward, which starts with the last.
        self._last_forward: tuple[int, ...] = ()
        self._reverse_of_last_forward: tuple[int, ...] = ()
        # The last backward, and the forward that came before it.
        self._backward: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())

    def begin_forward(self, root: int) -> ReplayedOrder:
        """The order of the last forward from `root`, ready to be replayed."""
        return ReplayedOrder(self._forward.get(root, ()))

    def end_forward(self, root: int, order: ReplayedOrder, *, backward_follows: bool) -> None:
        """Learn a finished forward; a forward without gradients teaches nothing about backward."""
        self._forward[root] = tuple(order.seen)
        self._reverse[root] = tuple(reversed(order.ended))
        if backward_follows:
            self._last_forward = self._forward[root]
            self._reverse_of_last_forward = self._reverse[root]

    def backward_of_forward(self, root: int) -> tuple[int, ...]:
        """The likely backward order after a forward from `root`."""
        return self._reverse.get(root, ())

    @property
    def last_forward(self) -> tuple[int, ...]:
        """The real order of the last forward with gradients."""
        return self._last_forward

    def begin_backward(self) -> ReplayedOrder:
        """The backward order to expect after the last forward with gradients."""
        after, learned = self._backward
        return ReplayedOrder(learned if after == self._last_forward else self._reverse_of_last_forward)

    def end_backward(self, order: ReplayedOrder) -> None:
        """Learn a finished backward."""
        self._backward = (self._last_forward, tuple(order.seen))
