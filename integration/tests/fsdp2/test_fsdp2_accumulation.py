"""Microbatches: gradients may wait unreduced, parameters may stay, and nothing is lost or sent too often."""

import itertools
from functools import partial

import torch
from fsdp2_models import (
    Api,
    assert_all_sharded,
    assert_equal_models,
    assert_none_sharded,
    average,
    count,
    descend,
    inputs,
    on_ranks,
    shard,
    twins,
    units,
)  # fmt: skip
from torch import nn

NUM_BLOCKS = 3


def _backward(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().mean().backward()


def _microbatches(expected: nn.Module, model: nn.Module, set_flags: object, step: int) -> dict[str, int]:
    """Three microbatches on both models; returns the collectives of the sharded model."""
    totals: dict[str, int] = {}
    for microbatch in range(3):
        assert callable(set_flags)
        set_flags(microbatch == 2)
        x = inputs(seed=10 * step + microbatch)
        expected(
            x
        ).square().mean().backward()  # of a sum, training diverges, and fp32 is right to four digits at the end
        counts, _ = count(partial(_backward, model, x))
        totals = {kind: totals.get(kind, 0) + counts.get(kind, 0) for kind in totals.keys() | counts.keys()}
    average(expected)
    return totals


def _train(expected: nn.Module, model: nn.Module, set_flags: object, counts: dict[str, int]) -> None:
    for step in range(2):
        assert _microbatches(expected, model, set_flags, step) == counts
        assert_equal_models(expected, model)
        for network in (expected, model):
            descend(network, set_to_none=step % 2 == 0)


def test_a_step_of_microbatches_reduces_each_unit_once(api: Api) -> None:
    def scenario(reshard_after_forward: bool | None, reshard_after_backward: bool, num_gathers: int) -> None:
        expected, model = twins()
        shard(api, model, reshard_after_forward=reshard_after_forward)

        def flags(is_last: bool) -> None:
            model.set_requires_gradient_sync(is_last)
            model.set_is_last_backward(is_last)
            if not reshard_after_backward:
                model.set_reshard_after_backward(is_last)

        _train(expected, model, flags, {"all_gather": num_gathers, "reduce_scatter": 4})

    on_ranks(scenario, cases=[(True, True, 8 * 3), (False, True, 4 * 3), (False, False, 4), (None, True, 7 * 3)])


def test_the_root_alone_may_wait_with_its_gradients(api: Api) -> None:
    def scenario() -> None:
        expected, model = twins()
        shard(api, model, reshard_after_forward=True)
        flags = lambda is_last: model.set_requires_gradient_sync(is_last, recurse=False)  # noqa: E731
        _train(expected, model, flags, {"all_gather": 24, "reduce_scatter": 4 + 2 * NUM_BLOCKS})

    on_ranks(scenario)


def test_some_units_may_wait_with_their_gradients(api: Api) -> None:
    def scenario() -> None:
        expected, model = twins()
        shard(api, model, reshard_after_forward=True)

        def flags(is_last: bool) -> None:
            for block in model.blocks[:2]:
                block.set_requires_gradient_sync(is_last)

        _train(expected, model, flags, {"all_gather": 24, "reduce_scatter": 4 + 2 * 2})

    on_ranks(scenario)


def test_reduced_and_unreduced_microbatch_gradients_add_up(api: Api) -> None:
    """A reduced microbatch, an unreduced microbatch, and a reduced microbatch again, without clearing gradients."""

    def scenario() -> None:
        expected, model = twins()
        shard(api, model)
        for step, syncs in enumerate([True, False, True]):
            model.set_requires_gradient_sync(syncs)
            for network in (expected, model):
                network(inputs(seed=step)).square().sum().backward()
        average(expected)
        assert_equal_models(expected, model)

    on_ranks(scenario)


def test_parameters_may_stay_after_backward(api: Api) -> None:
    def scenario() -> None:
        _, model = twins()
        shard(api, model, reshard_after_forward=False)
        model.set_reshard_after_backward(False)
        model(inputs()).sum().backward()
        assert_none_sharded(model.parameters())
        model.set_reshard_after_backward(True)
        model(inputs()).sum().backward()
        assert_all_sharded(model.parameters())

    on_ranks(scenario)


def test_a_pipeline_may_prefetch_and_keep_gathered_parameters(api: Api) -> None:
    def scenario(explicit: bool, reshard_after_backward: bool) -> None:
        expected, model = twins()
        shard(api, model, reshard_after_forward=False)
        if explicit:
            for unit in units(api, model):
                unit.unshard(async_op=True)
        for microbatch in range(3):
            is_last = microbatch == 2
            model.set_requires_gradient_sync(is_last)
            model.set_is_last_backward(is_last)
            if not reshard_after_backward:
                model.set_reshard_after_backward(is_last)
            for network in (expected, model):
                network(inputs(seed=microbatch)).square().sum().backward()
        average(expected)
        assert_equal_models(expected, model)
        assert_all_sharded(model.parameters())

    on_ranks(scenario, cases=itertools.product((False, True), (False, True)))
