"""Microbatches, whichever way they are summed, give the large batch's gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_models import (
    Net,
    assert_gradients_equal,
    case,
    fsdp,
    inputs,
    no_gradient_sync,
    rows_of_this_rank,
    shard,
    shard_on,
    twins,
)
from torch import nn

from lamella_engine import DDP, ZERO1, MixedPrecisionPolicy, ShardingOptions
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


CONVERSIONS: dict[str, Callable[[nn.Module], object]] = {
    "the model's to": lambda model: model.to("cpu"),
    "a layer's to": lambda model: model.get_submodule("layers.1").to("cpu"),
    "a module's to inside a unit": lambda model: model.get_submodule("stem").to("cpu"),
    "assign": lambda model: model.load_state_dict(model.state_dict(), assign=True),
    "another dtype": lambda model: model.double(),
}
_BF16_SUMMED_IN_FP32 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


@pytest.mark.parametrize(
    ("options", "rtol"),
    [
        ({}, 1e-5),
        ({"options": ShardingOptions(placements=DDP)}, 1e-5),
        ({"options": ShardingOptions(placements=ZERO1)}, 1e-5),
        ({"mp_policy": _BF16_SUMMED_IN_FP32}, 0.05),
    ],
    ids=["ZERO3", "DDP", "ZERO1", "bf16"],
)
def test_gradients_of_earlier_microbatches_outlive_a_conversion(options: dict[str, Any], rtol: float) -> None:
    def check() -> None:
        for name, convert in CONVERSIONS.items():
            with case(name):
                reference, sharded = twins(Net, shard_on(**options))
                for i, microbatch in enumerate(inputs(18).chunk(NUM_MICROBATCHES)):
                    if i > 0:
                        convert(sharded)
                        reference.to(sharded.get_parameter("stem.weight").dtype)
                    is_last = i == NUM_MICROBATCHES - 1
                    fsdp(sharded).set_is_last_backward(is_last)
                    fsdp(sharded).set_requires_gradient_sync(is_last)
                    batch = microbatch.to(reference.get_parameter("stem.weight").dtype)
                    _backward(reference, batch)
                    _backward(sharded, rows_of_this_rank(batch))
                assert_gradients_equal(reference, sharded, rtol=rtol, atol=rtol / 10)
                assert_at_rest(sharded)

    run_ranks(check, 2)
