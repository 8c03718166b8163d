"""Orders are integers in, integers out: no process group."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella_engine._tree.order import LearnedOrders, ReplayedOrder

Nest = Sequence["int | tuple[int, ...]"]

orders = st.lists(st.integers(0, 5), max_size=12)


def _next(order: ReplayedOrder, unit: int) -> int | None:
    return next(iter(order.visit(unit).upcoming), None)


def _answers(expected: list[int], visits: list[int]) -> list[int | None]:
    order = ReplayedOrder(expected)
    return [_next(order, unit) for unit in visits]


def test_no_next_unit_is_expected_before_an_order_was_learned() -> None:
    assert _answers([], [0, 1, 2]) == [None, None, None]


@given(orders)
def test_a_pass_that_repeats_the_learned_order_predicts_every_next_unit(visits: list[int]) -> None:
    assert _answers(visits, visits) == [*visits[1:], None][: len(visits)]


@given(orders, orders)
def test_all_visits_are_recorded_under_any_expected_order(expected: list[int], visits: list[int]) -> None:
    order = ReplayedOrder(expected)
    for unit in visits:
        order.visit(unit)
    assert order.seen == visits


@given(orders, orders)
def test_a_predicted_unit_always_followed_the_visited_unit_in_the_expected_order(
    expected: list[int], visits: list[int]
) -> None:
    pairs = set(pairwise(expected))
    for unit, answer in zip(visits, _answers(expected, visits), strict=True):
        assert answer is None or (unit, answer) in pairs


@given(orders, orders)
def test_expected_units_are_upcoming_or_passed_until_their_visit(expected: list[int], visits: list[int]) -> None:
    order, remaining_units = ReplayedOrder(expected), expected
    for unit in visits:
        upcoming, passed = order.visit(unit)
        if unit in remaining_units:
            assert [*passed, unit, *upcoming] == remaining_units
            remaining_units = list(upcoming)
        else:
            assert not upcoming and not passed, "off the order nothing is known, and nothing is over"


@pytest.mark.parametrize(
    ("expected", "visits", "answers"),
    [
        pytest.param([0, 1, 2, 3], [0, 2, 3], [1, 3, None], id="a skipped unit"),
        pytest.param([0, 1, 1, 2], [0, 1, 1, 2], [1, 1, 2, None], id="a repeated unit"),
        pytest.param([0, 1, 2], [0, 9, 1, 2], [1, None, 2, None], id="a unit never seen before"),
        pytest.param([0, 1, 2, 3], [0, 2, 1, 3], [1, 3, None, None], id="two units swapped"),
        pytest.param([0, 1, 2], [0, 1], [1, 2], id="an early exit"),
        pytest.param([0, 1], [0, 1, 0, 1], [1, None, None, None], id="the whole pass twice"),
    ],
)
def test_departures_from_the_expected_order_only_cost_predictions(
    expected: list[int], visits: list[int], answers: list[int | None]
) -> None:
    assert _answers(expected, visits) == answers


def _pass(order: ReplayedOrder, units: Nest) -> list[int | None]:
    """Nested units: a tuple is a unit and its inner units."""
    answers: list[int | None] = []
    for unit in units:
        outer, *inner = unit if isinstance(unit, tuple) else (unit,)
        answers += [_next(order, outer), *_pass(order, inner)]
        order.end(outer)
    return answers


def _forward(
    orders: LearnedOrders, root: int, *inner: int | tuple[int, ...], backward_follows: bool = True
) -> list[int | None]:
    order = orders.begin_forward(root)
    nest: Nest = [root, *inner]
    answers = [_next(order, root), *_pass(order, nest[1:])]
    order.end(root)
    orders.end_forward(root, order, backward_follows=backward_follows)
    return answers


def _backward(orders: LearnedOrders, *visits: int) -> list[int | None]:
    order = orders.begin_backward()
    answers = [_next(order, unit) for unit in visits]
    orders.end_backward(order)
    return answers


def test_the_second_forward_replays_the_first() -> None:
    orders = LearnedOrders()
    assert _forward(orders, 0, 1, 2) == [None, None, None]
    assert _forward(orders, 0, 1, 2) == [1, 2, None]


def test_the_first_backward_expects_the_reverse_of_the_order_in_which_forwards_ended() -> None:
    orders = LearnedOrders()
    _forward(orders, 0, 1, 2)
    assert _backward(orders, 0, 2, 1) == [2, 1, None]


def test_units_in_units_begin_backward_outermost_first() -> None:
    orders = LearnedOrders()
    _forward(orders, 0, (1, 2, 3), (4, 5))
    assert _backward(orders, 0, 4, 5, 1, 3, 2) == [4, 5, 1, 3, 2, None]


def test_a_backward_that_is_not_that_reverse_is_learned() -> None:
    orders = LearnedOrders()
    for _ in range(2):
        _forward(orders, 0, 1, 2)
        answers = _backward(orders, 0, 1, 2)
    assert answers == [1, 2, None]


def test_a_learned_backward_is_not_replayed_after_another_forward() -> None:
    orders = LearnedOrders()
    _forward(orders, 0, 1, 2)
    _backward(orders, 0, 1, 2)
    _forward(orders, 0, 2, 1)
    assert _backward(orders, 0, 1, 2) == [1, 2, None]
    _forward(orders, 0, 2)
    assert _backward(orders, 0, 2) == [2, None]


def test_forwards_without_gradients_teach_forward_and_leave_backward_alone() -> None:
    orders = LearnedOrders()
    _forward(orders, 0, 1, 2)
    _backward(orders, 0, 2, 1)
    _forward(orders, 0, 1, 2)
    _forward(orders, 0, 2, backward_follows=False)
    assert _backward(orders, 0, 2, 1) == [2, 1, None]
    assert _forward(orders, 0, 2) == [2, None]


def test_each_unit_that_starts_a_forward_has_its_own_order() -> None:
    orders = LearnedOrders()
    _forward(orders, 0, 1, 2)
    _forward(orders, 2, 3)
    assert _forward(orders, 0, 1, 2) == [1, 2, None]
    assert _forward(orders, 2, 3) == [3, None]


def test_the_backward_of_an_earlier_forward_gets_late_gathers_at_worst() -> None:
    orders = LearnedOrders()
    _forward(orders, 0, 1, 2)
    _forward(orders, 0, 3)
    assert _backward(orders, 0, 2, 1) == [3, None, None]
    assert _backward(orders, 0, 3) == [2, None]
