"""Backwards ended by an explicit call, as in torch's pipeline schedules; memory with a constant address."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from fsdp2_models import (
    Api,
    assert_all_sharded,
    assert_equal_models,
    assert_none_sharded,
    assert_trains_as,
    average,
    count,
    descend,
    grid,
    inputs,
    on_ranks,
    shard,
    twins,
    units,
)  # fmt: skip
from torch import nn

NUM_UNITS = 4


@pytest.fixture
def finalizing(api: Api) -> Api:
    return _with(api, "finalize_backward")


@pytest.fixture
def keeping(api: Api) -> Api:
    return _with(api, "set_keep_unsharded_storage")


def _with(api: Api, method: str) -> Api:
    if not hasattr(api.FSDPModule, method):
        pytest.skip(f"FSDP2 of this torch has no {method}")
    return api


def _backward(model: nn.Module, seed: int) -> None:
    model(inputs(seed=seed)).square().mean().backward()


def _microbatches(model: Any, *, num: int = 3, seed: int = 0) -> None:
    """Microbatches of a schedule: no reduction and no reshard, until the last microbatch asks for both."""
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    for microbatch in range(num):
        _backward(model, seed + microbatch)
    model.set_requires_gradient_sync(True)
    model.set_reshard_after_backward(True)


def _finalize(model: Any, async_op: bool) -> None:
    handle = model.finalize_backward(async_op=async_op)
    assert (handle is None) == (not async_op)
    if handle is not None:
        handle.wait()
        handle.wait()


def test_backwards_that_are_finalized_together_are_a_step(finalizing: Api) -> None:
    def scenario(async_op: bool, reshard_after_forward: bool, says_last: bool) -> None:
        expected, model = twins()
        shard(finalizing, model, reshard_after_forward=reshard_after_forward)
        model.set_manual_backward_finalization(True)
        model.set_is_last_backward(says_last)
        for step in range(3):
            counts, _ = count(partial(_microbatches, model, seed=3 * step))
            assert counts.get("reduce_scatter", 0) == 0
            counts, _ = count(lambda: _finalize(model, async_op))
            assert counts == {"reduce_scatter": NUM_UNITS}
            assert_all_sharded(model.parameters())
            for microbatch in range(3):
                _backward(expected, 3 * step + microbatch)
            average(expected)
            assert_equal_models(expected, model)
            for network in (expected, model):
                descend(network)
        model.set_manual_backward_finalization(False)
        model.set_is_last_backward(True)
        assert_trains_as(expected, model)

    on_ranks(scenario, cases=((False, True, True), (True, True, False), (False, False, False), (True, False, True)))


def test_a_single_backward_may_be_finalized(finalizing: Api) -> None:
    def scenario(async_op: bool) -> None:
        expected, model = twins()
        shard(finalizing, model)
        model.set_manual_backward_finalization(True)

        def step() -> None:
            _backward(model, 0)
            _finalize(model, async_op)

        counts, _ = count(step)
        assert counts["reduce_scatter"] == NUM_UNITS
        assert_all_sharded(model.parameters())
        _backward(expected, 0)
        average(expected)
        assert_equal_models(expected, model)

    on_ranks(scenario, cases=(False, True))


@pytest.mark.four_ranks
def test_finalization_reduces_over_replicas(finalizing: Api) -> None:
    def scenario() -> None:
        expected, model = twins()
        shard(finalizing, model, mesh=grid("outer", "inner"))
        model.set_manual_backward_finalization(True)
        _microbatches(model)
        counts, _ = count(model.finalize_backward)
        assert counts == {"reduce_scatter": NUM_UNITS, "all_reduce": NUM_UNITS}
        for microbatch in range(3):
            _backward(expected, microbatch)
        average(expected)
        assert_equal_models(expected, model)

    on_ranks(scenario, 4)


def test_a_backward_that_reached_no_unit_has_nothing_to_finalize(finalizing: Api) -> None:
    def scenario() -> None:
        expected, model = twins()
        shard(finalizing, model)
        model.set_manual_backward_finalization(True)
        model.finalize_backward()  # no forward yet
        x = inputs().requires_grad_()
        model(x)
        x.sum().backward()  # type: ignore[no-untyped-call]
        counts, _ = count(model.finalize_backward)
        assert counts == {}
        assert all(parameter.grad is None for parameter in model.parameters())
        model.set_manual_backward_finalization(False)
        assert_trains_as(expected, model)

    on_ranks(scenario)


def _without_the_mode(model: Any) -> None:
    _backward(model, 0)
    model.finalize_backward()


def _below_the_outermost(model: Any) -> None:
    model(inputs())
    model.blocks[0].set_manual_backward_finalization(True)


def _finalize_an_inner_unit(model: Any) -> None:
    model.set_manual_backward_finalization(True)
    _backward(model, 0)
    model.blocks[0].finalize_backward()


def _during_backward(model: Any) -> None:
    model.set_manual_backward_finalization(True)
    out = model(inputs())
    out.register_hook(lambda gradient: model.finalize_backward())
    out.sum().backward()


def _changed_after_backward(model: Any) -> None:
    model.set_manual_backward_finalization(True)
    _backward(model, 0)
    model.set_manual_backward_finalization(True)  # no change
    model.set_manual_backward_finalization(False)


def _changed_during_backward(model: Any) -> None:
    out = model(inputs())
    out.register_hook(lambda gradient: model.set_manual_backward_finalization(True))
    out.sum().backward()


def _waited_for_after_a_reset(model: Any) -> None:
    model.set_manual_backward_finalization(True)
    _backward(model, 0)
    handle = model.finalize_backward(async_op=True)
    model.reset_iter_state()
    handle.wait()


REFUSALS: dict[str, tuple[Callable[[Any], None], str]] = {
    "without the mode": (_without_the_mode, "finalize_backward requires manual backward finalization"),
    "the mode of an inner unit": (_below_the_outermost, "set_manual_backward_finalization"),
    "an inner unit": (_finalize_an_inner_unit, "finalize_backward"),
    "during backward": (_during_backward, "finalize_backward must be called after backward completes"),
    "another mode after backward": (_changed_after_backward, "set_manual_backward_finalization cannot change mode"),
    "another mode during backward": (_changed_during_backward, "set_manual_backward_finalization cannot change mode"),
    "a handle after a reset": (_waited_for_after_a_reset, "gradient reduction handle was invalidated"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_misused_backward_finalization_is_refused_and_a_reset_model_trains(finalizing: Api, case: str) -> None:
    misuse, words = REFUSALS[case]

    def scenario() -> None:
        expected, model = twins()
        shard(finalizing, model)
        with pytest.raises(RuntimeError, match=words):
            misuse(model)
        model.reset_iter_state()
        model.set_manual_backward_finalization(False)
        model.zero_grad()
        assert_trains_as(expected, model)

    on_ranks(scenario)


# -- persistent memory ------------------------------------------------------------------------------------------------


def test_unsharded_parameters_may_keep_their_addresses(keeping: Api) -> None:
    def scenario(reshard_after_forward: bool) -> None:
        expected, model = twins()
        shard(keeping, model, reshard_after_forward=reshard_after_forward)
        model.set_keep_unsharded_storage(True)

        def addresses() -> list[int]:
            for unit in units(keeping, model):
                unit.unshard()
            assert_none_sharded(model.parameters())
            pointers = [parameter.data_ptr() for parameter in model.parameters()]
            for unit in units(keeping, model):
                unit.reshard()
            assert_all_sharded(model.parameters())
            return pointers

        before = addresses()
        assert 0 not in before
        assert_trains_as(expected, model)  # as often gathered as ever: weights change in between
        _ = [torch.empty(1000) for _ in range(20)]
        assert addresses() == before
        model.set_keep_unsharded_storage(False, recurse=False)
        model.set_keep_unsharded_storage(False)
        assert_trains_as(expected, model)

    on_ranks(scenario, cases=(True, False))
