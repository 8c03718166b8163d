"""Orders of any chunks: every event once, every dependency before its user, parameters present for every reader."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella_schedule import (
    Action,
    Event,
    Kind,
    Lane,
    LayerPlan,
    Phase,
    ResidenceEvent,
    Slot,
    order,
    peak,
    run_order,
    table,
    with_residence,
    work,
)
from lamella_schedule._order import AnyEvent

_SLOTS = [
    frozenset((Slot.PRE, Slot.EXPERTS, *more))
    for more in ((), (Slot.DISPATCH, Slot.COMBINE), (Slot.DISPATCH, Slot.COMBINE, Slot.POST), (Slot.POST,))
]
_PLANS = st.builds(
    LayerPlan, st.sampled_from(_SLOTS), st.sets(st.sampled_from([Slot.PRE, Slot.EXPERTS])).map(frozenset)
)
_LAYERS = st.lists(_PLANS, max_size=5)
_OPTIONS = st.fixed_dictionaries(
    {"early_release": st.booleans(), "delayed": st.booleans(), "num_layers_ahead": st.integers(0, 3)}
)


def _expected(microbatch: int, plans: list[LayerPlan], delayed: bool, phase: Phase) -> list[Event]:
    """The events of one pass in the order of their dependencies, each weight gradient behind its backward."""
    kind = Kind.FORWARD if phase is Phase.FORWARD else Kind.BACKWARD
    events = [Event(microbatch, None, Slot.PREPROCESS, kind)]
    for layer, plan in enumerate(plans):
        for slot in plan.forward_order:
            if phase is Phase.BACKWARD and delayed and slot in plan.delayed:
                events.append(Event(microbatch, layer, slot, Kind.WEIGHT_GRADIENT))
            events.append(Event(microbatch, layer, slot, kind))
    events.append(Event(microbatch, None, Slot.POSTPROCESS, kind))
    return events if phase is Phase.FORWARD else events[::-1]


def _check_pass(events: list[Event], expected: list[Event]) -> None:
    place = {event: i for i, event in enumerate(events)}
    assert Counter(events) == Counter(expected)
    chain = [event for event in expected if event.kind is not Kind.WEIGHT_GRADIENT]
    assert [event for event in events if event.kind is not Kind.WEIGHT_GRADIENT] == chain
    for event in events:
        if event.kind is Kind.WEIGHT_GRADIENT:
            assert place[event] > place[Event(event.microbatch, event.layer, event.slot, Kind.BACKWARD)]


@given(_LAYERS, _LAYERS, _OPTIONS)
def test_an_order_of_two_microbatches_has_every_event_once_after_its_dependencies(
    forward: list[LayerPlan], backward: list[LayerPlan], options: dict[str, bool]
) -> None:
    events = work(order(forward, backward, **options))
    for microbatch, plans, phase in ((1, forward, Phase.FORWARD), (0, backward, Phase.BACKWARD)):
        mine = [event for event in events if event.microbatch == microbatch]
        _check_pass(mine, _expected(microbatch, plans, bool(options["delayed"]), phase))


@given(st.integers(1, 5), _LAYERS, _OPTIONS)
def test_a_step_runs_each_microbatch_once_and_backwards_in_their_order(
    num_microbatches: int, layers: list[LayerPlan], options: dict[str, bool]
) -> None:
    events = work(run_order(num_microbatches, layers, **options))
    for microbatch in range(num_microbatches):
        mine = [event for event in events if event.microbatch == microbatch]
        forward = _expected(microbatch, layers, True, Phase.FORWARD)
        assert mine[: len(forward)] == forward
        _check_pass(mine[len(forward) :], _expected(microbatch, layers, bool(options["delayed"]), Phase.BACKWARD))
    backwards = [event.microbatch for event in events if event.phase is Phase.BACKWARD]
    assert backwards == sorted(backwards)  # gradients accumulate in the order of the microbatches


@given(st.integers(1, 5), _LAYERS, _OPTIONS)
def test_parameters_are_acquired_before_used_and_finished_behind_all_readers(
    num_microbatches: int, layers: list[LayerPlan], options: dict[str, bool]
) -> None:
    events = run_order(num_microbatches, layers, **options)
    state: dict[tuple[int, int | None, Phase], Action] = {}
    for place, event in enumerate(events):
        if isinstance(event, Event):
            for layer in {event.layer, None}:
                assert state[event.microbatch, layer, event.phase] is Action.USED
            continue
        stay = event.microbatch, event.layer, event.phase
        before = {Action.ACQUIRE: None, Action.USED: Action.ACQUIRE, Action.FINISHED: Action.USED}[event.action]
        assert state.get(stay) is before
        state[stay] = event.action
        if event.action is not Action.ACQUIRE:
            assert event.lane is _neighbour(events, place, event).lane
    assert len(state) == num_microbatches * 2 * (len(layers) + 1)
    assert set(state.values()) == {Action.FINISHED}


def _neighbour(events: tuple[AnyEvent, ...], place: int, stay: ResidenceEvent) -> Event:
    """The first event of a layer behind `used`, the last event before `finished`."""
    step = 1 if stay.action is Action.USED else -1
    event = events[place]
    while not (
        isinstance(event, Event)
        and (event.microbatch, event.phase) == (stay.microbatch, stay.phase)
        and stay.layer in (event.layer, None)
    ):
        place += step
        event = events[place]
    return event


@given(st.integers(1, 4), st.integers(0, 6), _OPTIONS)
def test_no_more_layers_are_present_than_each_direction_needs(
    num_microbatches: int, num_layers: int, options: dict[str, bool]
) -> None:
    present: Counter[Phase] = Counter()
    highest: Counter[Phase] = Counter()
    for event in run_order(num_microbatches, num_layers, **options):
        if isinstance(event, ResidenceEvent) and event.layer is not None:
            present[event.phase] += {Action.ACQUIRE: 1, Action.USED: 0, Action.FINISHED: -1}[event.action]
            highest |= present
    assert all(num <= min(num_layers, 1 + int(options["num_layers_ahead"])) for num in highest.values())


@given(st.integers(2, 5), st.integers(1, 6), _OPTIONS)
def test_a_step_keeps_the_activations_of_one_microbatch_and_one_layer(
    num_microbatches: int, num_layers: int, options: dict[str, bool]
) -> None:
    events = run_order(num_microbatches, num_layers, **options)

    def of(slot: Slot) -> float:
        return peak(events, lambda event: 1.0 if event.slot is slot else 0.0)

    assert of(Slot.PRE) == num_layers + 1  # forward's attention runs before backward's
    assert of(Slot.COMBINE) == of(Slot.EXPERTS) == num_layers  # backward's is over first
    # While forward's experts and combine allocate, early release has freed what backward's attention saved. Inputs that
    # delayed weight gradients need stay.
    is_released = options["early_release"] and not options["delayed"]
    shares = {Slot.PRE: 1.0, Slot.EXPERTS: 1.0, Slot.COMBINE: 1.0}
    assert peak(events, lambda event: shares.get(event.slot, 0.0)) == 3 * num_layers + (not is_released)


_WITH_POST = LayerPlan(frozenset((Slot.PRE, Slot.DISPATCH, Slot.EXPERTS, Slot.COMBINE, Slot.POST)))
# Megatron-core's order for two layers: the second layer's backward beside the first layer's forward.
_PAIR = """
    b.post.backward b.combine.backward f.pre.forward b.experts.backward f.dispatch.forward b.experts.weight_gradient
    b.dispatch.backward {early} f.experts.forward f.combine.forward {late} f.post.forward b.pre.weight_gradient
"""
_LAST_PAIR = _PAIR.replace("b.pre.weight_gradient", "")


@pytest.mark.parametrize("early_release", [False, True])
def test_pairs_of_layers_go_as_in_megatron_core(early_release: bool) -> None:
    def shown(event: Event) -> str:
        return f"{'bf'[event.microbatch]}.{event.slot}.{event.kind}".replace(" ", "_")

    places = {"early": "b.pre.backward", "late": ""} if early_release else {"early": "", "late": "b.pre.backward"}
    between = [*_PAIR.format(**places).split(), *_LAST_PAIR.format(**places).split()]
    shown_events = [
        shown(event) for event in work(order([_WITH_POST] * 2, [_WITH_POST] * 2, early_release=early_release))
    ]
    assert shown_events == [
        *("f.preprocess.forward", "b.postprocess.backward"),
        *between,
        *("b.pre.weight_gradient", "f.postprocess.forward", "b.preprocess.backward"),
    ]


def test_the_first_layers_delayed_gradients_come_behind_all_layers() -> None:
    events = work(order(3, 1))
    deferred = events.index(Event(0, 0, Slot.PRE, Kind.WEIGHT_GRADIENT))
    assert max(i for i, event in enumerate(events) if event.layer is not None) == deferred


def test_residence_can_be_put_into_any_order_and_taken_out() -> None:
    events = run_order(3, 4, num_layers_ahead=2)
    assert tuple(with_residence(work(order(4, 4)), num_layers_ahead=1)) == order(4, 4)
    assert len(events) == len(work(events)) + 3 * 3 * 2 * 5


def test_communication_has_a_lane_of_its_own() -> None:
    for event in work(order(2, 2)):
        assert (event.lane is Lane.COMMUNICATION) == (event.slot in (Slot.DISPATCH, Slot.COMBINE))


def test_a_table_has_a_line_for_each_event() -> None:
    events = order(2, 2)
    lines = table(events).splitlines()
    assert lines[0].split() == ["compute", "communication", "residence"]
    assert len(lines) == 1 + len(events)
    assert lines[1].split() == ["1", "forward", "acquire"]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: order(None, None), "got None twice"),
        (lambda: order(1, 1, forward_microbatch=0), "two microbatches"),
        (lambda: order(1, None, num_layers_ahead=-1), "got -1"),
        (lambda: order(-1, None), "got -1"),
        (lambda: run_order(0, 1), "num_microbatches"),
        (lambda: LayerPlan(frozenset((Slot.PRE,))), "got pre"),
        (lambda: LayerPlan(delayed=frozenset((Slot.COMBINE,))), "got combine"),
    ],
)
def test_impossible_arguments_of_orders_and_layer_plans_are_refused(call: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()  # type: ignore[operator]
