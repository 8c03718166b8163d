"""Weight gradients that are computed after their unit's backward, with hooks firing: when units reduce."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_models import assert_gradients_equal, fsdp, inputs, mesh_of, no_gradient_sync, rows_of_this_rank, sgd, twins
from schedule_models import NUM_LAYERS, LateLinear, ScheduledBlock, Stack, backward_dw, delay
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from lamella_engine import HSDP, ZERO1, ZERO3, MixedPrecisionPolicy, ShardingOptions, delay_gradient, fully_shard
from lamella_engine.testing import CollectiveLog, Streams, WaitingStream, assert_at_rest, named_units, record
from lamella_testing import run_ranks

pytestmark = pytest.mark.usefixtures("steps_on_shards")

BATCHES = [inputs(8, seed=1), inputs(8, seed=2)]


def _shard(model: nn.Module, **options: Any) -> None:
    for module in (*model.get_submodule("layers").children(), model):
        fully_shard(module, **options)
    delay(model)


def _pair(**options: Any) -> tuple[nn.Module, Stack, CollectiveLog]:
    reference, model = twins(Stack, lambda model: _shard(model, **options))
    assert isinstance(model, Stack)
    return reference, model, record(model)


def _block(model: Stack, i: int) -> ScheduledBlock:
    block = model.layers[i]
    assert isinstance(block, ScheduledBlock)
    return block


def _backward(model: nn.Module, batch: torch.Tensor) -> None:
    model(batch).backward()


def test_a_unit_is_reduced_at_its_last_delayed_gradient() -> None:
    def on_each_rank() -> None:
        reference, model, log = _pair()
        for batch in BATCHES:
            for twin, rows in ((reference, batch), (model, rows_of_this_rank(batch))):
                twin.zero_grad()
                _backward(twin, rows)
            assert log.units_of("reduce") == ["root"], "it has no late gradients"
            assert all(type(_block(model, i).down.weight) is nn.Parameter for i in range(NUM_LAYERS))
            for i in (1, 0, 2):
                _block(model, i).down.backward_dw()
                assert log.units_of("reduce")[-1] == f"layers.{i}"
                assert isinstance(_block(model, i).down.weight, DTensor)
            backward_dw(reference)
            assert_gradients_equal(reference, model, rtol=1e-4, atol=1e-6)
            assert_at_rest(model)
            log.clear()

    run_ranks(on_each_rank, 2)


@pytest.mark.parametrize(
    "options",
    [
        {"reshard_after_forward": False},
        {"options": ShardingOptions(placements=ZERO1)},
        {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    ],
    ids=str,
)
def test_microbatches_whose_weight_gradients_come_late_train_as_unsharded(options: dict[str, Any]) -> None:
    def on_each_rank() -> None:
        reference, model, _ = _pair(mesh=init_device_mesh("cpu", (2,)), **options)
        is_exact = "mp_policy" not in options
        optimizers = [sgd(list(twin.parameters())) for twin in (reference, model)]
        for _ in range(2):
            for i, batch in enumerate(BATCHES):
                _backward(reference, batch)
                fsdp(model).set_is_last_backward(i == 1)
                _backward(model, rows_of_this_rank(batch))
                backward_dw(model)
            backward_dw(reference)
            assert_gradients_equal(reference, model, rtol=1e-4 if is_exact else 0.05, atol=1e-6 if is_exact else 0.02)
            assert_at_rest(model)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    run_ranks(on_each_rank, 2)


def test_a_backward_may_end_while_an_earlier_one_still_waits_and_both_are_reduced_at_once() -> None:
    def on_each_rank() -> None:
        reference, model, log = _pair()
        for batch in BATCHES:
            _backward(reference, batch)
            _backward(model, rows_of_this_rank(batch))
        assert log.units_of("reduce") == ["root", "root"]
        log.clear()
        for _ in BATCHES:
            for i in range(NUM_LAYERS):
                assert not log.units_of("reduce").count(f"layers.{i}")
                _block(model, i).down.backward_dw()
        assert log.units_of("reduce") == [f"layers.{i}" for i in range(NUM_LAYERS)]
        backward_dw(reference)
        assert_gradients_equal(reference, model, rtol=1e-4, atol=1e-6)
        assert_at_rest(model)

    run_ranks(on_each_rank, 2)


@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.float64])
def test_a_layer_that_writes_over_grad_loses_no_earlier_microbatch(reduce_dtype: torch.dtype) -> None:
    def on_each_rank() -> None:
        policy = MixedPrecisionPolicy(torch.float32, reduce_dtype)
        reference, model = twins(Stack, lambda model: _shard(model, mp_policy=policy))
        assert isinstance(model, Stack)
        for i, batch in enumerate(BATCHES):
            _backward(reference, batch)
            fsdp(model).set_requires_gradient_sync(i == 1)
            _backward(model, rows_of_this_rank(batch))
            for k in range(NUM_LAYERS):
                assert _block(model, k).down.weight.grad is None, "nothing is there to be written over"
            backward_dw(model)
        backward_dw(reference)
        assert_gradients_equal(reference, model, rtol=1e-4, atol=1e-6)

    run_ranks(on_each_rank, 2)


def test_a_delayed_gradient_may_turn_out_to_be_none() -> None:
    def on_each_rank() -> None:
        reference, model, _ = _pair()
        for twin in (reference, model):
            _backward(twin, BATCHES[0])
        backward_dw(reference)
        reference.get_submodule("layers.1").down.weight.grad = None  # type: ignore[union-attr]
        _block(model, 1).down.queue.clear()
        on_gradient = _block(model, 1).down.on_gradient
        assert on_gradient is not None
        on_gradient()
        backward_dw(model)
        assert_gradients_equal(reference, model, rtol=1e-4, atol=1e-6)
        assert_at_rest(model)

    run_ranks(on_each_rank, 2)


def test_missing_delayed_gradients_are_named_at_the_end_of_a_step() -> None:
    def on_each_rank() -> None:
        _, model, _ = _pair()
        optimizer, elsewhere = sgd(list(model.parameters())), sgd([nn.Parameter(torch.zeros(2))])
        _backward(model, BATCHES[0])
        _block(model, 0).down.backward_dw()
        elsewhere.step()
        with pytest.raises(RuntimeError, match=r"before the optimizer's step, got none yet for \['down.weight', 'down"):
            optimizer.step()
        with pytest.raises(
            RuntimeError, match=r"delayed gradient of 'layers\.1' at the end.*got none yet for \['down.w"
        ):
            fsdp(model).wait_for_gradients()
        with pytest.raises(RuntimeError, match=r"Expected nobody to hold 'layers\.1'"):
            model.state_dict()
        backward_dw(model)
        fsdp(model).wait_for_gradients()
        optimizer.step()
        assert_at_rest(model)

    run_ranks(on_each_rank, 2)


def test_a_gradient_that_comes_twice_is_refused() -> None:
    def on_each_rank() -> None:
        _, model, _ = _pair()
        on_gradient = _block(model, 0).down.on_gradient
        assert on_gradient is not None
        on_gradient()  # before the end of backward: a layer may be early
        with pytest.raises(RuntimeError, match=r"one delayed gradient of 'down\.weight' for each backward"):
            on_gradient()
        _backward(model, BATCHES[0])
        with pytest.raises(RuntimeError, match=r"Expected 'layers\.1' between steps"):
            delay_gradient(model.layers[1], _block(model, 1).mix.get_parameter("weight"))

    run_ranks(on_each_rank, 2)


def test_a_reset_forgets_pending_delayed_gradients() -> None:
    def on_each_rank() -> None:
        reference, model, _ = _pair()
        _backward(model, BATCHES[0])
        _block(model, 0).down.backward_dw()
        fsdp(model).reset_iter_state()
        assert_at_rest(model)
        for module in model.modules():
            if isinstance(module, LateLinear):
                module.queue.clear()
        model.zero_grad()
        for twin in (reference, model):
            _backward(twin, BATCHES[1])
            backward_dw(twin)
        assert_gradients_equal(reference, model, rtol=1e-4, atol=1e-6)

    run_ranks(on_each_rank, 2)


def test_only_the_last_delayed_gradient_makes_the_caller_wait_for_reductions() -> None:
    def on_each_rank() -> None:
        _, model, _ = _pair()
        streams = dict(named_units(model))["root"].parameters.context.streams
        _backward(model, BATCHES[0])
        assert len(streams._reductions) == 1, "the outermost unit's overlaps with the late gradients"
        for i in range(NUM_LAYERS):
            assert streams._reductions
            _block(model, i).down.backward_dw()
        assert not streams._reductions

    run_ranks(on_each_rank, 2)


def test_replicas_are_reduced_with_the_late_gradients_too() -> None:
    def on_each_rank() -> None:
        mesh = mesh_of((2, 1))
        reference, model = twins(
            Stack, lambda model: _shard(model, mesh=mesh, options=ShardingOptions(placements=(HSDP, ZERO3)))
        )
        for i, batch in enumerate(BATCHES):
            fsdp(model).set_is_last_backward(i == 1)
            _backward(reference, batch)
            _backward(model, rows_of_this_rank(batch))
            backward_dw(model)
        backward_dw(reference)
        assert_gradients_equal(reference, model, rtol=1e-4, atol=1e-6)

    run_ranks(on_each_rank, 2)


def test_streams_that_made_gradients_and_those_that_use_them_wait_for_each_other() -> None:
    def on_each_rank(patch: pytest.MonkeyPatch) -> None:
        _, model, _ = _pair()
        streams = dict(named_units(model))["root"].parameters.context.streams
        main, side, reduce = WaitingStream(), WaitingStream(), WaitingStream()
        current: list[WaitingStream] = [main]
        patch.setattr(Streams, "compute_stream", property(lambda _: current[-1]))
        streams.__dict__["reduce_scatter_stream"] = reduce
        _backward(model, BATCHES[0])
        assert reduce not in main.waited, "nothing that the optimizer needs is there yet"
        current.append(side)
        for i in (2, 1, 0):
            side.waited.clear()
            _block(model, i).down.backward_dw()
            assert main in side.waited, "which made the other gradients of the unit"
            assert side in main.waited, "before memory of its is used again that was let go of"
        assert reduce in side.waited
        assert main.waited[-1] is side, "the optimizer is on the stream that backward ended on"
        assert reduce in main.waited, "before the memory of gradients is used again that a reduction read"

    with pytest.MonkeyPatch.context() as patch:
        run_ranks(lambda: on_each_rank(patch), 1)


def test_microbatches_without_sync_reduce_nothing() -> None:
    def on_each_rank() -> None:
        reference, model, log = _pair()
        with no_gradient_sync(model):
            _backward(model, rows_of_this_rank(BATCHES[0]))
            backward_dw(model)
        assert not log.units_of("reduce")
        _backward(model, rows_of_this_rank(BATCHES[1]))
        backward_dw(model)
        for batch in BATCHES:
            _backward(reference, batch)
        backward_dw(reference)
        assert_gradients_equal(reference, model, rtol=1e-4, atol=1e-6)

    run_ranks(on_each_rank, 2)
