"""Simulated pipelines: bubbles as in the papers, and gathers, reductions, all-to-alls and messages that cost time."""

from __future__ import annotations

import itertools
import math
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipelines import pipelines

from lamella_schedule import (
    Action,
    Event,
    Kind,
    Lane,
    PassKind,
    Phase,
    Pipeline,
    PipelineTimeline,
    ResidenceEvent,
    Slot,
    StagePass,
    TransferEvent,
    bars,
    order,
    pipeline,
    pipeline_events,
    simulate,
    simulate_pipeline,
    svg,
)

_F, _B, _I, _W = PassKind.FORWARD, PassKind.BACKWARD, PassKind.INPUT_GRADIENT, PassKind.WEIGHT_GRADIENT
EQUAL = {_F: 1.0, _B: 2.0, _I: 1.0, _W: 1.0}
_DURATIONS = st.fixed_dictionaries({kind: st.integers(0, 9).map(float) for kind in PassKind})


def _slot_times(exchange: float) -> dict[tuple[Slot, Kind], float]:
    """Times of a layer: 3 for each compute slot, nothing around the layers."""
    times = dict.fromkeys(itertools.product(Slot, Kind), 0.0)
    for kind in Kind:
        times |= {(Slot.PRE, kind): 3.0, (Slot.EXPERTS, kind): 3.0}
        times |= {(Slot.DISPATCH, kind): exchange, (Slot.COMBINE, kind): exchange}
    return times


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(1, 3), (2, 4), (4, 4), (4, 16), (8, 24)])
def test_simulated_bubbles_are_those_of_the_papers(num_ranks: int, num_microbatches: int) -> None:
    def total(schedule: str, stages_per_rank: int | None = None) -> float:
        ours = pipeline(schedule, num_ranks, num_microbatches, stages_per_rank=stages_per_rank)
        timeline = simulate_pipeline(pipeline_events(ours), EQUAL)
        work = 3.0 * num_microbatches * ours.num_stages / num_ranks
        assert all(of_rank.busy(Lane.COMPUTE) == work for of_rank in timeline.ranks)
        assert timeline.bubble == pytest.approx(1 - work / timeline.total)
        return timeline.total - work

    last = num_ranks - 1
    assert total("GPipe") == total("1F1B") == 3.0 * last  # (p - 1)(F + B)
    for stages_per_rank in (1, 2, 4):
        assert total("Interleaved1F1B", stages_per_rank) == 3.0 * last  # of stages a v-th as long
    assert total("InterleavedZeroBubble", 1) == 1.0 * last  # (p - 1)(F + I - W)
    if num_microbatches >= 2 * num_ranks:
        assert total("ZBVZeroBubble") == total("DualPipeV") == 1.0 * last


@given(pipelines(), _DURATIONS, st.integers(0, 5), st.integers(0, 5), st.integers(0, 5), st.integers(0, 2))
def test_each_event_waits_for_its_lane_its_message_and_its_parameters(
    ours: Pipeline, durations: dict[PassKind, float], gather: int, reduce: int, send: int, host: int
) -> None:
    events = pipeline_events(ours)
    timeline = simulate_pipeline(events, durations, gather=gather, reduce=reduce, send=send, host=host)
    stops: dict[tuple[object, ...], float] = {}
    for of_rank in timeline.ranks:
        for lane in Lane:
            spans = [span for span in of_rank.spans if span.lane is lane]
            assert all(one.stop <= other.start for one, other in itertools.pairwise(spans))
        for span in of_rank.spans:
            assert span.stop - span.start == _price(span.event, durations, gather, reduce, send)
            stops[_key(span.event)] = span.stop
    all_passes = {stage_pass for _, stage_pass in ours._passes()}
    num_messages = 0
    for of_rank in timeline.ranks:
        for span in of_rank.spans:
            for key in _needed(ours, all_passes, span.event, send > 0):
                assert stops[key] <= span.start
            if isinstance(span.event, StagePass) and gather and span.event.kind is not _W:
                assert stops["acquire", span.event.stage, span.event.microbatch, span.event.phase] <= span.start
            num_messages += isinstance(span.event, TransferEvent)
    assert num_messages == (
        sum(isinstance(event, TransferEvent) for rank in events for event in rank) // 2 if send else 0
    )


def _price(event: object, durations: dict[PassKind, float], gather: int, reduce: int, send: int) -> float:
    if isinstance(event, StagePass):
        return durations[event.kind]
    if isinstance(event, ResidenceEvent):
        return gather if event.action is Action.ACQUIRE else reduce
    return send


def _key(event: object) -> tuple[object, ...]:
    if isinstance(event, StagePass):
        return event.stage, event.kind, event.microbatch
    if isinstance(event, ResidenceEvent):
        return str(event.action), event.stage, event.microbatch, event.phase
    assert isinstance(event, TransferEvent)
    return "message", event.receiver, event.microbatch, event.phase


def _needed(
    ours: Pipeline, all_passes: set[StagePass], event: object, are_messages_priced: bool
) -> list[tuple[object, ...]]:
    """The keys of the spans that an event waits for: of the stage before, of its own stage, of its pass."""

    def backward(stage: int, microbatch: int) -> tuple[object, ...]:
        is_split = StagePass(stage, _I, microbatch) in all_passes
        return stage, _I if is_split else _B, microbatch

    if isinstance(event, TransferEvent):
        is_forward = event.phase is Phase.FORWARD
        return [(event.stage, _F, event.microbatch) if is_forward else backward(event.stage, event.microbatch)]
    if isinstance(event, ResidenceEvent):
        return [] if event.action is Action.ACQUIRE else [backward(event.stage, event.microbatch)]
    assert isinstance(event, StagePass)
    stage, microbatch = event.stage, event.microbatch
    if event.kind is _W:
        return [(stage, _I, microbatch)]
    before = stage + (-1 if event.kind is _F else 1)
    needed: list[tuple[object, ...]] = [] if event.kind is _F else [(stage, _F, microbatch)]
    if 0 <= before < ours.num_stages:
        needed.append((before, _F, microbatch) if event.kind is _F else backward(before, microbatch))
        if are_messages_priced and ours.stage_ranks[before] != ours.stage_ranks[stage]:
            needed.append(("message", stage, microbatch, event.phase))
    return needed


def test_messages_delay_the_ranks_behind() -> None:
    events = pipeline_events(pipeline("1F1B", 4, 8))
    free, priced = (simulate_pipeline(events, EQUAL, send=send) for send in (0.0, 0.5))
    starts = [timeline.ranks[3].spans[0].start for timeline in (free, priced)]
    assert starts == [3.0, 4.5]
    # Every message is on the way of the first microbatch down, or of the last up; in between 1F1B waits for each.
    assert priced.total > free.total + 2 * 3 * 0.5 - 1e-9
    assert priced.ranks[1].exposed_on(Lane.SEND) > 0
    only_down = simulate_pipeline(events, EQUAL, send=lambda event: 9.0 if event.phase is Phase.FORWARD else 0.0)
    assert {span.lane for span in only_down.ranks[3].spans} == {Lane.COMPUTE}


def test_a_simulated_gather_costs_only_the_time_that_compute_does_not_hide() -> None:
    times = _slot_times(0.0)
    free, priced = (simulate(order(4, None), times, gather=gather) for gather in (0.0, 4.0))
    # Parameters around the layers and of the first layer are waited for; later layers hide behind the layer before.
    assert (free.total, priced.total) == (24.0, 4.0 + 4.0 + 24.0)
    assert priced.exposed == priced.exposed_on(Lane.GATHER) == 8.0
    slow = simulate(order(4, None), times, gather=7.0)
    assert slow.total == 7.0 * 6 + 6.0 - 7.0  # five gathers one after another, and the last layer
    at_the_layer = simulate(order(4, None, num_layers_ahead=0), times, gather=4.0)
    assert at_the_layer.total == 5 * 4.0 + 24.0
    once = simulate(order(4, None), times, gather=lambda event: 4.0 if event.layer is None else 0.0)
    assert once.total == 4.0 + 24.0


def test_a_reduction_runs_beside_the_layers_below() -> None:
    times = _slot_times(0.0)
    timeline = simulate(order(None, 4), times, reduce=5.0)
    reductions = [span for span in timeline.spans if span.lane is Lane.REDUCE]
    assert [event.layer for span in reductions if isinstance(event := span.event, ResidenceEvent)] == [3, 2, 1, 0, None]
    assert timeline.busy(Lane.COMPUTE) == 48.0
    assert timeline.total == 48.0 + 2 * 5.0  # of the first layer and of the parameters around the layers
    assert timeline.exposed_on(Lane.REDUCE) == 10.0
    assert simulate(order(4, None), times, reduce=5.0).total == 24.0  # a forward has no gradients


def test_a_gather_hides_in_the_wait_for_a_message() -> None:
    events = pipeline_events(pipeline("1F1B", 2, 1))
    starts = [
        simulate_pipeline(events, EQUAL, gather=gather, send=1.0).ranks[1].spans[-1].start for gather in (0.0, 2.0)
    ]
    waits = [
        next(span.start for span in timeline.ranks[1].spans if isinstance(span.event, StagePass))
        for timeline in (simulate_pipeline(events, EQUAL, gather=gather, send=1.0) for gather in (0.0, 2.0, 5.0))
    ]
    # Rank 0's own gather delays its message; rank 1's gather runs meanwhile.
    assert waits == [2.0, 4.0, 7.0]
    assert starts[1] - starts[0] == 2.0 + 2.0  # of the backward too, between forward and backward of the last rank


def test_pairs_hide_all_to_alls_that_passes_alone_wait_for() -> None:
    times = _slot_times(2.0)
    paired = simulate_pipeline(pipeline_events(pipeline("DualPipeV", 2, 12), 2), times)
    alone = simulate_pipeline(pipeline_events(pipeline("ZBVZeroBubble", 2, 12), 2), times)
    for timeline in (paired, alone):
        assert [of_rank.busy(Lane.COMMUNICATION) for of_rank in timeline.ranks] == [2.0 * 4 * 2 * 2 * 12] * 2
    exposed = [sum(of_rank.exposed for of_rank in timeline.ranks) for timeline in (paired, alone)]
    assert exposed[0] < exposed[1] / 3
    assert paired.total < alone.total


def test_a_pipeline_of_one_rank_is_simulated_as_a_single_order() -> None:
    times = _slot_times(2.0)
    ours = Pipeline(((StagePass(0, _F, 0), StagePass(0, _B, 0)),))
    [timeline] = simulate_pipeline(pipeline_events(ours, 3), times, gather=1.0, reduce=1.0).ranks
    alone = [*order(3, None, forward_microbatch=0), *order(None, 3)]
    assert timeline == simulate(alone, times, gather=1.0, reduce=1.0)


def test_a_picture_has_a_row_for_each_lane_of_each_rank() -> None:
    timeline = simulate_pipeline(pipeline_events(pipeline("1F1B", 2, 2)), EQUAL, gather=1.0, reduce=1.0, send=1.0)
    lines = bars(timeline, width=round(timeline.total)).splitlines()
    assert [line.split(" |")[0].rstrip() for line in lines[:-1]] == [
        f"rank {rank} {lane}" for rank in (0, 1) for lane in ("compute", "gather", "reduce", "send")
    ]
    assert lines[-1].startswith(f"total {timeline.total:g}, bubble {timeline.bubble:.1%}")
    picture = ET.fromstring(svg(timeline))
    rectangles = picture.findall(".//{*}rect")
    assert len(rectangles) == sum(len(of_rank.spans) for of_rank in timeline.ranks)
    assert {rectangle.attrib["y"] for rectangle in rectangles} == {str(34 * row) for row in range(8)}
    without = bars(simulate_pipeline(pipeline_events(pipeline("1F1B", 2, 2)), EQUAL), width=27)
    assert without.splitlines() == [
        "rank 0 compute |0F00F1      0B0---   0B1---|",
        "rank 1 compute |   1F01B0---1F11B1---      |",
        "total 9, bubble 33.3%",
    ]
    assert bars(PipelineTimeline(()), width=2).splitlines() == ["total 0, bubble 0.0%"]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda events: simulate_pipeline(events, {_F: 1.0}), "every kind of pass of the order, got none for backward"),
        (lambda events: simulate_pipeline(events, {_F: -1.0}), "got -1.0 for 0F0"),
        (lambda events: simulate_pipeline(events, {_F: math.inf}), "finite durations from 0 on, got inf for 0F0"),
        (lambda events: simulate_pipeline(events, EQUAL, host=math.nan), "host to be a finite time from 0 on, got nan"),
        (lambda events: simulate_pipeline(events, EQUAL, host=-1.0), "host to be a finite time from 0 on, got -1.0"),
        (lambda events: simulate_pipeline(events, EQUAL, send=-1.0), "got -1.0 for 0SEND_F0"),
        (lambda events: simulate_pipeline(events, EQUAL, gather=-1.0), "got -1.0 for microbatch 0 around the layers"),
        (lambda events: simulate_pipeline(events[1:], EQUAL), "got none for rank 0 at 1F0"),
    ],
)
def test_missing_or_negative_prices_and_unsent_messages_are_refused(call: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call(pipeline_events(pipeline("1F1B", 2, 2)))  # type: ignore[operator]


def test_durations_of_passes_may_be_a_function() -> None:
    def duration(event: Event | StagePass) -> float:
        return 2.0 if event.stage == 1 else 1.0

    timeline = simulate_pipeline(pipeline_events(pipeline("GPipe", 2, 3)), duration)
    assert [of_rank.busy(Lane.COMPUTE) for of_rank in timeline.ranks] == [6.0, 12.0]
