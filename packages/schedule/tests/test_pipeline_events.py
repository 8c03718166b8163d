"""All events of a pipeline: each once, behind what it needs, messages in one order, bytes as computed by hand."""

from __future__ import annotations

from collections import Counter
from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipelines import pipelines
from torch_schedules import events_of_torch

from lamella_schedule import (
    Action,
    Event,
    Kind,
    Lane,
    LayerPlan,
    PassKind,
    PassPair,
    Phase,
    Pipeline,
    PipelineEvent,
    ResidenceEvent,
    Slot,
    StagePass,
    TransferAction,
    TransferEvent,
    order,
    passes_in,
    peak,
    peak_parameters,
    pipeline,
    pipeline_events,
    rank_events,
    table,
    work,
)

Message: TypeAlias = tuple[int, int, Phase]  # receiving stage, microbatch, phase
_PLAN = LayerPlan()
_DENSE = LayerPlan(frozenset((Slot.PRE, Slot.EXPERTS)), frozenset())
_LAYERS = st.lists(st.sampled_from([_PLAN, _DENSE, LayerPlan(delayed=frozenset((Slot.EXPERTS,)))]), max_size=3)

_F, _B = PassKind.FORWARD, PassKind.BACKWARD
_PAIRED = Pipeline(  # two stages of one rank, the first's forward beside the second's backward
    (
        (
            *(StagePass(0, _F, 0), StagePass(1, _F, 0)),
            PassPair(StagePass(0, _F, 1), StagePass(1, _B, 0)),
            *(StagePass(1, _F, 1), StagePass(0, _B, 0)),
            *(StagePass(1, _B, 1), StagePass(0, _B, 1)),
        ),
    )
)


def _slots(pipeline: Pipeline, layers: list[LayerPlan]) -> Counter[Event]:
    """The events of every stage and microbatch: each slot forward and backward, and its delayed weight gradients."""
    expected: Counter[Event] = Counter()
    for stage in range(pipeline.num_stages):
        for microbatch in range(pipeline.num_microbatches):
            for kind in (Kind.FORWARD, Kind.BACKWARD):
                expected[Event(microbatch, None, Slot.PREPROCESS, kind, stage)] += 1
                expected[Event(microbatch, None, Slot.POSTPROCESS, kind, stage)] += 1
                for layer, plan in enumerate(layers):
                    expected.update(Event(microbatch, layer, slot, kind, stage) for slot in plan.slots)
            for layer, plan in enumerate(layers):
                expected.update(Event(microbatch, layer, slot, Kind.WEIGHT_GRADIENT, stage) for slot in plan.delayed)
    return expected


@given(pipelines(), _LAYERS, st.booleans())
def test_each_slot_of_each_stage_and_microbatch_is_an_event_once(
    ours: Pipeline, layers: list[LayerPlan], early_release: bool
) -> None:
    events = pipeline_events(ours, layers, early_release=early_release)
    assert Counter(event for rank in events for event in work(rank)) == _slots(ours, layers)
    for rank, of_rank in enumerate(events):
        assert {event.stage for event in work(of_rank)} == set(ours.stages_of(rank))


@given(pipelines(), st.none() | _LAYERS)
def test_every_value_is_computed_sent_and_received_before_its_reader(
    ours: Pipeline, layers: list[LayerPlan] | None
) -> None:
    """Run the ranks in turn, each up to a message that nobody has sent."""
    events = pipeline_events(ours, layers)
    places = [0] * len(events)
    over: set[tuple[int, int, Phase]] = set()  # stage, microbatch, phase: passes whose values are complete
    sent: set[Message] = set()
    posted: set[Message] = set()
    while any(place < len(of_rank) for place, of_rank in zip(places, events, strict=True)):
        before = list(places)
        for rank, of_rank in enumerate(events):
            while places[rank] < len(of_rank):
                event = of_rank[places[rank]]
                if isinstance(event, TransferEvent):
                    message = event.receiver, event.microbatch, event.phase
                    if event.action is TransferAction.SEND:
                        assert (event.stage, event.microbatch, event.phase) in over
                        assert event.peer == ours.stage_ranks[event.receiver] != rank
                        sent.add(message)
                    else:
                        assert message not in posted
                        posted.add(message)
                elif isinstance(event, Event | StagePass):
                    reads = _reads(ours, event)
                    if reads is not None and ours.stage_ranks[reads[0]] != rank:
                        message = event.stage, event.microbatch, event.phase
                        assert message in posted
                        if message not in sent:
                            break
                    elif reads is not None:
                        assert reads in over
                    if _completes(event):
                        over.add((event.stage, event.microbatch, event.phase))
                places[rank] += 1
        assert places != before, "ranks wait for each other"
    assert posted == sent


def _reads(ours: Pipeline, event: Event | StagePass) -> tuple[int, int, Phase] | None:
    """The pass that an event's values or gradients come from, if it is another stage's."""
    if isinstance(event, Event):
        is_first = event.slot is (Slot.PREPROCESS if event.phase is Phase.FORWARD else Slot.POSTPROCESS)
    else:
        is_first = event.kind is not PassKind.WEIGHT_GRADIENT
    stage = event.stage + (-1 if event.phase is Phase.FORWARD else 1)
    return (stage, event.microbatch, event.phase) if is_first and 0 <= stage < ours.num_stages else None


def _completes(event: Event | StagePass) -> bool:
    """Whether the values of a pass are complete: behind its last slot, weight gradients apart."""
    if isinstance(event, Event):
        return event.slot is (Slot.POSTPROCESS if event.phase is Phase.FORWARD else Slot.PREPROCESS)
    return event.kind is not PassKind.WEIGHT_GRADIENT


@given(pipelines(), st.none() | _LAYERS)
def test_two_ranks_have_their_messages_to_each_other_in_one_order(
    ours: Pipeline, layers: list[LayerPlan] | None
) -> None:
    def messages(of_rank: tuple[PipelineEvent, ...], peer: int) -> list[Message]:
        return [
            (event.receiver, event.microbatch, event.phase)
            for event in of_rank
            if isinstance(event, TransferEvent) and event.peer == peer
        ]

    events = pipeline_events(ours, layers)
    for rank in range(ours.num_ranks):
        for peer in range(rank):
            assert messages(events[rank], peer) == messages(events[peer], rank)


@given(pipelines())
def test_pipeline_messages_are_ordered_as_torch_orders_sends_and_receives(ours: Pipeline) -> None:
    """torch's own function puts sends and receives into the same passes."""
    names = {TransferAction.SEND: "SEND", TransferAction.RECEIVE: "RECV"}
    for of_rank, expected in zip(pipeline_events(ours), events_of_torch(ours), strict=True):
        shown = [
            str(event).replace(event.action.upper(), names[event.action])
            if isinstance(event, TransferEvent)
            else str(event)
            for event in of_rank
            if not isinstance(event, ResidenceEvent)
        ]
        assert shown == expected


@given(pipelines(), st.none() | _LAYERS, st.integers(0, 2))
def test_parameters_are_present_from_the_first_reader_to_the_last_weight_gradient(
    ours: Pipeline, layers: list[LayerPlan] | None, num_layers_ahead: int
) -> None:
    for of_rank in pipeline_events(ours, layers, num_layers_ahead=num_layers_ahead):
        state: dict[tuple[int, int, int | None, Phase], Action] = {}
        for event in of_rank:
            if isinstance(event, Event | StagePass):
                # Weight gradients of layers may come behind the backward around the layers.
                is_apart = event.layer is not None and event.kind is Kind.WEIGHT_GRADIENT
                for layer in {event.layer} if is_apart else {event.layer, None}:
                    assert state[event.stage, event.microbatch, layer, event.phase] is Action.USED
            elif isinstance(event, ResidenceEvent):
                key = event.stage, event.microbatch, event.layer, event.phase
                before = {Action.ACQUIRE: None, Action.USED: Action.ACQUIRE, Action.FINISHED: Action.USED}
                assert state.get(key) is before[event.action]
                state[key] = event.action
        assert set(state.values()) == {Action.FINISHED}


@given(pipelines(), st.integers(0, 3))
def test_peak_bytes_computed_by_slot_and_by_pass_agree(ours: Pipeline, num_layers: int) -> None:
    """Forwards of a layer's slots keep their tensors as long as the pass does, up to the layers of one pass."""
    sizes = {stage: 1.0 + stage for stage in range(ours.num_stages)}
    for in_passes, in_slots in zip(pipeline_events(ours), pipeline_events(ours, num_layers), strict=True):
        present = highest = 0.0
        for event in in_passes:  # by hand
            if isinstance(event, StagePass):
                present += sizes[event.stage] if event.kind is PassKind.FORWARD else 0.0
                highest = max(highest, present)
                present -= sizes[event.stage] if event.kind in (PassKind.BACKWARD, PassKind.WEIGHT_GRADIENT) else 0.0
        assert peak(in_passes, lambda event: sizes[event.stage]) == highest

        def kept(event: Event) -> float:
            return sizes[event.stage] if event.slot is Slot.PRE else 0.0

        assert (
            num_layers * (highest - max(sizes.values()))
            <= peak(in_slots, kept)
            <= num_layers * highest + max(sizes.values())
        )


def test_bytes_of_parameters_count_each_copy_once() -> None:
    ours = pipeline("1F1B", 2, 4)
    rank0, rank1 = pipeline_events(ours)
    assert peak_parameters(rank0, lambda event: 5.0) == peak_parameters(rank1, lambda event: 5.0) == 5.0
    # Two stages a rank, one at a time on rank 0; delayed weight gradients of rank 1 hold both, stages 1 and 2.
    peaks = [
        peak_parameters(of_rank, lambda event: 3.0 + event.stage)
        for of_rank in pipeline_events(pipeline("ZBVZeroBubble", 2, 4))
    ]
    assert peaks == [6.0, 4.0 + 5.0]
    # Two layers in each direction with the next acquired ahead, and the parameters around both stages' layers.
    [events] = pipeline_events(_PAIRED, 4)
    assert peak_parameters(events, lambda event: 0.0 if event.layer is None else 1.0) == 4.0
    assert peak_parameters(events, lambda event: 1.0 if event.layer is None else 0.0) == 2.0
    [events] = pipeline_events(_PAIRED, 4, num_layers_ahead=0)
    assert peak_parameters(events, lambda event: 0.0 if event.layer is None else 1.0) == 2.0
    # Layers whose weight gradients come after the other microbatch's backward stay until then.
    events = pipeline_events(pipeline("InterleavedZeroBubble", 2, 2, stages_per_rank=1), 7, num_layers_ahead=0)[1]
    assert peak_parameters(events, lambda event: 0.0 if event.layer is None else 1.0) == 7.0


def test_parts_of_a_backward_split_at_the_delayed_weight_gradients() -> None:
    ours = pipeline("InterleavedZeroBubble", 2, 2, stages_per_rank=1)
    kinds = [
        (event.microbatch, event.kind)
        for event in work(pipeline_events(ours, 1)[1])
        if event.phase is Phase.BACKWARD and event.layer is not None
    ]
    inputs, weights = [(0, Kind.BACKWARD)] * 4, [(0, Kind.WEIGHT_GRADIENT)] * 2
    assert kinds == [*inputs, *((1, kind) for _, kind in inputs), *weights, *((1, kind) for _, kind in weights)]


def test_pairs_interleave_two_stages_as_an_order_of_two_chunks() -> None:
    [events] = pipeline_events(_PAIRED, {0: 1, 1: 1})
    backwards = [event for event in work(events) if event.phase is Phase.BACKWARD or event.microbatch == 1]
    # The pair is the order of two chunks; forwards of microbatch 0 are before, backwards of microbatch 1 behind.
    expected = work(order(1, 1))
    assert [(event.microbatch, event.slot, event.kind) for event in backwards[: len(expected)]] == [
        (event.microbatch, event.slot, event.kind) for event in expected
    ]
    assert {(event.stage, event.lane) for event in backwards[: len(expected)]} == {
        (stage, lane) for stage in (0, 1) for lane in (Lane.COMPUTE, Lane.COMMUNICATION)
    }


def test_a_pair_may_leave_the_weight_gradients_to_a_later_pass() -> None:
    first, second = StagePass(0, _F, 0), StagePass(0, _F, 1)
    inputs, weights = StagePass(0, PassKind.INPUT_GRADIENT, 0), StagePass(0, PassKind.WEIGHT_GRADIENT, 0)
    ours = Pipeline(((first, PassPair(second, inputs), weights, StagePass(0, _B, 1)),))
    [events] = pipeline_events(ours, [_PLAN])
    assert Counter(work(events)) == _slots(ours, [_PLAN])
    late = [event for event in work(events) if event.microbatch == 0][-len(_PLAN.delayed) :]
    assert {event.kind for event in late} == {Kind.WEIGHT_GRADIENT}


def test_a_table_shows_passes_residence_and_messages() -> None:
    lines = table(pipeline_events(pipeline("1F1B", 2, 1))[0]).splitlines()
    assert [line.split() for line in lines] == [
        ["compute", "communication", "residence", "messages"],
        *(["0", "forward", action] for action in ("acquire", "used")),
        ["0F0"],
        ["0", "forward", "finished"],
        ["0SEND_F0"],
        ["0RECEIVE_B0"],
        *(["0", "backward", action] for action in ("acquire", "used")),
        ["0B0"],
        ["0", "backward", "finished"],
    ]
    assert "s1 0.0 pre fwd" in table(pipeline_events(pipeline("1F1B", 2, 1), 1)[1])


def test_wrong_layers_are_refused() -> None:
    ours = pipeline("1F1B", 3, 3)
    with pytest.raises(ValueError, match=r"the layers of stages \[0, 1, 2\], got none for \[1\]"):
        pipeline_events(ours, {0: 2, 2: 1})
    for rank in (-1, 3):
        with pytest.raises(ValueError, match=f"rank to be from 0 to 2, got {rank}"):
            rank_events(ours, rank)
    with pytest.raises(ValueError, match="ahead to be a number of layers, got -1"):
        pipeline_events(ours, num_layers_ahead=-1)
    assert all(passes_in(item) for order in ours.orders for item in order)
