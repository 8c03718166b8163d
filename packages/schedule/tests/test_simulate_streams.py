"""Work on streams keeps its order and its waits, and takes no less than its streams, its host and its longest chain."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella_schedule import StreamOperation, StreamSpan, simulate_streams

_SECONDS = st.integers(0, 20).map(lambda number: number / 4)


@st.composite
def _programs(draw: st.DrawFn) -> list[StreamOperation]:
    count = draw(st.integers(1, 14))
    return [
        StreamOperation(
            stream=draw(st.integers(0, 2)),
            seconds=draw(_SECONDS),
            after=tuple(draw(st.lists(st.integers(0, index - 1), max_size=2))) if index else (),
            launch_seconds=draw(_SECONDS) / 8,
            is_slowed=draw(st.booleans()),
        )
        for index in range(count)
    ]


def _end(spans: list[StreamSpan]) -> float:
    return max(span.stop for span in spans)


@given(_programs(), st.sampled_from([1.0, 1.5]), st.sampled_from([2, 1024]))
def test_stream_operations_wait_for_their_stream_launch_and_named_operations(
    program: list[StreamOperation], slowdown: float, most_launched: int
) -> None:
    spans = simulate_streams(program, slowdown=slowdown, most_launched=most_launched)
    last: dict[int, float] = {}
    launched = 0.0
    for operation, span in zip(program, spans, strict=True):
        before = [spans[other].stop for other in operation.after] + [last.get(operation.stream, 0.0), span.launched]
        assert span.start >= max(before) - 1e-9
        most = operation.seconds * (1 + 2 * (slowdown - 1))  # beside two other streams
        assert operation.seconds - 1e-9 <= span.stop - span.start <= most + 1e-9
        assert span.launched >= launched + operation.launch_seconds - 1e-9
        last[operation.stream], launched = span.stop, span.launched


@given(_programs(), st.data())
def test_without_a_slowdown_a_shorter_operation_never_ends_the_program_later(
    program: list[StreamOperation], data: st.DataObject
) -> None:
    index = data.draw(st.integers(0, len(program) - 1))
    shorter = [*program]
    shorter[index] = replace(program[index], seconds=program[index].seconds / 2)
    assert _end(simulate_streams(shorter)) <= _end(simulate_streams(program)) + 1e-9


def test_a_slowed_operation_takes_longer_only_beside_another_stream() -> None:
    kernel = StreamOperation(stream=0, seconds=4.0)
    collective = StreamOperation(stream=1, seconds=2.0, is_slowed=False)
    spans = simulate_streams([kernel, collective], slowdown=2.0)
    assert [span.stop for span in spans] == [5.0, 2.0]  # two seconds at half the speed


def test_the_host_stops_launching_where_the_queue_is_full() -> None:
    spans = simulate_streams([StreamOperation(stream=0, seconds=5.0)] * 4, most_launched=2)
    assert [span.launched for span in spans] == [0.0, 0.0, 5.0, 10.0]


def test_a_wait_for_a_later_operation_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Expected operation 0 to wait for earlier operations, got \(1,\)"):
        simulate_streams([StreamOperation(stream=0, seconds=1.0, after=(1,)), StreamOperation(stream=1, seconds=1.0)])


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0])
def test_operations_whose_time_is_negative_or_not_finite_are_refused(seconds: float) -> None:
    for operation in (
        StreamOperation(stream=0, seconds=seconds),
        StreamOperation(stream=0, seconds=1.0, launch_seconds=seconds),
    ):
        with pytest.raises(ValueError, match=f"Expected finite seconds from 0 on, got {seconds} in operation 0"):
            simulate_streams([operation])


@pytest.mark.parametrize("slowdown", [math.nan, math.inf, 0.0, 0.5])
def test_a_slowdown_below_one_or_not_finite_is_refused(slowdown: float) -> None:
    operations = [StreamOperation(stream=stream, seconds=1.0) for stream in range(2)]
    with pytest.raises(ValueError, match=f"Expected a finite slowdown from 1 on, got {slowdown}"):
        simulate_streams(operations, slowdown=slowdown)


def test_a_queue_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match=r"most_launched to be 1 or more, got 0"):
        simulate_streams([StreamOperation(stream=0, seconds=1.0)], most_launched=0)
