"""Microbatches, whichever way they are summed, give the large batch's gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from engine_models import Net, assert_gradients_equal, fsdp, inputs, no_gradient_sync, rows_of_this_rank, shard, twins
from torch import nn

from lamella_engine.testing import assert_at_rest, record
from lamella_testing import run_ranks

NUM_MICROBATCHES = 3


def _backward(model: nn.Module, batch: torch.Tensor, num_microbatches: int = 1) -> None:
    (model(batch).square().mean() / num_microbatches).backward()


def _reduce_each(model: nn.Module, microbatches: tuple[torch.Tensor, ...]) -> None:
    for microbatch in microbatches:
        _backward(model, microbatch, NUM_MICROBATCHES)


def _reduce_each_and_wait_at_the_end(model: nn.Module, microbatches: tuple[torch.Tensor, ...]) -> None:
    for i, microbatch in enumerate(microbatches):
        fsdp(model).set_is_last_backward(i == NUM_MICROBATCHES - 1)
        _backward(model, microbatch, NUM_MICROBATCHES)


def _reduce_the_last(model: nn.Module, microbatches: tuple[torch.Tensor, ...]) -> None:
    with no_gradient_sync(model):
        _reduce_each(model, microbatches[:-1])
    _backward(model, microbatches[-1], NUM_MICROBATCHES)


def _reduce_the_last_and_stay_unsharded(model: nn.Module, microbatches: tuple[torch.Tensor, ...]) -> None:
    fsdp(model).set_reshard_after_backward(False)
    with no_gradient_sync(model):
        _reduce_each(model, microbatches[:-1])
    fsdp(model).set_reshard_after_backward(True)
    _backward(model, microbatches[-1], NUM_MICROBATCHES)


def _reduce_the_middle_one_too(model: nn.Module, microbatches: tuple[torch.Tensor, ...]) -> None:
    for i, microbatch in enumerate(microbatches):
        fsdp(model).set_requires_gradient_sync(i > 0)
        _backward(model, microbatch, NUM_MICROBATCHES)


@pytest.mark.parametrize(
    "accumulate",
    [
        _reduce_each,
        _reduce_each_and_wait_at_the_end,
        _reduce_the_last,
        _reduce_the_last_and_stay_unsharded,
        _reduce_the_middle_one_too,
    ],
)
def test_microbatches_sum_to_the_large_batch(
    accumulate: Callable[[nn.Module, tuple[torch.Tensor, ...]], None],
) -> None:
    def check() -> None:
        reference, sharded = twins()
        for step in range(2):
            batch = inputs(12, seed=step)
            reference.zero_grad()
            sharded.zero_grad()
            _backward(reference, batch)
            accumulate(sharded, rows_of_this_rank(batch).chunk(NUM_MICROBATCHES))
            assert_gradients_equal(reference, sharded)
            assert_at_rest(sharded)

    run_ranks(check, 2)


class _HalvedNet(Net):
    """A microbatch runs the first layer or the second."""

    def forward(self, x: torch.Tensor, layer: int = 0) -> torch.Tensor:
        head: torch.Tensor = self.head(self.layers[layer](self.stem(x)))
        return head


def test_a_unit_that_the_last_microbatch_does_not_use_is_reduced_with_it() -> None:
    def check() -> None:
        reference, sharded = twins(_HalvedNet)
        for layer in (0, 1):
            reference(inputs(), layer).square().mean().backward()
        with no_gradient_sync(sharded):
            sharded(inputs(), 0).square().mean().backward()
        log = record(sharded)
        sharded(inputs(), 1).square().mean().backward()
        assert sorted(log.units_of("reduce")) == ["layers.0", "layers.1", "root"]
        assert_gradients_equal(reference, sharded)
        assert_at_rest(sharded)

    run_ranks(check, 2)


def test_grad_of_sharded_parameters_stays_none_before_the_reduction() -> None:
    def check() -> None:
        _, sharded = twins()
        with no_gradient_sync(sharded):
            _backward(sharded, inputs())
        assert all(parameter.grad is None for parameter in sharded.parameters())

    run_ranks(check, 2)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_of_the_model_drops_unreduced_gradients_too(set_to_none: bool) -> None:
    def check() -> None:
        reference, sharded = twins()
        with no_gradient_sync(sharded):
            _backward(sharded, 5 * inputs())
        sharded.zero_grad(set_to_none=set_to_none)
        for model in (reference, sharded):
            _backward(model, inputs())
        assert_gradients_equal(reference, sharded)

    run_ranks(check, 2)


def test_unreduced_gradients_may_be_reduced_by_hand() -> None:
    def check() -> None:
        reference, sharded = twins()
        batch = inputs(12)
        _backward(reference, batch)
        with no_gradient_sync(sharded):
            _backward(sharded, rows_of_this_rank(batch))
        for module in (sharded, *sharded.get_submodule("layers").children()):
            fsdp(module).reduce_gradients()
        assert_gradients_equal(reference, sharded)
        assert_at_rest(sharded)

    run_ranks(check, 2)


def test_zero_grad_of_the_model_between_forward_and_backward_clears_the_gradients_of_the_last_step() -> None:
    def check() -> None:
        reference, sharded = twins()
        for model in (reference, sharded):
            for batch in (inputs(), 2 * inputs()):
                loss = model(batch).square().mean()
                model.zero_grad()  # the root is unsharded here
                loss.backward()
        assert_gradients_equal(reference, sharded)

    run_ranks(check, 2)


def test_new_gradients_are_added_to_existing_gradients_as_by_autograd() -> None:
    def check() -> None:
        reference, sharded = twins(Net, shard)
        for model in (reference, sharded):
            _backward(model, inputs())
            model.zero_grad(set_to_none=False)
            _backward(model, inputs())
            _backward(model, -inputs())
        assert_gradients_equal(reference, sharded)

    run_ranks(check, 2)
