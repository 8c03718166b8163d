"""Programs that need the waits between streams; a program returns its races, none with all waits in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from engine_models import BF16, Net, fsdp, inputs, local, mesh_of, shard
from races import Races, detected
from schedule_models import Stack, backward_dw, delay
from torch import nn

from lamella_buffers import LocalTransport
from lamella_engine import (
    HFSDP,
    HSDP,
    ZERO1,
    ZERO3,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    ShardingOptions,
    fully_shard,
    load_scaling_state,
    scaling_state,
    set_main_grads,
    share_comm_ctx,
)
from lamella_engine._inspect import scaling_state as _scaling_state
from lamella_engine._scaling.scaling import scales_of
from lamella_engine.extending import forget_measured, note_step
from lamella_engine.testing import FakeStream, require_unit, streams_of, tree_of
from lamella_precision import Float8Recipe

Scenario = Callable[[], list[str]]
SCENARIOS: dict[str, Scenario] = {}


def _scenario(run: Scenario) -> Scenario:
    SCENARIOS[run.__name__] = run
    return run


def _backward(model: nn.Module, *, is_last: bool = True) -> None:
    fsdp(model).set_is_last_backward(is_last)
    model(inputs()).float().square().mean().backward()


def _update(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                local(parameter).sub_(local(parameter.grad), alpha=0.1)
                parameter.grad = None


def _train(model: nn.Module, num_steps: int = 3) -> None:
    """Steps of two microbatches."""
    for _ in range(num_steps):
        for is_last in (False, True):
            _backward(model, is_last=is_last)
        _update(model)


def _stream(races: Races, name: str) -> FakeStream:
    """Another stream of the caller, behind all work of the compute stream."""
    stream = FakeStream(races.streams)
    stream.wait_stream(races.streams.compute)
    races.name(stream, name)
    return stream


def _compute(layer: object, x: torch.Tensor) -> None:
    """Read a layer's unsharded weights on the current stream, without its hooks."""
    assert isinstance(layer, nn.Module)
    layer.get_submodule("up")(x)


def _training(**options: Any) -> list[str]:
    model = shard(Net(), **options)
    with detected(model) as races:
        _train(model)
    return races.violations


_REDUCED_IN_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


@_scenario
def training() -> list[str]:
    return _training()


@_scenario
def training_in_bf16() -> list[str]:
    return _training(mp_policy=BF16)


@_scenario
def training_with_casts_of_gradients() -> list[str]:
    return _training(mp_policy=_REDUCED_IN_BF16)


@_scenario
def training_with_units_kept_for_backward() -> list[str]:
    return _training(mp_policy=BF16, options=ShardingOptions(keep_budget=1 << 20))


@_scenario
def training_with_weight_copies() -> list[str]:
    return _training(mp_policy=BF16, options=ShardingOptions(placements=ZERO1))


@_scenario
def training_with_replicas() -> list[str]:
    return _training(mesh=mesh_of((1, 1)), mp_policy=BF16, options=ShardingOptions(placements=(HSDP, ZERO3)))


@_scenario
def training_with_an_outer_axis() -> list[str]:
    return _training(mesh=mesh_of((1, 1)), mp_policy=BF16, options=ShardingOptions(placements=(HFSDP, ZERO3)))


@_scenario
def training_with_parts_kept_for_neighbours() -> list[str]:
    model = shard(Net(), mp_policy=BF16)
    for unit in tree_of(model).units:
        for group in unit.parameters.groups:
            group.transports.neighbours = LocalTransport()
    with detected(model) as races:
        _train(model)
    return races.violations


@_scenario
def gathers_that_wait_for_an_event_after_the_update() -> list[str]:
    model = shard(Net())
    with detected(model) as races:
        for _ in range(2):
            _train(model, num_steps=1)
            streams_of(model).post_optim_event = races.streams.compute.record_event()  # type: ignore[assignment]
    return races.violations


@_scenario
def holds_that_several_streams_wait_for_and_release() -> list[str]:
    model = shard(Net())
    layer, x = fsdp(model.layers[0]), torch.ones(2, 7)
    with detected(model) as races, torch.no_grad():
        side = _stream(races, "side")
        for _ in range(2):
            first, second = layer.hold(), layer.hold()
            first.wait()
            with races.streams.stream(side):
                second.wait()
                _compute(layer, x)
                second.release()
            _compute(layer, x)
            first.release()
            local(model.get_parameter("layers.0.up.weight")).add_(1.0)
    return races.violations


@_scenario
def an_unshard_that_two_streams_wait_for() -> list[str]:
    model = shard(Net())
    layer, x = fsdp(model.layers[0]), torch.ones(2, 7)
    with detected(model) as races, torch.no_grad():
        side = _stream(races, "side")
        handle = layer.unshard(async_op=True)
        assert handle is not None
        handle.wait()
        with races.streams.stream(side):
            handle.wait()
            _compute(layer, x)
        races.streams.compute.wait_stream(side)
        layer.reshard()
    return races.violations


@_scenario
def a_reset_while_others_hold_and_compute() -> list[str]:
    model = shard(Net())
    layer, x = fsdp(model.layers[0]), torch.ones(2, 7)
    with detected(model) as races:
        side = _stream(races, "side")
        with torch.no_grad():
            first, second = layer.hold(), layer.hold()
            first.wait()
            with races.streams.stream(side):
                second.wait()
                _compute(layer, x)
                second.release()
            _compute(layer, x)
        fsdp(model).reset_iter_state()
        fsdp(model.layers[1]).unshard()
        _compute(fsdp(model.layers[1]), x)
    return races.violations


@_scenario
def a_reset_before_gathers_that_wait_for_an_earlier_event() -> list[str]:
    model = shard(Net())
    layer, x = fsdp(model.layers[0]), torch.ones(2, 7)
    with detected(model) as races, torch.no_grad():
        layer.unshard()
        event = races.streams.compute.record_event()
        _compute(layer, x)
        fsdp(model).reset_iter_state()
        streams_of(model).post_optim_event = event  # type: ignore[assignment]
        layer.unshard()
    return races.violations


class _Queue(list[Any]):
    """Delayed products: another stream waits for the inputs of each, and not for the rest of the backward."""

    def __init__(self, stream: FakeStream, races: Races) -> None:
        super().__init__()
        self._stream, self._races = stream, races

    def append(self, item: Any) -> None:
        self._stream.wait_stream(self._races.streams.compute)
        super().append(item)


@_scenario
def delayed_gradients_of_another_stream() -> list[str]:
    model = Stack()
    for module in (*model.layers, model):
        fully_shard(module)
    delay(model)
    with detected(model) as races:
        side = _stream(races, "side")
        for layer in model.layers:
            layer.down.queue = _Queue(side, races)  # type: ignore[union-attr]
        for _ in range(2):
            for reduces, is_last in ((False, False), (True, False), (True, True)):
                fsdp(model).set_requires_gradient_sync(reduces)
                fsdp(model).set_is_last_backward(is_last)
                model(inputs()).backward()
                with races.streams.stream(side):
                    backward_dw(model)
            _update(model)
    return races.violations


@_scenario
def a_delayed_gradient_within_its_backward() -> list[str]:
    model = Stack()
    for module in (*model.layers, model):
        fully_shard(module)
    delay(model)
    with detected(model) as races:
        side = _stream(races, "side")
        for layer in model.layers:
            layer.down.queue = _Queue(side, races)  # type: ignore[union-attr]

        def delayed_products(_: torch.Tensor) -> None:
            with races.streams.stream(side):
                backward_dw(model)

        def watch_output(_: nn.Module, __: object, output: torch.Tensor) -> None:
            output.register_hook(delayed_products)  # type: ignore[no-untyped-call]

        model.stem.register_forward_hook(watch_output)
        for _ in range(2):
            model(inputs()).backward()
            _update(model)
    return races.violations


class _AddsOnAnotherStream(torch.autograd.Function):
    """Adds to a weight's main_grad on a stream without a wait for the layer's work."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, races: Races, side: FakeStream) -> torch.Tensor:
        ctx.save_for_backward(weight)
        ctx.get, ctx.weight, ctx.races, ctx.side = weight.get_main_grad, weight, races, side
        output: torch.Tensor = x @ weight.T
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        with ctx.races.streams.stream(ctx.side):
            ctx.get().add_(1.0)
        ctx.races.streams.compute.wait_stream(ctx.side)
        ctx.weight.grad_added_to_main_grad = True
        return gradient @ weight, None, None, None


class _FusedOnAnotherStream(nn.Linear):
    races: Races
    side: FakeStream

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = _AddsOnAnotherStream.apply(x, self.weight, self.races, self.side)  # type: ignore[no-untyped-call]
        return output


def _fused_on_another_stream() -> nn.Sequential:
    model = nn.Sequential(_FusedOnAnotherStream(3, 3, bias=False), nn.Linear(3, 3))
    fully_shard(model)
    set_main_grads(model, [model.get_parameter("0.weight")])
    return model


@_scenario
def main_grads_that_another_stream_adds_to() -> list[str]:
    model = _fused_on_another_stream()
    with detected(model) as races:
        layer = model[0]
        layer.races, layer.side = races, _stream(races, "side")  # type: ignore[assignment]
        for _ in range(2):
            _backward(model)
            _update(model)
    return races.violations


@_scenario
def main_grads_dropped_on_another_stream() -> list[str]:
    model = _fused_on_another_stream()
    with detected(model) as races:
        layer = model[0]
        layer.races, layer.side = races, _stream(races, "side")  # type: ignore[assignment]
        for _ in range(2):
            fsdp(model).set_requires_gradient_sync(False)
            _backward(model)
            late = _stream(races, "late")
            with torch.no_grad(), races.streams.stream(late):
                unit = require_unit(model)
                unit.parameters.main_grads[0].view(0).add_(1.0)
                model.zero_grad()
    return races.violations


@_scenario
def partial_sums_reduced_without_another_backward() -> list[str]:
    model = shard(Net(), mesh=mesh_of((1, 1)), mp_policy=BF16, options=ShardingOptions(placements=(HSDP, ZERO3)))
    with detected(model) as races:
        _backward(model)
        _backward(model, is_last=False)
        with torch.no_grad():
            for parameter in model.parameters():
                local(parameter.grad).mul_(0.5)  # type: ignore[arg-type]
        fsdp(model).set_is_last_backward(True)
        fsdp(model).wait_for_gradients()
        _update(model)
    return races.violations


@_scenario
def trees_that_share_streams_on_streams_of_their_own() -> list[str]:
    models = [shard(Net(), mp_policy=_REDUCED_IN_BF16) for _ in range(2)]
    with detected(models[0]) as races:
        streams_of(models[1])._accelerator = races.streams  # type: ignore[assignment]
        share_comm_ctx([fsdp(model) for model in models])
        side = _stream(races, "side")
        for _ in range(2):  # gradients stay: an update on one stream would not order the second
            _backward(models[0])
            with races.streams.stream(side):
                _backward(models[1])
    return races.violations


@_scenario
def a_hook_on_a_stream_of_its_own() -> list[str]:
    model = shard(Net())
    with detected(model) as races:
        stream = _stream(races, "hook")
        for layer in model.layers:
            fsdp(layer).set_all_reduce_hook(lambda gradient: gradient.mul_(2.0), stream=stream)  # type: ignore[arg-type]
        _train(model)
    return races.violations


@_scenario
def gradients_on_the_cpu() -> list[str]:
    model = shard(Net(), mp_policy=BF16, offload_policy=CPUOffloadPolicy(pin_memory=False))
    with detected(model) as races:
        for _ in range(2):
            for is_last in (False, True):
                _backward(model, is_last=is_last)
            with races.on_host():
                _update(model)
    return races.violations


@_scenario
def shards_on_the_cpu() -> list[str]:
    model = shard(Net(), mp_policy=BF16, offload_policy=CPUOffloadPolicy(pin_memory=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    with detected(model) as races:
        for _ in range(2):
            for is_last in (False, True):
                _backward(model, is_last=is_last)
            with torch.no_grad():
                model(inputs())
            with races.on_host():
                optimizer.step()
                optimizer.zero_grad()
    return races.violations


@_scenario
def shards_on_the_cpu_that_the_host_writes_between_steps() -> list[str]:
    model = shard(Net(), mp_policy=BF16, offload_policy=CPUOffloadPolicy(pin_memory=False))
    with detected(model) as races, torch.no_grad():
        for _ in range(2):
            model(inputs())
            state = model.state_dict()
            with races.on_host():
                for value in state.values():
                    local(value).mul_(0.5)
    return races.violations


def _in_delayed_scaling() -> nn.Module:
    recipe = Float8Recipe(num_past_amaxes=2, compute_dtype=torch.float32)

    def recipe_of(parameter: nn.Parameter) -> Float8Recipe | None:
        return recipe if parameter.ndim == 2 else None

    return shard(Net(), mp_policy=MixedPrecisionPolicy(recipe=recipe_of))


@_scenario
def delayed_scaling() -> list[str]:
    model = _in_delayed_scaling()
    with detected(model) as races:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        for _ in range(3):
            _backward(model)
            _update(model)
            note_step(optimizer)
    return races.violations


@_scenario
def scales_loaded_after_weights() -> list[str]:
    model = _in_delayed_scaling()
    with detected(model) as races:
        _backward(model)
        _update(model)
        with patch.object(_scaling_state, "_synchronize", lambda _: races.synchronize()):
            scales = scaling_state(model)
        races.synchronize()  # with the numbers on the host
        model.load_state_dict(model.state_dict())
        load_scaling_state(model, scales)
        _backward(model)
    return races.violations


@_scenario
def amaxes_dropped_before_a_replay() -> list[str]:
    model = _in_delayed_scaling()
    with detected(model) as races:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        _backward(model)
        _update(model)
        note_step(optimizer)
        with torch.no_grad():
            model(inputs())
        forget_measured(optimizer)
        for unit in tree_of(model).units:
            for scales in scales_of(unit.parameters):
                scales.amaxes.add_(0.0)  # a replayed graph encodes on the stream of the replay
    return races.violations
