"""The sharded model trains as the unsharded one does: same losses, same weights, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from engine_models import (
    MakeOptimizer,
    Net,
    adamw,
    assert_gradients_equal,
    assert_weights_equal,
    case,
    fsdp,
    inputs,
    rows_of_this_rank,
    sgd,
    shard,
    twins,
)
from torch import nn

from lamella_engine import FSDPModule, fully_shard
from lamella_engine.testing import assert_at_rest
from lamella_testing import run_ranks


def _shard_nested(model: Net) -> None:
    """Units are each block's `up`, the block around `up`, and the root."""
    for layer in model.layers:
        fully_shard(layer.get_submodule("up"))
        fully_shard(layer)
    fully_shard(model)


def _shard_every_module(model: nn.Module) -> None:
    for module in [m for m in model.modules() if not isinstance(m, nn.ModuleList)][::-1]:
        fully_shard(module)


def _losses(model: nn.Module, batch: torch.Tensor, make_optimizer: MakeOptimizer, num_steps: int) -> list[float]:
    """The loss of each step, over the batches of all ranks."""
    optimizer = make_optimizer(list(model.parameters()))
    losses = torch.zeros(num_steps)
    for step in range(num_steps):
        loss = (model(batch) - step % 3).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = loss.detach()
    dist.all_reduce(losses)
    return list((losses / dist.get_world_size()).tolist())


def _check(apply: Callable[..., object], make_optimizer: MakeOptimizer, num_steps: int) -> None:
    reference, sharded = twins(partial(Net, num_layers=2), apply)
    expected = _losses(reference, inputs(), make_optimizer, num_steps)
    got = _losses(sharded, rows_of_this_rank(inputs()), make_optimizer, num_steps)
    assert got == pytest.approx(expected, rel=1e-5, abs=0)
    # Adam divides by the root of a running square: the rounding of tiny gradients shows in the weights.
    assert_weights_equal(reference, sharded, rtol=1e-3, atol=1e-5)
    assert_at_rest(sharded)


@pytest.mark.parametrize(
    ("num_ranks", "make_optimizer"),
    [
        *((1, sgd), (2, adamw), (3, sgd), (4, sgd)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, adamw), (2, sgd), (3, adamw), (4, adamw))),
    ],
)
def test_twenty_steps_give_the_unsharded_models_losses_and_weights(
    num_ranks: int, make_optimizer: MakeOptimizer
) -> None:
    run_ranks(_check, num_ranks, shard, make_optimizer, 20)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_where_the_units_are_cut_changes_nothing(num_ranks: int) -> None:
    def check() -> None:
        for apply in (fully_shard, _shard_nested, _shard_every_module):
            with case(apply.__name__):
                _check(apply, sgd, 4)

    run_ranks(check, num_ranks)


def test_units_without_an_outer_unit_train_too() -> None:
    def check() -> None:
        def shard_blocks(model: Net) -> None:
            for layer in model.layers:
                fully_shard(layer)

        reference, sharded = twins(Net, shard_blocks)
        batch = inputs()  # the same on every rank: the stem and the head are nobody's to reduce
        assert _losses(sharded, batch, sgd, 4) == pytest.approx(_losses(reference, batch, sgd, 4), rel=1e-5, abs=0)

    run_ranks(check, 2)


def test_an_outer_unit_can_be_added_between_steps() -> None:
    def check() -> None:
        def shard_blocks(model: Net) -> None:
            for layer in model.layers:
                fully_shard(layer)

        reference, sharded = twins(Net, shard_blocks)
        optimizers = [sgd([*model.get_submodule("layers").parameters()]) for model in (reference, sharded)]
        for step in range(4):
            if step == 2:
                fully_shard(sharded)
            for model, optimizer in zip((reference, sharded), optimizers, strict=True):
                model.zero_grad()
                model(inputs()).square().mean().backward()
                optimizer.step()
            assert_gradients_equal(reference, sharded)
        assert_weights_equal(reference, sharded)
        assert_at_rest(sharded)

    run_ranks(check, 2)


@pytest.mark.parametrize("factor", [1.0, 3.0, 7.0])
def test_the_sum_over_ranks_is_divided_as_told(factor: float) -> None:
    def check() -> None:
        reference, sharded = twins()
        for module in sharded.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(factor)
        reference(inputs()).sum().div(factor).backward()
        sharded(rows_of_this_rank(inputs())).sum().backward()
        assert_gradients_equal(reference, sharded, atol=1e-6)

    run_ranks(check, 3)


def test_a_divide_factor_is_one_units_own() -> None:
    def check() -> None:
        reference, sharded = twins()
        fsdp(sharded).set_gradient_divide_factor(2.0)  # the root's, where two ranks would give the mean anyhow
        fsdp(sharded.get_submodule("layers.1")).set_gradient_divide_factor(8.0)
        for model in (reference, sharded):
            model(inputs()).sum().backward()
        for parameter in reference.get_submodule("layers.1").parameters():
            assert parameter.grad is not None
            parameter.grad /= 4
        assert_gradients_equal(reference, sharded, atol=1e-6)

    run_ranks(check, 2)
