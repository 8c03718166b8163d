"""All of a unit's life by verbs, without hooks: forward of one microbatch between pieces of the last one's backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_models import (
    assert_gradients_equal,
    assert_shard_equals,
    assert_weights_equal,
    fsdp,
    inputs,
    mesh_of,
    rows_of_this_rank,
    sgd,
    twins,
)
from schedule_models import NUM_LAYERS, Microbatch, ScheduledBlock, Stack, backward_dw, delay, in_turns
from torch import nn
from torch.utils.checkpoint import checkpoint

from lamella_engine import HFSDP, HSDP, ZERO1, ZERO2, ZERO3, ShardingOptions, delay_gradient, fully_shard
from lamella_engine.testing import Streams, WaitingStream, assert_at_rest, named_units, record
from lamella_testing import run_ranks

pytestmark = pytest.mark.usefixtures("steps_on_shards")

STAGES: dict[str, tuple[tuple[int, ...], Any]] = {
    "ZERO3": ((2,), ZERO3),
    "ZERO2": ((2,), ZERO2),
    "ZERO1": ((2,), ZERO1),
    "HSDP, ZERO3": ((2, 1), (HSDP, ZERO3)),
    "HFSDP, ZERO3": ((2, 2), (HFSDP, ZERO3)),
}
BATCHES = [inputs(8, seed=1), inputs(8, seed=2)]


def _shard(model: nn.Module, stage: str) -> None:
    shape, placements = STAGES[stage]
    mesh = mesh_of(shape)
    for module in (*model.get_submodule("layers").children(), model):
        fully_shard(module, mesh=mesh, options=ShardingOptions(placements=placements))
    delay(model)


def _num_ranks(stage: str) -> int:
    return torch.Size(STAGES[stage][0]).numel()


def _step_unsharded(model: nn.Module, batches: list[torch.Tensor]) -> list[float]:
    losses = []
    for batch in batches:
        loss = model(batch)
        loss.backward()
        losses.append(loss.item())
    backward_dw(model)
    return losses


def _step_by_hand(model: Stack, batches: list[torch.Tensor], **how: Any) -> list[float]:
    """f0, then b0 and f1 in turns, then b1."""
    first, second = (Microbatch(model, batch, dw_at_once=how.get("dw_at_once", True)) for batch in batches)
    between = how.get("between", lambda: None)
    fsdp(model).set_is_last_backward(False)
    in_turns(first.forward(), between=between)
    in_turns(first.backward(), second.forward(), between=between)
    fsdp(model).set_is_last_backward(True)
    in_turns(second.backward(), between=between)
    if not how.get("dw_at_once", True):
        backward_dw(model)
    fsdp(model).wait_for_gradients()
    return [first.loss, second.loss]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("dtype", "dw_at_once"),
    [
        pytest.param(torch.float32, True, id="fp32, dw in its slot"),
        pytest.param(torch.bfloat16, False, id="bf16, dw at the end"),
        pytest.param(torch.float32, False, id="fp32, dw at the end", marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, True, id="bf16, dw in its slot", marks=pytest.mark.slow),
    ],
)
def test_interleaved_microbatches_train_as_unsharded(stage: str, dtype: torch.dtype, dw_at_once: bool) -> None:
    def on_each_rank() -> None:
        reference, model = twins(lambda: Stack().to(dtype), lambda model: _shard(model, stage))
        # In bf16 all ranks have the same rows: a mean of equal numbers rounds nothing.
        rank_rows = rows_of_this_rank if dtype == torch.float32 else lambda batch: batch
        optimizers = [sgd(list(twin.parameters())) for twin in (reference, model)]
        batches = [batch.to(dtype) for batch in BATCHES]
        tolerance = {"rtol": 1e-4, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.01}
        for _ in range(3):
            _step_unsharded(reference, batches)
            assert isinstance(model, Stack)
            _step_by_hand(model, [rank_rows(batch) for batch in batches], dw_at_once=dw_at_once)
            assert_gradients_equal(reference, model, **tolerance)
            assert_at_rest(model)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert_weights_equal(reference, model, **tolerance)

    run_ranks(on_each_rank, _num_ranks(stage))


def test_only_held_units_have_unsharded_bytes() -> None:
    def on_each_rank() -> None:
        model = Stack()
        _shard(model, "ZERO3")
        seen = set()

        def look() -> None:
            for name, unit in named_units(model):
                has_bytes = any(g.unsharded_weight.flat.untyped_storage().nbytes() for g in unit.parameters.groups)
                assert has_bytes == (unit.weights.num_holds > 0), f"{name}: {unit.weights.num_holds} holds"
                seen.add(unit.weights.num_holds)

        for _ in range(2):
            _step_by_hand(model, BATCHES, between=look)
            model.zero_grad()
        assert seen == {0, 1, 2}, "two microbatches were in a unit at a time"

    run_ranks(on_each_rank, 2)


# Gathers and reductions of a step of two microbatches; each needs a unit twice. The first holds the middle block
# together with the second, and takes the first block ahead while the second holds the block.
@pytest.mark.parametrize(
    ("stage", "blocks", "root", "reductions"),
    [("ZERO3", [3, 3, 4], 3, 2), ("ZERO2", [1, 1, 1], 1, 2), ("ZERO1", [1, 1, 1], 1, 1)],
)
def test_a_unit_is_gathered_once_for_all_of_its_holds(
    stage: str, blocks: list[int], root: int, reductions: int
) -> None:
    def on_each_rank() -> None:
        model = Stack()
        _shard(model, stage)
        log = record(model)
        optimizer = sgd(list(model.parameters()))
        for _ in range(2):
            log.clear()
            _step_by_hand(model, BATCHES)
            optimizer.step()
            optimizer.zero_grad()
            gathers = log.units_of("gather")
            assert [gathers.count(f"layers.{i}") for i in range(NUM_LAYERS)] == blocks
            assert gathers.count("root") == root
            assert all(log.units_of("reduce").count(name) == reductions for name, _ in named_units(model))

    run_ranks(on_each_rank, 2)


def test_gradients_are_kept_without_sync_and_reduced_with_the_next() -> None:
    def on_each_rank() -> None:
        reference, model = twins(Stack, lambda model: _shard(model, "ZERO3"))
        assert isinstance(model, Stack)
        log = record(model)
        _step_unsharded(reference, BATCHES)
        for syncs, batch in zip((False, True), BATCHES, strict=True):
            fsdp(model).set_requires_gradient_sync(syncs)
            microbatch = Microbatch(model, rows_of_this_rank(batch))
            in_turns(microbatch.forward())
            in_turns(microbatch.backward())
        fsdp(model).wait_for_gradients()
        assert_gradients_equal(reference, model, rtol=1e-4, atol=1e-6)
        assert len(log.units_of("reduce")) == NUM_LAYERS + 1

    run_ranks(on_each_rank, 2)


def test_steps_by_hand_and_by_hooks_may_alternate() -> None:
    def on_each_rank() -> None:
        reference, model = twins(Stack, lambda model: _shard(model, "ZERO2"))
        assert isinstance(model, Stack)
        optimizers = [sgd(list(twin.parameters())) for twin in (reference, model)]
        for step in range(4):
            _step_unsharded(reference, BATCHES)
            batches = [rows_of_this_rank(batch) for batch in BATCHES]
            (_step_by_hand if step % 2 else _step_unsharded)(model, batches)
            assert_gradients_equal(reference, model, rtol=1e-4, atol=1e-6)
            assert_at_rest(model)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    run_ranks(on_each_rank, 2)


class _Piecewise(nn.Module):
    """The outer unit's hooks fire; hooks of inner units do not, because the model calls inner units in pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 8)
        self.block = ScheduledBlock()
        self.other = ScheduledBlock()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.other(self.stem(x))
        for piece in self.block.pieces:
            x = piece(x)
        return x


def test_hooks_of_some_units_and_verbs_of_others_mix() -> None:
    def on_each_rank() -> None:
        def apply(model: nn.Module) -> None:
            for name in ("block", "other"):
                fully_shard(model.get_submodule(name))
            fully_shard(model)

        reference, model = twins(_Piecewise, apply)
        log = record(model)
        block = fsdp(model.get_submodule("block"))
        for batch in BATCHES:
            loss = reference(batch).square().mean()
            loss.backward()
            backward_dw(reference)
            hold = block.hold()
            hold.wait()
            log.clear()
            model(rows_of_this_rank(batch)).square().mean().backward()
            assert "gather block" not in log.order, "it was there"
            assert "reduce block" not in log.order, "the end of autograd's backward leaves a unit alone that is held"
            assert log.units_of("reduce").count("other") == 1
            backward_dw(model)
            assert "reduce other" not in log.order[log.order.index("reduce root") + 1 :]
            block.reduce_gradients()
            hold.release()
            fsdp(model).wait_for_gradients()
        # The undeclared late gradient of the hook-driven unit came after the unit's reduction.
        for name, parameter in model.named_parameters():
            if name.startswith("block"):
                expected = reference.get_parameter(name).grad
                assert expected is not None
                assert parameter.grad is not None
                assert_shard_equals(parameter.grad, expected, name, rtol=1e-4, atol=1e-6)

    run_ranks(on_each_rank, 2)


def test_a_recomputed_piece_runs_once_more_and_no_more_often_in_the_second_step() -> None:
    def on_each_rank() -> None:
        reference, model = twins(Stack, lambda model: _shard(model, "ZERO3"))
        assert isinstance(model, Stack)
        calls = 0
        block = model.layers[0]
        assert isinstance(block, ScheduledBlock)
        experts = block.experts

        def counted(x: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return experts(x)

        block.experts = lambda x: checkpoint(counted, x, use_reentrant=False)  # type: ignore[method-assign]
        for _ in range(2):
            calls = 0
            for twin in (reference, model):
                twin.zero_grad()
            _step_unsharded(reference, BATCHES)
            _step_by_hand(model, [rows_of_this_rank(batch) for batch in BATCHES])
            assert calls == 2 * len(BATCHES)
            assert_gradients_equal(reference, model, rtol=1e-4, atol=1e-6)

    run_ranks(on_each_rank, 2)


def test_a_step_without_any_block_still_uses_and_trains_the_rest() -> None:
    def on_each_rank() -> None:
        reference, model = twins(Stack, lambda model: _shard(model, "ZERO3"))
        reference.finish(reference.stem(BATCHES[0])).backward()  # type: ignore[operator]
        with fsdp(model).hold():
            model.finish(model.stem(rows_of_this_rank(BATCHES[0]))).backward()  # type: ignore[operator]
            fsdp(model).reduce_gradients()
        fsdp(model).wait_for_gradients()
        assert_gradients_equal(reference, model)
        assert_at_rest(model)

    run_ranks(on_each_rank, 2)


def test_wait_for_gradients_reduces_units_that_were_not_reduced_by_hand() -> None:
    def on_each_rank() -> None:
        reference, model = twins(Stack, lambda model: _shard(model, "ZERO3"))
        reference.finish(reference.stem(BATCHES[0])).backward()  # type: ignore[operator]
        fsdp(model).unshard()
        model.finish(model.stem(rows_of_this_rank(BATCHES[0]))).backward()  # type: ignore[operator]
        fsdp(model).wait_for_gradients()
        assert_gradients_equal(reference, model)
        assert_at_rest(model)

    run_ranks(on_each_rank, 2)


def test_verbs_in_an_order_that_makes_no_sense_are_refused() -> None:
    def on_each_rank() -> None:
        model = Stack()
        _shard(model, "ZERO3")
        with pytest.raises(RuntimeError, match=r"Expected gradients to reduce in the outermost unit, got none"):
            fsdp(model).reduce_gradients()
        with pytest.raises(RuntimeError, match=r"Expected the outermost unit, got 'layers\.1'.*wait_for_gradients"):
            fsdp(model.layers[1]).wait_for_gradients()
        hold = fsdp(model.layers[1]).hold()
        with pytest.raises(RuntimeError, match=r"Expected nobody to hold 'layers\.1', got 1 holds"):
            fsdp(model).wait_for_gradients()
        with pytest.raises(RuntimeError, match=r"Expected nobody to hold 'layers\.1'"):
            model.state_dict()
        with pytest.raises(RuntimeError, match=r"Expected nobody to hold 'layers\.1'"):
            model.to(torch.float64)
        hold.release()
        for call in (hold.release, hold.wait):
            with pytest.raises(RuntimeError, match=r"a hold that is not released, got one on 'layers\.1'"):
                call()
        fsdp(model).wait_for_gradients()

    run_ranks(on_each_rank, 2)


def test_verbs_are_refused_where_hooks_are_at_work() -> None:
    def on_each_rank() -> None:
        model = Stack()
        _shard(model, "ZERO3")
        calls = {"no hook ends": fsdp(model).reduce_gradients, "no pass under way": fsdp(model).wait_for_gradients}
        for words, call in calls.items():
            loss = model(BATCHES[0])
            loss.register_hook(lambda _, call=call: call())
            with pytest.raises(RuntimeError, match=words):
                loss.backward()
            fsdp(model).reset_iter_state()
        with pytest.raises(ValueError, match=r"Expected a parameter of 'layers\.0', got one of shape \(5, 8\)"):
            delay_gradient(model.layers[0], model.head.get_parameter("weight"))

    run_ranks(on_each_rank, 2)


def test_a_reset_lets_go_of_every_hold() -> None:
    def on_each_rank() -> None:
        reference, model = twins(Stack, lambda model: _shard(model, "ZERO3"))
        assert isinstance(model, Stack)
        holds = [fsdp(model.layers[i]).hold() for i in (0, 0, 2)]
        holds[0].wait()
        fsdp(model).reset_iter_state()
        assert_at_rest(model)
        for hold in holds:
            hold.release()
        _step_unsharded(reference, BATCHES)
        _step_by_hand(model, [rows_of_this_rank(batch) for batch in BATCHES])
        assert_gradients_equal(reference, model, rtol=1e-4, atol=1e-6)

    run_ranks(on_each_rank, 2)


def test_weights_that_a_plain_unshard_left_over_a_step_are_gathered_anew() -> None:
    def on_each_rank() -> None:
        model = Stack()
        _shard(model, "ZERO3")
        mix = model.get_submodule("layers.0.mix")
        optimizer = torch.optim.SGD([mix.get_parameter("weight")], lr=1.0)
        fsdp(model.layers[0]).unshard()
        before = mix.get_parameter("weight").detach().clone()
        fsdp(model.layers[0]).reshard()
        mix.get_parameter("weight").grad = torch.ones_like(mix.get_parameter("weight"))
        fsdp(model.layers[0]).unshard()
        optimizer.step()
        for _ in range(2):
            fsdp(model.layers[0]).unshard()
        torch.testing.assert_close(mix.get_parameter("weight").detach(), before - 1)
        with fsdp(model.layers[0]).hold():
            optimizer.step()
            with pytest.raises(RuntimeError, match="Expected nobody to hold"):
                model(BATCHES[0])

    run_ranks(on_each_rank, 2)


def test_a_copy_that_is_held_over_a_step_is_refused_too() -> None:
    def on_each_rank() -> None:
        _, model = twins(Stack, lambda model: _shard(model, "ZERO1"))
        assert isinstance(model, Stack)
        optimizer = sgd(list(model.parameters()))
        with fsdp(model.layers[0]).hold():
            model(rows_of_this_rank(BATCHES[0])).backward()
            backward_dw(model)
            optimizer.step()
            with pytest.raises(RuntimeError, match="Expected nobody to hold"):
                model(rows_of_this_rank(BATCHES[0]))

    run_ranks(on_each_rank, 2)


def test_a_gather_at_rest_waits_for_writers_of_shards_and_a_free_for_all_readers() -> None:
    def on_each_rank() -> None:
        model = Stack()
        _shard(model, "ZERO3")
        streams = dict(named_units(model))["root"].parameters.context.streams
        waits: list[object] = []
        stream: Any = streams.all_gather_stream
        stream.wait_event = stream.wait_stream = waits.append
        event = torch.Event("cpu")
        fsdp(model).set_post_optim_event(event)
        holds = [fsdp(model.layers[0]).hold(), fsdp(model.layers[0]).hold()]
        assert waits == [event]
        fsdp(model.layers[1]).unshard(async_op=True)
        assert waits == [event, streams.compute_stream]
        waits.clear()
        holds[0].release()
        assert not waits, "somebody else still reads"
        holds[1].release()
        assert len(waits) == 2, "the event of the first to let go, and the stream of the last"

    run_ranks(on_each_rank, 2)


def _always(stream: WaitingStream) -> property:
    return property(lambda _: stream)


def test_every_stream_that_waits_for_a_hold_waits_for_the_gather() -> None:
    def on_each_rank(patch: pytest.MonkeyPatch) -> None:
        model = Stack()
        _shard(model, "ZERO3")
        streams = dict(named_units(model))["root"].parameters.context.streams
        gathers, first, second = WaitingStream(), WaitingStream(), WaitingStream()
        streams.__dict__["all_gather_stream"] = gathers
        holds = []
        for stream in (first, second):
            patch.setattr(Streams, "compute_stream", _always(stream))
            holds.append(fsdp(model.layers[0]).hold())
            holds[-1].wait()
            assert gathers in stream.waited
        assert second not in gathers.waited, "there was nothing to gather any more"

    with pytest.MonkeyPatch.context() as patch:
        run_ranks(lambda: on_each_rank(patch), 2)
