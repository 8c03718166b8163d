"""`UnitResidence` under the events of a schedule, written out by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from engine_models import assert_gradients_equal, fsdp, rows_of_this_rank, twins
from schedule_models import Stack, backward_dw
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from lamella_engine import ZERO1, ZERO3, AxisPlacement, ShardingOptions, UnitResidence, fully_shard
from lamella_engine._api.residence import _mark_read
from lamella_engine.testing import assert_at_rest, named_units, record, unsharded_nbytes
from lamella_testing import run_ranks

BATCHES = [torch.randn(8, 3, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]


@dataclass(frozen=True)
class _UseEvent:
    microbatch: int
    layer: int | None
    phase: str


@dataclass(frozen=True)
class _StepEvent(_UseEvent):
    action: str


def _shard(model: nn.Module, placements: AxisPlacement = ZERO3) -> None:
    for module in (*model.get_submodule("layers").children(), model):
        fully_shard(module, options=ShardingOptions(placements=placements))


def _residence(model: Stack, num_microbatches: int | None = 2) -> UnitResidence:
    residence = UnitResidence(model, list(model.layers))
    if num_microbatches is not None:
        residence.begin_step(num_microbatches)
    return residence


def _backward(model: Stack, batch: torch.Tensor) -> None:
    """Forward and backward in one graph, past the hooks of units."""
    x = model.stem(batch)
    for layer in model.layers:
        for piece in layer.pieces:  # type: ignore[union-attr]
            x = piece(x)
    model.finish(x).backward()  # type: ignore[no-untyped-call]
    backward_dw(model)


def _run_microbatch(
    residence: UnitResidence, model: Stack, microbatch: int, batch: torch.Tensor, *, finishes_layers_last: bool = False
) -> None:
    """A microbatch with every layer present at once, in one graph: allowed by verbs, unknown to schedules."""
    everything = (None, *range(len(model.layers)))
    for phase in ("forward", "backward"):
        for layer in everything:
            residence.acquire(_UseEvent(microbatch, layer, phase))
        for layer in everything:
            residence.used(_UseEvent(microbatch, layer, phase))
        if phase == "backward":
            _backward(model, batch)
        for layer in everything if finishes_layers_last else reversed(everything):
            residence.finished(_UseEvent(microbatch, layer, phase))


@pytest.mark.parametrize("finishes_layers_last", [False, True])
@pytest.mark.parametrize(("placements", "num_reductions"), [(ZERO3, 2), (ZERO1, 1)])
def test_backwards_reduce_as_the_stage_says_and_the_last_ends_the_step(
    placements: AxisPlacement, num_reductions: int, finishes_layers_last: bool
) -> None:
    """Layers with late weight gradients finish behind the parameters around them, and end the step then."""

    def on_each_rank() -> None:
        reference, model = twins(Stack, lambda model: _shard(model, placements))
        assert isinstance(model, Stack)
        for _ in range(2):
            for twin in (reference, model):
                twin.zero_grad()
            log = record(model)
            residence = _residence(model)
            for microbatch, batch in enumerate(BATCHES):
                reference(batch).backward()
                backward_dw(reference)
                rows = rows_of_this_rank(batch)
                _run_microbatch(residence, model, microbatch, rows, finishes_layers_last=finishes_layers_last)
            assert_gradients_equal(reference, model, rtol=1e-4, atol=1e-6)
            assert_at_rest(model)
            assert {log.units_of("reduce").count(name) for name, _ in named_units(model)} == {num_reductions}

    run_ranks(on_each_rank, 2)


@pytest.mark.parametrize(("placements", "num_reductions"), [(ZERO3, 2), (ZERO1, 1)])
def test_a_caller_may_say_which_backward_is_the_last(placements: AxisPlacement, num_reductions: int) -> None:
    def on_each_rank() -> None:
        reference, model = twins(Stack, lambda model: _shard(model, placements))
        assert isinstance(model, Stack)
        residence = _residence(model, None)
        log = record(model)
        for number, batch in enumerate(BATCHES, start=7):  # numbers go on from step to step
            fsdp(model).set_is_last_backward(number == 6 + len(BATCHES))
            reference(batch).backward()
            backward_dw(reference)
            _run_microbatch(residence, model, number, rows_of_this_rank(batch))
        fsdp(model).wait_for_gradients()
        assert_gradients_equal(reference, model, rtol=1e-4, atol=1e-6)
        assert_at_rest(model)
        assert {log.units_of("reduce").count(name) for name, _ in named_units(model)} == {num_reductions}

    run_ranks(on_each_rank, 2)


def test_a_layer_may_be_several_units() -> None:
    def on_each_rank() -> None:
        reference, model = twins(Stack, _shard)
        assert isinstance(model, Stack) and isinstance(reference, Stack)
        first, *later_layers = model.layers
        log = record(model)
        residence = UnitResidence(model, [first, later_layers])
        residence.begin_step(1)
        events = [_UseEvent(0, layer, "backward") for layer in (None, 0, 1)]
        for event in events:
            residence.acquire(event)
            residence.used(event)
        for twin, batch in ((reference, BATCHES[0]), (model, rows_of_this_rank(BATCHES[0]))):
            _backward(twin, batch)
        for event in reversed(events):
            residence.finished(event)
        assert_gradients_equal(reference, model, rtol=1e-4, atol=1e-6)
        assert_at_rest(model)
        for verb in ("gather", "reduce"):
            assert sorted(log.units_of(verb)) == sorted(name for name, _ in named_units(model))

    run_ranks(on_each_rank, 2)


@pytest.mark.parametrize(("inner", "num_reductions", "num_gathers"), [(ZERO3, 2, 4), (ZERO1, 1, 1)])
def test_hooks_end_the_backwards_of_units_that_the_slots_call(
    inner: AxisPlacement, num_reductions: int, num_gathers: int
) -> None:
    """A layer gives an inner module a stage of its own; copies of the inner module stay beside the freed layers."""

    def shard(model: nn.Module) -> None:
        for layer in model.get_submodule("layers").children():
            fully_shard(layer.get_submodule("up"), options=ShardingOptions(placements=inner))
        _shard(model)

    def on_each_rank() -> None:
        reference, model = twins(Stack, shard)
        assert isinstance(model, Stack)
        called = [layer.get_submodule("up") for layer in model.layers]
        log = record(model)
        residence = UnitResidence(model, [[*pair] for pair in zip(model.layers, called, strict=True)], called=called)
        residence.begin_step(len(BATCHES))
        for microbatch, batch in enumerate(BATCHES):
            reference(batch).backward()
            backward_dw(reference)
            _run_microbatch(residence, model, microbatch, rows_of_this_rank(batch))
        assert_gradients_equal(reference, model, rtol=1e-4, atol=1e-6)
        assert_at_rest(model)
        names = {f"layers.{i}.up" for i in range(len(called))}
        assert {log.units_of("reduce").count(name) for name in names} == {num_reductions}
        assert {log.units_of("gather").count(name) for name in names} == {num_gathers}
        steps = [_StepEvent(0, layer, "forward", action) for layer in (None, 0) for action in ("acquire", "used")]
        stays = len(called) if inner is ZERO1 else 1
        parts = [unsharded_nbytes(model), unsharded_nbytes(model.layers[0]), stays * unsharded_nbytes(called[0])]
        assert residence.peak_nbytes(steps) == sum(parts)

    run_ranks(on_each_rank, 2)


def test_a_dropped_residence_leaves_every_unit_at_rest_without_a_collective() -> None:
    def on_each_rank() -> None:
        model = Stack()
        _shard(model)
        log = record(model)
        residence = _residence(model)
        events = [
            _UseEvent(0, None, "forward"),
            _UseEvent(0, 0, "forward"),
            _UseEvent(1, 2, "backward"),
        ]
        for event in events:
            residence.acquire(event)
        residence.used(events[1])
        gathers = len(log.events)
        for _ in range(2):
            residence.drop()
        assert_at_rest(model)
        assert len(log.events) == gathers
        _run_microbatch(_residence(model, 1), model, 0, BATCHES[0])
        assert_at_rest(model)

    run_ranks(on_each_rank, 2)


def test_gradients_are_marked_as_read_before_their_reduction(monkeypatch: pytest.MonkeyPatch) -> None:
    marked: list[torch.Tensor] = []

    def on_each_rank() -> int:
        model = Stack()
        _shard(model)
        streams: Any = dict(named_units(model))["root"].parameters.context.streams
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: marked.append(tensor))
        real = streams.device
        original = UnitResidence.finished

        def finished(self: UnitResidence, event: _UseEvent) -> None:
            before = len(marked)
            streams.device = torch.device("cuda") if event.phase == "backward" else real
            monkeypatch.setattr(type(streams), "compute_stream", property(lambda _: torch.cpu.current_stream()))
            original(self, event)
            streams.device = real
            assert (len(marked) > before) == (event.phase == "backward")

        monkeypatch.setattr(UnitResidence, "finished", finished)
        _run_microbatch(_residence(model, 1), model, 0, BATCHES[0])
        return len(marked)

    num_parameters = sum(1 for _ in Stack().parameters())
    assert run_ranks(on_each_rank, 2) == [num_parameters] * 2


class _SchedulePart(nn.Module):
    """A weight given as a DTensor on other axes, with a layer that reads the local part."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.weight = nn.Parameter(DTensor.from_local(torch.ones(4, 3), mesh, [Shard(0)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        local: torch.Tensor = self.weight.to_local()  # type: ignore[attr-defined]
        return x @ local.T


def test_a_dtensors_gradient_is_marked_as_read_by_its_local_part(monkeypatch: pytest.MonkeyPatch) -> None:
    marked: list[torch.Tensor] = []

    def on_each_rank() -> list[type]:
        meshes = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "experts"))
        model: Any = fully_shard(_SchedulePart(meshes["experts"]), mesh=meshes["data"])
        residence = UnitResidence(model, [])
        residence.begin_step(1)
        forward, backward = (_UseEvent(0, None, phase) for phase in ("forward", "backward"))
        for event in (forward, backward):
            residence.acquire(event)
            residence.used(event)
        loss: Any = _SchedulePart.forward(model, BATCHES[0]).sum()
        loss.backward()
        residence.finished(forward)
        streams: Any = dict(named_units(model))["root"].parameters.context.streams
        real = streams.device
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: marked.append(tensor))
        monkeypatch.setattr(type(streams), "compute_stream", property(lambda _: torch.cpu.current_stream()))
        streams.device = torch.device("cuda")
        _mark_read(model)
        streams.device = real
        residence.finished(backward)
        assert_at_rest(model)
        return [type(tensor) for tensor in marked]

    assert run_ranks(on_each_rank, 2) == [[torch.Tensor]] * 2


def test_wrong_residences_and_events_are_refused() -> None:
    def on_each_rank() -> None:
        model = Stack()
        _shard(model)
        with pytest.raises(ValueError, match=r"Expected layer 1 to be a unit, got a Linear that is none"):
            UnitResidence(model, [model.layers[0], nn.Linear(2, 2)])
        with pytest.raises(ValueError, match=r"Expected the model to be a unit, got a Linear that is none"):
            UnitResidence(nn.Linear(2, 2), [])
        residence = _residence(model, 1)
        with pytest.raises(
            ValueError, match=r"Expected a unit for each layer of the schedule, got 3 units and layer 3"
        ):
            residence.acquire(_UseEvent(0, 3, "forward"))

    run_ranks(on_each_rank, 1)
