"""The pool plans repeated rounds, serves rounds outside the plan too, and never overwrites a live buffer."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from random import Random
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lamella_buffers import Allocator, CachingAllocator, PoolAllocator, PoolReport, _pool
from lamella_buffers.testing import check_allocator

CPU = torch.device("cpu")
KIB = 1024


class _Counting(CachingAllocator):
    """Counts a pool's requests."""

    def __init__(self) -> None:
        self.num_calls = 0

    def create(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.num_calls += 1
        return super().create(numel, dtype, device)

    def allocate(self, buffer: torch.Tensor) -> None:
        self.num_calls += 1
        super().allocate(buffer)

    def free(self, buffer: torch.Tensor) -> None:
        self.num_calls += 1
        super().free(buffer)


class _Buffers:
    """Freed buffers of a pool; each toggle allocates a buffer, or frees a buffer after a check of its contents."""

    def __init__(self, pool: Allocator, sizes_kib: Sequence[int]) -> None:
        self._pool = pool
        self.tensors = [pool.create(kib * KIB, torch.uint8, CPU) for kib in sizes_kib]
        self._stamps: dict[int, int] = {}
        self._num_stamps = 0
        for tensor in self.tensors:
            pool.free(tensor)

    def toggle(self, *order: int) -> None:
        for i in order:
            if i in self._stamps:
                assert bool((self.tensors[i] == self._stamps.pop(i)).all()), f"buffer {i} was overwritten"
                self._pool.free(self.tensors[i])
            else:
                self._pool.allocate(self.tensors[i])
                self._num_stamps = self._num_stamps % 255 + 1
                self._stamps[i] = self._num_stamps
                self.tensors[i].fill_(self._num_stamps)
            self._assert_apart()

    def free_all(self) -> None:
        self.toggle(*list(self._stamps))

    def _assert_apart(self) -> None:
        ranges = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in (self.tensors[i] for i in self._stamps))
        assert all(end <= start for (_, end), (start, _) in pairwise(ranges))


# A root around a chain, forward and back: each buffer comes before its predecessor goes.
STEP = (0, 1, 2, 1, 3, 2, 4, 3, 4, 4, 3, 4, 2, 3, 1, 2, 1, 0)
FORWARD = (0, 1, 2, 1, 3, 2, 4, 3, 4, 0)
NUM_ALLOCATIONS = 9  # of a step
SIZES = (8, 4, 4, 4, 4)


def _trained(source: Allocator | None = None, *, num_steps: int = 3) -> tuple[PoolAllocator, _Buffers]:
    pool = PoolAllocator(source)
    buffers = _Buffers(pool, SIZES)
    for _ in range(num_steps):
        buffers.toggle(*STEP)
    return pool, buffers


def _assert_replays(pool: PoolAllocator, buffers: _Buffers, step: Sequence[int] = STEP) -> None:
    before = pool.report()
    buffers.toggle(*step)
    after = pool.report()
    assert after.num_outside == before.num_outside
    assert after.num_inside == before.num_inside + len(step) // 2
    assert after.num_plans == before.num_plans


@pytest.mark.parametrize("source_of", [lambda: None, PoolAllocator], ids=["pool", "pool of a pool"])
def test_the_pool_conforms(source_of: Callable[[], Allocator | None]) -> None:
    pool = PoolAllocator(source_of())
    assert isinstance(pool, Allocator)
    check_allocator(pool)
    assert pool.report().num_plans > 0, "the test must see a plan at work"


def test_the_conformance_test_catches_a_pool_that_trusts_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pool._PoolReservation, "is_free", True)
    with pytest.raises(AssertionError, match="must survive"):
        check_allocator(PoolAllocator())


def test_a_pool_plans_a_repeated_step_and_allocates_no_memory_from_then_on() -> None:
    source = _Counting()
    pool, buffers = _trained(source, num_steps=2)
    assert pool.report().num_plans == 0
    buffers.toggle(*STEP)  # takes the plan's memory
    num_calls = source.num_calls
    for _ in range(3):
        _assert_replays(pool, buffers)
    assert source.num_calls == num_calls


def test_equal_units_are_planned_in_exactly_the_bytes_that_are_alive_at_once() -> None:
    pool, _ = _trained()
    assert pool.report() == PoolReport(
        planned_nbytes=16 * KIB,
        bound_nbytes=16 * KIB,
        reserved_nbytes=16 * KIB,
        live_nbytes=24 * KIB,  # every buffer, at creation
        num_inside=NUM_ALLOCATIONS,
        num_outside=0,
        num_plans=1,
    )


def test_a_first_step_of_another_order_is_not_planned() -> None:
    pool = PoolAllocator()
    buffers = _Buffers(pool, SIZES)
    buffers.toggle(0, 1, 1, 2, 2, 3, 3, 4, 4, 4, 4, 3, 3, 2, 2, 1, 1, 0)  # nothing is gathered ahead yet
    for _ in range(3):
        buffers.toggle(*STEP)
    assert pool.report().num_plans == 1
    _assert_replays(pool, buffers)


@pytest.mark.parametrize(
    "between",
    [
        pytest.param(FORWARD, id="validation"),
        pytest.param(FORWARD * 5, id="several validations"),
        pytest.param((2, 2), id="one unit by hand"),
        pytest.param((0, 1, 2, 3, 4, 4, 3, 2, 1, 0), id="everything at once"),
        pytest.param((4, 3, 4, 2, 3, 1, 2, 0, 1, 0), id="backwards"),
        pytest.param((0, 1, 2, 1, 3, 0, 2, 3), id="an exception"),
    ],
)
def test_steps_replay_after_any_other_pass(between: Sequence[int]) -> None:
    pool, buffers = _trained()
    buffers.toggle(*between)
    _assert_replays(pool, buffers)


def test_a_validation_pass_replays_the_forward_of_a_planned_step() -> None:
    pool, buffers = _trained()
    _assert_replays(pool, buffers, FORWARD)


def test_microbatches_count_as_steps() -> None:
    pool, buffers = _trained()
    for num_microbatches in (2, 1, 5):
        _assert_replays(pool, buffers, STEP * num_microbatches)


def test_a_repeated_round_outside_the_plan_is_planned_beside_known_rounds() -> None:
    other = (0, 1, 2, 3, 1, 4, 2, 3, 4, 0)  # three units at once
    pool, buffers = _trained()
    buffers.toggle(*other)
    _assert_replays(pool, buffers)
    buffers.toggle(*other, *other)
    assert pool.report().num_plans == 2
    for step in (other, STEP, FORWARD, other):
        _assert_replays(pool, buffers, step)
    assert pool.report().planned_nbytes == 20 * KIB


def test_a_buffer_that_stays_longer_than_planned_keeps_its_place() -> None:
    pool, buffers = _trained()
    buffers.toggle(0, 1, 2, 3)  # the plan gives 3 the place of 1, and 1 is still alive
    assert pool.report().num_outside == 1
    buffers.free_all()
    _assert_replays(pool, buffers)


def test_two_models_in_turn_share_the_same_bytes() -> None:
    pool, first = _trained()
    second = _Buffers(pool, SIZES)
    for _ in range(3):
        second.toggle(*STEP)
        first.toggle(*STEP)
    _assert_replays(pool, first)
    _assert_replays(pool, second)
    assert pool.report().planned_nbytes == 16 * KIB


def test_bytes_that_were_never_asked_for_are_not_reserved() -> None:
    pool, buffers = _trained(num_steps=2)
    buffers.toggle(0, 1, 1, 0)
    assert pool.report().planned_nbytes == 16 * KIB
    assert pool.report().reserved_nbytes == 12 * KIB


def test_events_of_a_round_without_end_are_recorded_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pool, "_MOST_EVENTS", 40)
    pool = PoolAllocator()
    buffers = _Buffers(pool, SIZES)
    for _ in range(2):
        buffers.toggle(0)
        for _ in range(10):
            buffers.toggle(1, 2, 1, 2)
        assert len(pool._round.events) == 40
        buffers.toggle(0)
    assert pool.report().num_plans == 0
    for _ in range(3):
        buffers.toggle(*STEP)
    _assert_replays(pool, buffers)


# -- lifetime ----------------------------------------------------------------------------------------------------------


def _chunks(pool: PoolAllocator) -> list[weakref.ref[torch.UntypedStorage]]:
    return [weakref.ref(chunk.memory) for chunk in pool._plan._chunks if chunk.memory is not None]


def _alive(chunks: Sequence[weakref.ref[torch.UntypedStorage]]) -> list[int]:
    return [storage.nbytes() for ref in chunks if (storage := ref()) is not None]


@pytest.fixture
def no_cycle_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_cycle_collector")
@pytest.mark.parametrize("live", [(), (0,), (0, 1, 2)])
def test_the_plans_memory_goes_with_the_last_buffer(live: Sequence[int]) -> None:
    pool, buffers = _trained()
    chunks = _chunks(pool)
    assert sum(_alive(chunks)) == 16 * KIB
    buffers.toggle(*live)
    del buffers
    assert not _alive(chunks)
    assert pool.report().planned_nbytes == 0


@pytest.mark.usefixtures("no_cycle_collector")
@pytest.mark.parametrize("live", [(), (0,), (0, 1, 2)])
def test_the_plans_memory_goes_when_pool_and_buffers_go(live: Sequence[int]) -> None:
    pool, buffers = _trained()
    chunks = _chunks(pool)
    buffers.toggle(*live)
    del pool, buffers
    assert not _alive(chunks)


@pytest.mark.usefixtures("no_cycle_collector")
def test_a_view_keeps_its_bytes_when_the_pool_is_gone() -> None:
    pool, buffers = _trained()
    buffers.toggle(0)
    view = buffers.tensors[0][:10].detach()
    value = view[0].item()
    chunks = _chunks(pool)
    del pool, buffers
    assert (view == value).all()
    del view
    assert not _alive(chunks)


def test_a_live_buffer_that_is_deleted_leaves_its_place_to_other_buffers() -> None:
    pool, first = _trained()
    second = _Buffers(pool, SIZES)
    for _ in range(3):
        second.toggle(*STEP)
    first.toggle(1)
    second.toggle(0)
    before = pool.report()
    del first
    second.toggle(1)
    assert pool.report().num_inside == before.num_inside + 1
    second.free_all()
    second.toggle(*STEP)
    _assert_replays(pool, second)


@pytest.mark.parametrize("toggles", [(2, 2), (2,)], ids=["freed", "alive"])
def test_a_round_in_which_a_buffer_went_is_not_planned(toggles: Sequence[int]) -> None:
    pool = PoolAllocator()
    stays = _Buffers(pool, SIZES)
    for _ in range(3):
        goes = _Buffers(pool, SIZES)
        stays.toggle(0)
        goes.toggle(*toggles)
        del goes
        stays.toggle(1, 1, 0)
    assert pool.report().num_plans == 0
    for _ in range(3):
        stays.toggle(*STEP)
    _assert_replays(pool, stays)


def test_buffers_may_go_at_any_moment_of_a_call() -> None:
    """Cycles hold models, and the cyclic collector comes at any time: also while the pool makes a plan."""
    num_moments = _num_moments_of_the_call_that_plans(None)
    assert num_moments > 100
    for moment in range(num_moments):
        _num_moments_of_the_call_that_plans(moment)


def _num_moments_of_the_call_that_plans(moment: int | None) -> int:
    """Count the bytecodes in the pool's code; at one bytecode planned buffers of another model go."""
    gc.collect(0)
    gc.disable()
    pool = PoolAllocator()
    stays, goes = _Buffers(pool, SIZES), _Buffers(pool, SIZES)
    for _ in range(2):
        goes.toggle(*STEP)
        stays.toggle(*STEP)
    vars(goes)["itself"] = goes
    del goes
    num = 0

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        nonlocal num
        if frame.f_code.co_filename != _pool.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            num += 1
            if num - 1 == moment:
                gc.collect(0)  # objects made since the collector's stop
        return trace

    tracing = sys.gettrace()
    sys.settrace(trace)
    try:
        stays.toggle(0)
    finally:
        sys.settrace(tracing)
        gc.enable()
    assert pool.report().num_plans == 2
    if moment is not None:
        assert len(pool._buffers) == len(SIZES)
        stays.free_all()
        stays.toggle(*STEP)
        _assert_replays(pool, stays)
    return num


def test_the_next_plan_does_without_buffers_that_are_gone() -> None:
    pool, first = _trained()
    large = _Buffers(pool, [64])
    large.toggle(*(0, 0) * 3)
    assert pool.report().planned_nbytes == 64 * KIB
    del large
    first.toggle(*STEP)
    assert pool.report().planned_nbytes == 16 * KIB


# -- any program -------------------------------------------------------------------------------------------------------

PROGRAMS = st.lists(
    st.lists(st.integers(0, 4), min_size=1, max_size=14).map(tuple), min_size=1, max_size=3
)  # passes, as toggles
EVENTS = st.lists(st.integers(0, 5), max_size=25)  # the next pass; from 3 on, orders without a repetition


@given(st.lists(st.sampled_from([1, 2, 3, 7]), min_size=5, max_size=5), PROGRAMS, EVENTS, st.randoms())
def test_any_passes_in_any_order_never_share_live_bytes_and_each_is_planned_in_the_end(
    sizes: list[int], passes: list[tuple[int, ...]], events: list[int], random: Random
) -> None:
    pool = PoolAllocator()
    buffers = _Buffers(pool, sizes)
    for event in events:
        once = [random.randrange(5) for _ in range(random.randrange(14))]
        buffers.toggle(*(passes[event] if event < len(passes) else once))
        buffers.free_all()
    for _ in range(2):  # after any earlier learning each order comes twice now
        for order in passes:
            buffers.toggle(*order)
            buffers.free_all()
    report = pool.report()
    for order in passes:
        buffers.toggle(*order)
        buffers.free_all()
    after = pool.report()
    is_new_plan = after.num_plans > report.num_plans
    assert after.num_outside == (0 if is_new_plan else report.num_outside)
    assert after.planned_nbytes >= after.bound_nbytes


@given(
    st.lists(st.sampled_from([1, 2, 3, 7]), min_size=5, max_size=5),
    PROGRAMS,
    st.lists(st.sampled_from(["compute", "gather"]), min_size=1, max_size=7),
)
def test_planned_places_of_different_streams_never_overlap(
    sizes: list[int], passes: list[tuple[int, ...]], streams: list[str]
) -> None:
    """A late stream may still write to freed memory: only its own later allocations come after the write."""
    stream = "compute"
    lay: dict[str, list[tuple[int, int]]] = {"compute": [], "gather": []}

    class Noting(PoolAllocator):
        def allocate(self, buffer: torch.Tensor) -> None:
            num_inside = self.report().num_inside
            super().allocate(buffer)
            if self.report().num_inside > num_inside:
                lay[stream].append((buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_pool, "_current_stream", lambda _: stream)
        pool = Noting()
        buffers = _Buffers(pool, sizes)
        for turn in range(4):
            if turn == 3:  # by now one plan holds all orders
                lay["compute"].clear()
                lay["gather"].clear()
                num_plans = pool.report().num_plans
            for order in passes:
                for i, number in enumerate(order):
                    stream = streams[i % len(streams)]
                    buffers.toggle(number)
                buffers.free_all()
    assert pool.report().num_plans == num_plans > 0
    assert lay["compute"] or lay["gather"]
    for begin, end in lay["compute"]:
        assert all(end <= start or stop <= begin for start, stop in lay["gather"])


# -- two streams --------------------------------------------------------------------------------------------------


def test_a_buffer_of_another_allocator_is_refused() -> None:
    buffer = CachingAllocator().create(8, torch.float32, CPU)
    for call in (PoolAllocator().free, PoolAllocator().allocate):
        with pytest.raises(ValueError, match="Expected a buffer that this pool made, got another"):
            call(buffer)
        buffer.untyped_storage().resize_(0)


def test_a_report_reads_as_a_sentence() -> None:
    report = PoolReport(
        planned_nbytes=3 << 20,
        bound_nbytes=2 << 20,
        reserved_nbytes=1 << 20,
        live_nbytes=4 << 20,
        num_inside=70,
        num_outside=2,
        num_plans=1,
    )
    assert str(report) == (
        "pool: 3.0 MiB planned where 2.0 MiB were alive at once, 1.0 MiB reserved, 4.0 MiB alive at most; "
        "plan 1: 70 allocations inside, 2 outside"
    )
