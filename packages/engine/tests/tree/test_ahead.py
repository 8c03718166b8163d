"""Prefetched units stay within the budget, for any learned order and any real order: no process group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella_engine._tree.ahead import GatheredAhead
from lamella_engine._tree.order import ReplayedOrder
from lamella_engine.testing import Residency


@dataclass(eq=False)
class _Unit:
    """A unit, with the attributes of parameters and weights that prefetch reads."""

    index: int
    unsharded_nbytes: int = 1
    residency: Residency = Residency.SHARDED
    num_gathers: int = 0

    @property
    def parameters(self) -> _Unit:
        return self

    @property
    def weights(self) -> _Unit:
        return self

    @property
    def is_unsharding(self) -> bool:
        return self.residency is Residency.UNSHARDING

    def unshard(self) -> None:
        if self.residency is Residency.SHARDED:
            self.num_gathers += 1
            self.residency = Residency.UNSHARDING

    def begin(self) -> None:
        self.unshard()
        self.residency = Residency.UNSHARDED

    def reshard(self) -> None:
        self.residency = Residency.SHARDED


class _Pass:
    """Units run in sequence, driven as by a context and its states."""

    def __init__(self, units: Sequence[_Unit], expected: Sequence[int], budget: int | None) -> None:
        lookahead: Any = GatheredAhead()
        self._units, self._order, self._lookahead = units, ReplayedOrder(expected), lookahead
        self._lookahead.budget = budget

    def run(self, index: int) -> list[int]:
        """What is gathered ahead when a unit begins."""
        unit = self._units[index]
        upcoming, passed = self._order.visit(index)
        self._lookahead.free(set(passed).difference(upcoming))
        chosen = self._lookahead.choose(unit, [self._units[i] for i in upcoming])
        unit.begin()
        for chosen_unit in chosen:
            chosen_unit.unshard()
        return [chosen_unit.index for chosen_unit in chosen]

    @property
    def waiting(self) -> list[_Unit]:
        return [unit for unit in self._units if unit.is_unsharding]


orders = st.lists(st.integers(0, 5), max_size=12)
sizes = st.lists(st.integers(0, 9), min_size=6, max_size=6)
budgets = st.none() | st.integers(0, 30)


@given(orders, orders, sizes, budgets)
def test_units_gathered_ahead_stay_within_the_budget_or_are_a_single_unit(
    expected: list[int], visits: list[int], sizes: list[int], budget: int | None
) -> None:
    units = [_Unit(i, nbytes) for i, nbytes in enumerate(sizes)]
    run = _Pass(units, expected, budget)
    for index in visits:
        run.run(index)
        waiting = [unit for unit in run.waiting if unit.unsharded_nbytes]
        assert len(waiting) <= 1 or sum(unit.unsharded_nbytes for unit in waiting) <= (budget or 0)
        units[index].reshard()


@given(orders, sizes, budgets)
def test_a_pass_that_repeats_the_last_one_gathers_nothing_in_vain(
    visits: list[int], sizes: list[int], budget: int | None
) -> None:
    units = [_Unit(i, nbytes) for i, nbytes in enumerate(sizes)]
    run = _Pass(units, visits, budget)
    for index in visits:
        run.run(index)
        units[index].reshard()
    assert [unit.num_gathers for unit in units] == [visits.count(i) for i in range(6)]
    assert not run.waiting


@given(orders, orders, sizes, budgets)
def test_every_gather_in_vain_was_freed_or_waits(
    expected: list[int], visits: list[int], sizes: list[int], budget: int | None
) -> None:
    units = [_Unit(i, nbytes) for i, nbytes in enumerate(sizes)]
    run = _Pass(units, expected, budget)
    for index in visits:
        run.run(index)
        units[index].reshard()
    gathered = sum(unit.num_gathers for unit in units)
    assert gathered <= len(visits) + len(expected), "each expected unit is guessed once at most"


@pytest.mark.parametrize(
    ("budget", "first", "second"),
    [
        pytest.param(None, [1], [2], id="the next only"),
        pytest.param(0, [1], [2], id="one, whatever it weighs"),
        pytest.param(3, [1], [2], id="one fits"),
        pytest.param(5, [1, 2], [], id="two fit, and then one of them and not the third"),
        pytest.param(9, [1, 2], [3, 4], id="two fit, and then one of them and the last two"),
        pytest.param(10, [1, 2, 3], [4], id="three fit"),
        pytest.param(99, [1, 2, 3, 4], [], id="all fit"),
    ],
)
def test_the_next_units_are_gathered_ahead_while_the_budget_has_room(
    budget: int | None, first: list[int], second: list[int]
) -> None:
    units = [_Unit(i, nbytes) for i, nbytes in enumerate([0, 2, 3, 5, 1])]
    run = _Pass(units, list(range(5)), budget)
    assert run.run(0) == first
    assert run.run(1) == second


def test_a_smaller_unit_does_not_overtake() -> None:
    units = [_Unit(i, nbytes) for i, nbytes in enumerate([0, 2, 9, 1])]
    assert _Pass(units, list(range(4)), 4).run(0) == [1]


def test_already_unsharded_units_take_no_room_in_the_prefetch_budget() -> None:
    units = [_Unit(i, 4) for i in range(5)]
    units[1].residency, units[2].residency = Residency.UNSHARDED, Residency.UNSHARDING
    assert _Pass(units, list(range(5)), 4).run(0) == [3]


def test_prefetch_keeps_room_for_a_later_run_of_the_running_unit() -> None:
    units = [_Unit(i, 4) for i in range(3)]
    run = _Pass(units, [0, 1, 0, 2], 8)
    assert run.run(0) == [1], "not 2, which would leave no room for 0"
    units[0].reshard()
    assert run.run(1) == [0, 2]


def test_units_that_were_passed_over_make_room() -> None:
    units = [_Unit(i, 4) for i in range(5)]
    run = _Pass(units, list(range(5)), 8)
    assert run.run(0) == [1, 2]
    assert run.run(3) == [4]
    assert [unit.index for unit in run.waiting] == [4]


@pytest.mark.parametrize("budget", [None, 0, 7])
def test_a_gathered_unit_that_is_passed_over_waits_for_its_later_run(budget: int | None) -> None:
    units = [_Unit(i, 4) for i in range(4)]
    run = _Pass(units, [0, 2, 1, 3, 2], budget)
    assert run.run(0) == [2]
    assert run.run(1) == []
    assert [unit.index for unit in run.waiting] == [2]
