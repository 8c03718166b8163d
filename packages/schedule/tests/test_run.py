"""Runs: parameters that come and go, failures anywhere, pairs for pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
import torch
from alive import Alive
from moe_toy import Model, microbatches
from torch import nn

from lamella_schedule import (
    Event,
    Flight,
    Kind,
    Lane,
    Lanes,
    LayerSlots,
    ModelChunk,
    Phase,
    ResidenceEvent,
    Slot,
    Stopwatch,
    run,
    run_order,
    run_pair,
    simulate,
    work,
)
from lamella_testing import run_ranks


class Shelf:
    """A residence: parameters have no bytes but between their acquisition and the end of their use."""

    def __init__(self, owners: dict[int | None, list[nn.Parameter]]) -> None:
        self._owners = owners
        self._at_rest = {id(p): p.detach().clone() for parameters in owners.values() for p in parameters}
        self.users: dict[int | None, set[tuple[int, Phase]]] = {owner: set() for owner in owners}
        self.log: list[tuple[str, ResidenceEvent]] = []
        self.highest = 0
        for owner in owners:
            self._free(owner)

    def begin_step(self, num_microbatches: int) -> None:
        assert num_microbatches == 4

    def acquire(self, event: ResidenceEvent) -> None:
        self.log.append(("acquire", event))
        if not self.users[event.layer]:
            for parameter in self._owners[event.layer]:
                saved = self._at_rest[id(parameter)]
                parameter.untyped_storage().resize_(saved.nbytes)
                parameter.data.copy_(saved)
        self.users[event.layer].add((event.microbatch, event.phase))
        self.highest = max(self.highest, sum(bool(users) for layer, users in self.users.items() if layer is not None))

    def used(self, event: ResidenceEvent) -> None:
        self.log.append(("used", event))
        assert (event.microbatch, event.phase) in self.users[event.layer]

    def finished(self, event: ResidenceEvent) -> None:
        self.log.append(("finished", event))
        self.users[event.layer].remove((event.microbatch, event.phase))
        if not self.users[event.layer]:
            self._free(event.layer)

    def drop(self) -> None:
        raise AssertionError("nothing has failed")

    def _free(self, owner: int | None) -> None:
        for parameter in self._owners[owner]:
            parameter.untyped_storage().resize_(0)

    def return_all(self) -> None:
        for owner, parameters in self._owners.items():
            assert not self.users[owner]
            for parameter in parameters:
                parameter.untyped_storage().resize_(self._at_rest[id(parameter)].nbytes)
                parameter.data.copy_(self._at_rest[id(parameter)])


def _owners(model: Model) -> dict[int | None, list[nn.Parameter]]:
    owners: dict[int | None, list[nn.Parameter]] = {i: list(layer.parameters()) for i, layer in enumerate(model.layers)}
    inner = {id(parameter) for parameters in owners.values() for parameter in parameters}
    return owners | {None: [parameter for parameter in model.parameters() if id(parameter) not in inner]}


def _gradients_and_layers(num_layers_ahead: int, is_delayed: bool) -> tuple[bool, int]:
    gradients, highest = [], 0
    for is_there in (True, False):
        model = Model("EE-EE", is_delayed=is_delayed)
        shelf = None if is_there else Shelf(_owners(model))
        run(
            [model.chunk(tokens, 0.25) for tokens in microbatches(0, 4)],
            residence=shelf,
            num_layers_ahead=num_layers_ahead,
        )
        gradients.append([parameter.grad for parameter in model.parameters()])
        if shelf is not None:
            shelf.return_all()
            highest = shelf.highest
    assert all(one is not None for one in gradients[0])
    return all(torch.equal(a, b) for a, b in zip(*gradients, strict=True) if a is not None and b is not None), highest


def test_a_run_needs_parameters_only_where_the_residence_keeps_them() -> None:
    def train() -> list[tuple[bool, int]]:
        return [_gradients_and_layers(0, False), _gradients_and_layers(1, False), _gradients_and_layers(1, True)]

    for outcomes in run_ranks(train, 2):
        assert [is_equal for is_equal, _ in outcomes] == [True, True, True]
        assert outcomes[0][1] == 2  # one in each direction
        assert outcomes[1][1] <= 4 and outcomes[2][1] <= 4


def _layer(alive: Alive) -> LayerSlots:
    def slot(x: torch.Tensor) -> torch.Tensor:
        out = torch.tanh(x)  # saves its output
        alive.note(out)
        return out

    return LayerSlots(pre=slot, dispatch=slot, experts=slot, combine=slot, delayed={Slot.EXPERTS: lambda: None})


def _chunks(alive: Alive) -> list[ModelChunk]:
    weight = torch.ones(3, requires_grad=True)
    return [ModelChunk(lambda: weight * 2, [_layer(alive)] * 2, lambda x: x.sum()) for _ in range(3)]


class Boom(Exception):
    """Raised on purpose."""


class Empty:
    """A residence that only counts, and may raise."""

    def __init__(self, fails: ResidenceEvent | None = None) -> None:
        self.present: list[ResidenceEvent] = []
        self._fails = fails

    def begin_step(self, num_microbatches: int) -> None:
        assert not self.present

    def acquire(self, event: ResidenceEvent) -> None:
        self.present.append(event)
        self._fail(event)

    def used(self, event: ResidenceEvent) -> None:
        self._fail(event)

    def finished(self, event: ResidenceEvent) -> None:
        self._fail(event)
        stay = event.microbatch, event.layer, event.phase
        [acquired] = [
            acquired_event
            for acquired_event in self.present
            if (acquired_event.microbatch, acquired_event.layer, acquired_event.phase) == stay
        ]
        self.present.remove(acquired)

    def drop(self) -> None:
        self.present.clear()

    def _fail(self, event: ResidenceEvent) -> None:
        if event == self._fails:
            raise Boom


class Keeping(Empty):
    """Keeps parameters from forward to backward."""

    def finished(self, event: ResidenceEvent) -> None:
        if event.phase is Phase.BACKWARD:
            super().finished(event)


def _run_and_fail(residence: Empty, alive: Alive, at: Event | None) -> None:
    def around(event: Event) -> AbstractContextManager[None]:
        if event == at:
            raise Boom
        return nullcontext()

    try:
        run(_chunks(alive), residence=residence, around=around)
    except Boom:
        return
    raise AssertionError("nothing was raised")


def test_an_exception_anywhere_leaves_nothing_held() -> None:
    plan = _layer(Alive()).plan
    for event in run_order(3, [plan, plan]):
        alive = Alive()
        is_work = isinstance(event, Event)
        residence = Empty(None if isinstance(event, Event) else event)
        _run_and_fail(residence, alive, event if isinstance(event, Event) else None)
        assert residence.present == [], f"{event} {is_work}"
        assert alive.num == 0, str(event)
    run(_chunks(Alive()), residence=Empty())


def test_an_exception_in_a_pair_empties_both_flights() -> None:
    lanes, alive = Lanes(torch.device("cpu")), Alive()
    first, second, _ = (Flight(chunk, lanes, i) for i, chunk in enumerate(_chunks(alive)))
    run_pair(first, None)
    first.begin_backward((torch.ones(()),))

    def around(event: Event) -> AbstractContextManager[None]:
        if event == Event(1, 1, Slot.COMBINE, Kind.FORWARD):
            raise Boom
        return nullcontext()

    assert alive.num > 0
    with pytest.raises(Boom):
        run_pair(second, first, around=around)
    assert alive.num == 0
    for flight in (first, second):
        with pytest.raises(RuntimeError):
            run_pair(flight, None)
        with pytest.raises(RuntimeError):
            run_pair(None, flight)


@pytest.mark.parametrize(
    ("postprocess", "words"),
    [
        (lambda x: x, r"shape \(3,\)"),
        (lambda x: x.detach().sum(), r"shape \(\) without a gradient"),
        (lambda x: (x.sum(), x.sum()), r"shape \(\), a tensor of shape \(\)"),
        (lambda x: 3.0, "got float in microbatch 0"),
        (lambda x: (), "got nothing"),
    ],
)
def test_a_loss_that_cannot_be_one_is_refused(postprocess: Callable[[torch.Tensor], object], words: str) -> None:
    residence = Keeping()
    with pytest.raises(ValueError, match=words):
        run([ModelChunk(_value, [], postprocess)], residence=residence)
    assert residence.present == []


def _value() -> torch.Tensor:
    return torch.ones(3, requires_grad=True) * 2


def test_a_step_without_microbatches_is_refused() -> None:
    with pytest.raises(ValueError, match="got no chunk"):
        run([])


def test_stages_of_a_pipeline_run_in_pairs_and_find_the_gradients_of_their_inputs() -> None:
    torch.manual_seed(0)
    linears = [nn.Linear(3, 3) for _ in range(5)]
    layers = [LayerSlots(pre=linear, experts=torch.tanh) for linear in linears]
    data = torch.randn(3, 2, 3)
    for microbatch in data:
        x = microbatch
        for linear in linears:
            x = torch.tanh(linear(x))
        (x.sum() ** 2).backward()
    expected = [linear.weight.grad for linear in linears]
    for linear in linears:
        linear.weight.grad = None

    lanes = Lanes(torch.device("cpu"))
    inputs: dict[int, torch.Tensor] = {}

    def stage(first: bool, i: int) -> ModelChunk:
        if first:
            return ModelChunk(lambda: data[i], layers[:3], lambda x: x)
        return ModelChunk(lambda: inputs[i], layers[3:], lambda x: x.sum() ** 2)

    heads: dict[int, Flight] = {}
    for i in range(3):
        heads[i] = Flight(stage(True, i), lanes, i)
        run_pair(heads[i], None)
        (output,) = heads[i].outputs
        assert isinstance(output, torch.Tensor)
        inputs[i] = output.detach().requires_grad_()
    tail: Flight | None = None
    for i in range(4):
        forward = Flight(stage(False, i), lanes, i) if i < 3 else None
        run_pair(forward, tail)
        if tail is not None:
            heads[i - 1].begin_backward((inputs[i - 1].grad,))
            run_pair(None, heads[i - 1])
        tail = forward
        if tail is not None:
            tail.begin_backward((torch.ones(()),))
    for linear, gradient in zip(linears, expected, strict=True):
        assert linear.weight.grad is not None and gradient is not None
        torch.testing.assert_close(linear.weight.grad, gradient, rtol=0, atol=0)


class _Log:
    """A residence that notes its events, and holds nothing."""

    def __init__(self) -> None:
        self.events: list[ResidenceEvent] = []
        self.num_dropped = 0
        self.acquire = self.used = self.finished = self.events.append

    def begin_step(self, num_microbatches: int) -> None: ...

    def drop(self) -> None:
        self.num_dropped += 1


@pytest.mark.parametrize("fails", [False, True])
def test_two_stages_in_a_pair_have_a_residence_each(fails: bool) -> None:
    lanes = Lanes(torch.device("cpu"))
    linear = nn.Linear(3, 3)
    chunk = ModelChunk(lambda: torch.ones(3), [LayerSlots(pre=linear, experts=torch.tanh)], lambda x: x.sum())
    backward = Flight(chunk, lanes, 0)
    run_pair(backward, None)
    backward.begin_backward((torch.ones(()),))

    @contextmanager
    def around(event: Event) -> Iterator[None]:
        if fails and event.slot is Slot.EXPERTS:
            raise InterruptedError
        yield

    first, second = _Log(), _Log()
    with pytest.raises(InterruptedError) if fails else nullcontext():
        run_pair(Flight(chunk, lanes, 1), backward, residence=first, backward_residence=second, around=around)
    assert {(event.microbatch, event.phase) for event in first.events} == {(1, Phase.FORWARD)}
    assert {(event.microbatch, event.phase) for event in second.events} == {(0, Phase.BACKWARD)}
    assert [first.num_dropped, second.num_dropped] == [int(fails)] * 2
    assert fails or len(first.events) == len(second.events) == 6


def test_a_flight_runs_once_in_each_direction() -> None:
    lanes = Lanes(torch.device("cpu"))

    def flight(microbatch: int = 0) -> Flight:
        return Flight(ModelChunk(_value, [], lambda x: x.sum()), lanes, microbatch)

    one = flight()
    with pytest.raises(RuntimeError, match="Run a pair with the flight in forward first"):
        one.begin_backward((torch.ones(()),))
    run_pair(one, None)
    with pytest.raises(ValueError, match="got 2"):
        one.begin_backward((torch.ones(()), None))
    one.begin_backward((torch.ones(()),))
    with pytest.raises(RuntimeError, match="got others"):
        one.begin_backward((torch.ones(()),))
    run_pair(None, one)
    with pytest.raises(RuntimeError, match="or is over"):
        run_pair(None, one)
    again = flight()
    run_pair(again, None)
    with pytest.raises(RuntimeError, match="a second time in forward"):
        run_pair(again, None)
    with pytest.raises(ValueError, match="two microbatches"):
        run_pair(flight(), flight())
    other = Flight(ModelChunk(_value, [], lambda x: x.sum()), Lanes(torch.device("cpu")), 1)
    with pytest.raises(ValueError, match="the same lanes"):
        run_pair(flight(), other)


def test_a_gradient_that_an_output_cannot_have_is_refused() -> None:
    def outputs(x: torch.Tensor) -> tuple[object, ...]:
        return x, x.detach() + 1, 3

    flight = Flight(ModelChunk(_value, [], outputs), Lanes(torch.device("cpu")), 7)
    run_pair(flight, None)
    good, bad = torch.ones(3), torch.ones(2)
    for gradients, words in (
        ((bad, None, None), r"shape \(3,\) for output 0 of microbatch 7, got shape \(2,\)"),
        ((good, good, None), r"output 1 of microbatch 7, which is a tensor without requires_grad, got .* shape \(3,\)"),
        ((good, None, bad), r"output 2 of microbatch 7, which is a int, got a gradient of shape \(2,\)"),
    ):
        with pytest.raises(ValueError, match=words):
            flight.begin_backward(gradients)
    flight.begin_backward((good, None, None))
    run_pair(None, flight)


def test_delayed_weight_gradients_of_other_slots_are_refused_with_the_layer() -> None:
    with pytest.raises(ValueError, match="delayed weight gradients in pre and experts alone, got dispatch"):
        LayerSlots(pre=torch.tanh, dispatch=torch.tanh, experts=torch.tanh, delayed={Slot.DISPATCH: lambda: None})


def test_every_microbatch_is_checked_before_the_first_runs() -> None:
    weight = torch.ones(3, requires_grad=True)
    layer = LayerSlots(pre=torch.tanh, experts=torch.tanh)
    calls: dict[Slot, Callable[[], object]] = {}
    changed = LayerSlots(pre=torch.tanh, experts=torch.tanh, delayed=calls)
    calls[Slot.POST] = lambda: None
    chunks = [
        ModelChunk(lambda: weight * 2, [model_layer], lambda x: x.sum()) for model_layer in (layer, layer, changed)
    ]
    with pytest.raises(ValueError, match="alone, got post"):
        run(chunks)
    assert weight.grad is None


def test_a_measured_run_gives_the_durations_of_a_simulation() -> None:
    watch = Stopwatch("cpu")
    run(_chunks(Alive()), around=watch, device="cpu")
    plan = _layer(Alive()).plan
    events = run_order(3, [plan, plan])
    measured = watch.timeline
    assert [span.event for span in measured.spans] == list(work(events))
    assert measured.spans[0].start == 0
    assert measured.exposed == pytest.approx(measured.busy(Lane.COMMUNICATION))  # a CPU runs one event after another
    predicted = simulate(events, measured.durations)
    assert predicted.busy(Lane.COMMUNICATION) == pytest.approx(measured.busy(Lane.COMMUNICATION))
    assert 0 < predicted.exposed < measured.exposed


def test_every_event_runs_inside_its_context() -> None:
    log: list[str] = []

    @contextmanager
    def around(event: Event) -> Iterator[None]:
        log.append(f"{event} begins")
        yield
        log.append(f"{event} ends")

    run(_chunks(Alive())[:1], around=around)
    plan = _layer(Alive()).plan
    assert log == [f"{event} {end}" for event in work(run_order(1, [plan, plan])) for end in ("begins", "ends")]
    assert any(event.kind is Kind.WEIGHT_GRADIENT for event in work(run_order(1, [plan, plan])))
