"""Offsets by interval colouring: allocations alive together lie apart, in the fewest possible bytes."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from lamella_buffers._lifetimes import Lifetime, extent, peak_nbytes, place

Trace = list[Lifetime[int]]


@st.composite
def traces(draw: st.DrawFn, sizes: st.SearchStrategy[int], *, max_lives: int = 12) -> Trace:
    """Lives nested, crossing or in sequence, at any ticks."""
    ticks = st.tuples(st.integers(0, 20), st.integers(1, 10))
    lives = draw(st.lists(st.tuples(ticks, sizes), max_size=max_lives))
    return [Lifetime(i, nbytes, start, start + length) for i, ((start, length), nbytes) in enumerate(lives)]


MIXED = st.sampled_from([1, 2, 3, 5, 8, 40])


def _sizes(*several: Trace) -> dict[int, int]:
    return {life.key: life.nbytes for trace in several for life in trace}


def _brute_peak(trace: Trace) -> int:
    return max((sum(x.nbytes for x in trace if x.start <= t < x.end) for t in range(40)), default=0)


def _assert_apart(trace: Trace, offsets: dict[int, int]) -> None:
    for a, b in combinations(trace, 2):
        if a.start < b.end and b.start < a.end:
            first, second = sorted((a, b), key=lambda life: offsets[life.key])
            assert offsets[first.key] + first.nbytes <= offsets[second.key]


@given(traces(MIXED))
def test_the_peak_is_the_most_that_is_alive_at_any_tick(trace: Trace) -> None:
    assert peak_nbytes(trace) == _brute_peak(trace)


@given(traces(MIXED))
def test_lives_that_meet_lie_apart_and_no_plan_is_smaller_than_the_peak(trace: Trace) -> None:
    offsets = place([trace])
    _assert_apart(trace, offsets)
    assert peak_nbytes(trace) <= extent(offsets, _sizes(trace)) <= sum(life.nbytes for life in trace)


@given(traces(st.just(7), max_lives=25))
def test_lives_of_equal_size_take_exactly_the_peak(trace: Trace) -> None:
    assert extent(place([trace]), _sizes(trace)) == peak_nbytes(trace)


@given(st.lists(traces(st.just(7)), max_size=3))
def test_several_traces_share_a_plan_in_which_each_lies_apart(several: list[Trace]) -> None:
    """Some lives of different traces have one name, and hence one offset."""
    offsets = place(several)
    for trace in several:
        _assert_apart(trace, offsets)


def test_traces_without_a_life_in_common_share_the_same_bytes() -> None:
    first = [Lifetime("a", 10, 0, 2), Lifetime("b", 10, 1, 3)]
    second = [Lifetime("c", 12, 0, 2), Lifetime("d", 8, 1, 3)]
    offsets = place([first, second])
    assert extent(offsets, {"a": 10, "b": 10, "c": 12, "d": 8}) == 20


def test_a_small_life_goes_into_the_smallest_gap_that_holds_it() -> None:
    wall = [Lifetime(name, nbytes, 0, 2) for name, nbytes in (("a", 10), ("b", 30), ("c", 10), ("d", 20), ("e", 10))]
    gaps = [Lifetime("f", 10, 2, 9)]  # after b and d are gone, between a and c
    trace = [Lifetime(x.key, x.nbytes, x.start, 9 if x.key in "ace" else 2) for x in wall] + gaps
    offsets = place([trace])
    assert extent(offsets, {x.key: x.nbytes for x in trace}) == 80
    assert offsets["d"] <= offsets["f"] < offsets["d"] + 20


def test_a_chain_of_units_takes_two_places_beside_the_outermost() -> None:
    """A ZeRO-3 step: each unit is gathered while its predecessor computes, forward and back."""
    units = [("forward", i) for i in range(32)] + [("backward", i) for i in reversed(range(32))]
    trace = [Lifetime(("root", 0), 500, 0, 1000)]
    trace += [Lifetime(unit, 100, 1 + 2 * i, 1 + 2 * i + 3) for i, unit in enumerate(units)]
    assert extent(place([trace]), {x.key: x.nbytes for x in trace}) == 700 == peak_nbytes(trace)


def test_units_of_two_sizes_in_turn_take_two_places_of_the_larger() -> None:
    """Neither order alone finds the optimum: at the turn to backward two large buffers meet."""
    sizes = [40, 300] * 8
    units = [("forward", i) for i in range(16)] + [("backward", i) for i in reversed(range(16))]
    trace = [Lifetime(unit, sizes[unit[1]], 2 * i, 2 * i + 3) for i, unit in enumerate(units)]
    assert extent(place([trace]), {x.key: x.nbytes for x in trace}) == 600 == peak_nbytes(trace)
