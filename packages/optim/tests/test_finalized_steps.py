"""Clipping and overlapped steps behind backwards that `finalize_backward()` ends."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from engine_models import (
    EVERY_STAGE,
    Net,
    assert_gradients_equal,
    assert_weights_equal,
    fsdp,
    inputs,
    rows_of_this_rank,
    sgd,
    shard,
    shard_on,
    twins,
)
from torch import nn

from lamella_engine import FSDPModule, ShardingOptions
from lamella_engine.testing import assert_at_rest, tree_of
from lamella_optim import clip_grad_norm_, overlap_optimizer
from lamella_testing import run_ranks


def _by_hand(apply: Callable[[Net], Net] = shard) -> tuple[nn.Module, nn.Module, FSDPModule]:
    """The same model as it is and sharded, and the latter's outermost unit, whose backwards are finalized by hand."""
    reference, sharded = twins(Net, apply)
    model = fsdp(sharded)
    model.set_manual_backward_finalization(True)
    return reference, sharded, model


def _backward(reference: nn.Module, sharded: nn.Module, seed: int) -> None:
    batch = inputs(seed=seed)
    reference(batch).square().mean().backward()
    sharded(rows_of_this_rank(batch)).square().mean().backward()


@pytest.mark.parametrize("stage", EVERY_STAGE)
def test_clipping_waits_for_a_backward_that_was_finalized_and_not_waited_for(stage: str) -> None:
    shape, placements = EVERY_STAGE[stage]

    def check() -> None:
        reference, sharded, model = _by_hand(shard_on(shape, options=ShardingOptions(placements=placements)))
        for microbatch in range(3):
            _backward(reference, sharded, microbatch)
        model.finalize_backward(async_op=True)
        assert tree_of(sharded).step_end.is_deferred, "nobody has waited for the reductions"
        clip_grad_norm_(sharded.parameters(), 1e9)
        assert not tree_of(sharded).step_end.is_deferred
        assert_gradients_equal(reference, sharded, rtol=1e-4, atol=1e-6)
        assert_at_rest(sharded)

    run_ranks(check, torch.Size(shape).numel())


@pytest.mark.parametrize("wrap", [overlap_optimizer, partial(overlap_optimizer, late_gradients=True)])
@pytest.mark.parametrize("async_op", [False, True])
def test_optimizers_that_hide_their_steps_step_after_the_end(wrap: Callable[..., object], async_op: bool) -> None:
    def check() -> None:
        reference, sharded, model = _by_hand()
        optimizers = [sgd(list(model.parameters())) for model in (reference, sharded)]
        wrapped = wrap(optimizers[1])
        for step in range(3):
            for microbatch in range(2):
                model.set_requires_gradient_sync(microbatch == 1)
                _backward(reference, sharded, 2 * step + microbatch)
            model.finalize_backward(async_op=async_op)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert_weights_equal(reference, sharded, rtol=1e-4, atol=1e-6)
        assert wrapped is not None

    run_ranks(check, 2)
