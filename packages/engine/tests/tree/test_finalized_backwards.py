"""Backwards ended by `finalize_backward()`: the reductions, and the calls refused before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as fsdp2
from engine_models import (
    EVERY_STAGE,
    SOME_STAGES,
    Net,
    assert_gradients_equal,
    assert_trains_alike,
    descend,
    fsdp,
    inputs,
    mean_square,
    rows_of_this_rank,
    sgd,
    shard,
    shard_on,
    twins,
)
from torch import nn

from lamella_engine import (
    CPUOffloadPolicy,
    FSDPModule,
    GradientReductionHandle,
    ShardingOptions,
    delay_gradient,
    find_nonfinite,
    fully_shard,
    parameter_norms,
)
from lamella_engine.testing import assert_at_rest, record, tree_of
from lamella_testing import run_ranks


def _by_hand(
    make: Callable[[], nn.Module] = Net, apply: Callable[..., object] = shard
) -> tuple[nn.Module, nn.Module, FSDPModule]:
    """The same model as it is and sharded, and the latter's outermost unit, whose backwards are finalized by hand."""
    reference, sharded = twins(make, apply)
    model = fsdp(sharded)
    model.set_manual_backward_finalization(True)
    return reference, sharded, model


def _backward(model: nn.Module, seed: int = 0) -> None:
    loss: Any = model(rows_of_this_rank(inputs(seed=seed))).square().mean()
    loss.backward()


def _backward_of_all_ranks(model: nn.Module, seed: int = 0) -> None:
    """What the mean over ranks is, unsharded: each rank has as many rows."""
    loss: Any = model(inputs(seed=seed)).square().mean()
    loss.backward()


def _has_pending_reductions(model: nn.Module) -> bool:
    return tree_of(model).step_end.is_deferred


def _finalized_late(sharded: nn.Module) -> GradientReductionHandle:
    model = fsdp(sharded)
    model.set_manual_backward_finalization(True)
    _backward(sharded)
    handle = model.finalize_backward(async_op=True)
    assert _has_pending_reductions(sharded), "nobody has waited for the reductions"
    return handle


@SOME_STAGES
@pytest.mark.parametrize("keeps", [False, True], ids=["reduced each time", "kept"])
def test_every_stage_trains_as_unsharded_over_several_microbatches(stage: str, keeps: bool) -> None:
    shape, placements = EVERY_STAGE[stage]

    def on_each_rank() -> None:
        reference, sharded, model = _by_hand(Net, shard_on(shape, options=ShardingOptions(placements=placements)))
        for step in range(2):
            for microbatch in range(3):
                model.set_requires_gradient_sync(not keeps)
                _backward(sharded, 3 * step + microbatch)
                _backward_of_all_ranks(reference, 3 * step + microbatch)
            model.set_requires_gradient_sync(True)
            model.finalize_backward(async_op=step == 1)
            parameter_norms(sharded)  # waits by itself
            assert_gradients_equal(reference, sharded, rtol=1e-4, atol=1e-6)
            assert_at_rest(sharded)
            for twin in (reference, sharded):
                descend(twin)
            model.mark_updated()

    run_ranks(on_each_rank, torch.Size(shape).numel())


def test_zero1_reduces_all_units_in_finalize_backward() -> None:
    def on_each_rank() -> None:
        _, sharded, model = _by_hand(Net, shard_on((2,), options=ShardingOptions(placements=EVERY_STAGE["ZERO1"][1])))
        log = record(sharded)
        for microbatch in range(2):
            _backward(sharded, microbatch)
        assert log.units_of("reduce") == []
        model.finalize_backward()
        assert sorted(log.units_of("reduce")) == ["layers.0", "layers.1", "layers.2", "root"]

    run_ranks(on_each_rank, 2)


def test_replicas_may_keep_their_own_sums_beyond_the_end() -> None:
    """FSDP2 refuses to finalize then."""

    def on_each_rank() -> None:
        reference, sharded, model = _by_hand(Net, lambda model: shard_on((2, 2))(model))
        for microbatch in range(2):
            model.set_requires_all_reduce(microbatch == 1)
            _backward(sharded, microbatch)
            _backward_of_all_ranks(reference, microbatch)
            model.finalize_backward()
        assert_gradients_equal(reference, sharded, rtol=1e-4, atol=1e-6)

    run_ranks(on_each_rank, 4)


def test_an_optimizer_does_not_step_before_the_end() -> None:
    def on_each_rank() -> None:
        _, sharded, model = _by_hand()
        other = nn.Linear(2, 2)
        optimizer, other_optimizer = sgd(list(sharded.parameters())), sgd(list(other.parameters()))
        before = [parameter.to_local().clone() for parameter in sharded.parameters()]  # type: ignore[attr-defined]
        _backward(sharded)
        with pytest.raises(RuntimeError, match=r"Expected finalize_backward\(\) before the optimizer's step"):
            optimizer.step()
        other_optimizer.step()
        for parameter, was in zip(sharded.parameters(), before, strict=True):
            assert torch.equal(parameter.to_local(), was)  # type: ignore[attr-defined]
        model.finalize_backward()
        optimizer.step()
        assert any(
            not torch.equal(parameter.to_local(), was)  # type: ignore[attr-defined]
            for parameter, was in zip(sharded.parameters(), before, strict=True)
        )
        _backward(sharded)
        model.reset_iter_state()
        optimizer.step()  # there is nothing to wait for any more

    run_ranks(on_each_rank, 2)


def _step(model: nn.Module) -> None:
    sgd(list(model.parameters())).step()


WAIT_BY_THEMSELVES: dict[str, Callable[[nn.Module], object]] = {
    "the next forward": lambda model: model(inputs()),
    "an optimizer": _step,
    "norms": parameter_norms,
    "a search for NaN": find_nonfinite,
    "zero_grad": lambda model: model.zero_grad(),
    "a state dict": lambda model: model.state_dict(),
    "who asks for gradients": lambda model: fsdp(model).wait_for_gradients(),
}


@pytest.mark.parametrize("who", WAIT_BY_THEMSELVES)
def test_calls_after_an_async_finalize_backward_wait_for_its_reductions(who: str) -> None:
    def on_each_rank() -> None:
        _, sharded = twins()
        handle = _finalized_late(sharded)
        WAIT_BY_THEMSELVES[who](sharded)
        assert not _has_pending_reductions(sharded)
        handle.wait()  # nothing is left

    run_ranks(on_each_rank, 2)


def test_a_handle_is_torchs_where_torch_has_one_and_waits_once() -> None:
    def on_each_rank() -> None:
        _, sharded = twins()
        handle = _finalized_late(sharded)
        assert isinstance(handle, getattr(fsdp2, "GradientReductionHandle", GradientReductionHandle))
        handle.wait()
        assert not _has_pending_reductions(sharded)
        handle.wait()

    run_ranks(on_each_rank, 1)


def test_offloaded_gradients_are_complete_when_the_finalize_handle_was_waited_for() -> None:
    def on_each_rank() -> None:
        reference, sharded, model = _by_hand(Net, lambda model: shard(model, offload_policy=CPUOffloadPolicy()))
        called = []
        weight = next(sharded.parameters())
        weight.register_post_accumulate_grad_hook(lambda parameter: called.append(parameter))  # type: ignore[no-untyped-call]
        model.set_requires_gradient_sync(False)
        _backward(sharded)
        model.set_requires_gradient_sync(True)
        handle = model.finalize_backward(async_op=True)
        assert called == []
        handle.wait()
        assert [id(parameter) for parameter in called] == [id(weight)]
        _backward_of_all_ranks(reference)
        assert_gradients_equal(reference, sharded, rtol=1e-4, atol=1e-6)

    run_ranks(on_each_rank, 2)


def test_a_gradient_that_was_delayed_must_come_before_the_end() -> None:
    def on_each_rank() -> None:
        _, sharded = twins()
        model = fsdp(sharded)
        assert isinstance(sharded, Net)
        note = delay_gradient(sharded, sharded.stem.get_parameter("weight"))
        model.set_manual_backward_finalization(True)
        _backward(sharded)
        with pytest.raises(RuntimeError, match=r"Expected every delayed gradient.*stem\.weight"):
            model.finalize_backward()
        note()
        model.finalize_backward()
        assert_at_rest(sharded)

    run_ranks(on_each_rank, 1)


def test_backwards_that_hooks_end_train_as_before_afterwards() -> None:
    def on_each_rank() -> None:
        reference, sharded = twins()
        model = fsdp(sharded)
        _finalized_late(sharded).wait()
        sharded.zero_grad()
        model.set_manual_backward_finalization(False)
        assert_trains_alike(reference, sharded, mean_square(lambda model: model(inputs())))

    run_ranks(on_each_rank, 2)


def test_a_unit_is_not_put_into_another_before_the_end() -> None:
    def on_each_rank() -> None:
        inner = nn.Linear(2, 2)
        outer = nn.Sequential(fully_shard(inner))
        fsdp(inner).set_manual_backward_finalization(True)
        inner(torch.ones(1, 2)).sum().backward()
        with pytest.raises(RuntimeError, match="to be at rest"):
            fully_shard(outer)
        fsdp(inner).finalize_backward()
        fully_shard(outer)

    run_ranks(on_each_rank, 1)
