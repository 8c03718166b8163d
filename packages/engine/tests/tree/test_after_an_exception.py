"""An exception in the middle of a step: one call brings the engine back to rest, and training goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_models import (
    Boom,
    Net,
    Residual,
    assert_gradients_equal,
    assert_trains_alike,
    fsdp,
    inputs,
    mean_square,
    no_gradient_sync,
    shard,
    twins,
)
from torch import nn

from lamella_engine import fully_shard
from lamella_engine.testing import assert_at_rest, record
from lamella_testing import run_ranks

X = inputs()
LOSS = mean_square(lambda model: model(X))


class _Fragile(Residual):
    fails_in = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        if self.fails_in == "forward":
            raise Boom
        if self.fails_in == "backward":
            out.register_hook(_boom)  # type: ignore[no-untyped-call]
        return out


def _boom(_: torch.Tensor) -> None:
    raise Boom


class _FragileNet(Net):
    def make_layer(self, dim: int) -> nn.Module:
        return _Fragile(dim)


def _fail(model: nn.Module, where: str) -> None:
    layer = model.get_submodule("layers.1")
    layer.fails_in = where  # type: ignore[assignment]
    with pytest.raises(Boom):
        LOSS(model).backward()
    layer.fails_in = ""  # type: ignore[assignment]


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("num_steps_before", [0, 2])
def test_after_a_reset_all_units_are_at_rest_and_training_goes_on(where: str, num_steps_before: int) -> None:
    def check() -> None:
        reference, sharded = twins(_FragileNet)
        assert_trains_alike(reference, sharded, LOSS, num_steps=num_steps_before)
        for _ in range(2):
            _fail(sharded, where)
            fsdp(sharded).reset_iter_state()
            assert_at_rest(sharded)
            sharded.zero_grad()
            assert_trains_alike(reference, sharded, LOSS, num_steps=2)

    run_ranks(check, 2)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_reset_drops_gradients_that_were_not_reduced(where: str) -> None:
    def check() -> None:
        reference, sharded = twins(_FragileNet)
        with no_gradient_sync(sharded):
            LOSS(sharded).backward()
            _fail(sharded, where)
        fsdp(sharded).reset_iter_state()
        assert_at_rest(sharded)
        assert_trains_alike(reference, sharded, LOSS)

    run_ranks(check, 2)


def test_a_reset_at_rest_changes_nothing() -> None:
    def check() -> None:
        reference, sharded = twins()
        for _ in range(2):
            fsdp(sharded).reset_iter_state()
            assert_trains_alike(reference, sharded, LOSS)

    run_ranks(check, 2)


def test_only_the_outermost_unit_resets() -> None:
    def check() -> None:
        model = shard(Net())
        with pytest.raises(RuntimeError, match=r"Expected the outermost unit, got 'layers\.1'"):
            fsdp(model.layers[1]).reset_iter_state()

    run_ranks(check, 1)


def test_a_failed_forward_is_forgotten_by_the_next_one_even_without_a_reset() -> None:
    def check() -> None:
        reference, sharded = twins(_FragileNet)
        assert_trains_alike(reference, sharded, LOSS)
        _fail(sharded, "forward")
        log = record(sharded)
        for _ in range(2):
            log.clear()
            for model in (reference, sharded):
                model.zero_grad()
                LOSS(model).backward()
            assert_gradients_equal(reference, sharded)
            assert_at_rest(sharded)
        # What failed was not learned: each unit is gathered ahead.
        assert log.order[:3] == ["gather root", "gather layers.0", "compute root"]
        assert log.order[3:7] == ["gather layers.1", "compute layers.0", "gather layers.2", "compute layers.1"]

    run_ranks(check, 2)


def test_a_failed_validation_is_forgotten_by_the_next_one_even_without_a_reset() -> None:
    def check() -> None:
        reference, sharded = twins(_FragileNet)
        assert_trains_alike(reference, sharded, LOSS)
        with torch.no_grad():
            _fail(sharded, "forward")
            torch.testing.assert_close(sharded(X), reference(X))
        assert_at_rest(sharded)

    run_ranks(check, 2)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_a_forward_after_a_failed_backward_is_refused_until_a_reset(mode: Callable[[], Any]) -> None:
    """The block before the failed block would run on freed weights: its backward has begun already."""

    def check() -> None:
        reference, sharded = twins(_FragileNet)
        assert_trains_alike(reference, sharded, LOSS)
        _fail(sharded, "backward")
        for _ in range(2):
            with mode(), pytest.raises(RuntimeError, match=r"Expected reset_iter_state\(\) after a backward"):
                sharded(X)
        fsdp(sharded).reset_iter_state()
        sharded.zero_grad()
        assert_trains_alike(reference, sharded, LOSS)

    run_ranks(check, 2)


def test_weights_that_an_exception_left_unsharded_are_not_used_after_an_update() -> None:
    def check() -> None:
        pair = twins(_FragileNet)
        for model in pair:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            LOSS(model).backward()
            _fail(model, "forward")
            optimizer.step()
        torch.testing.assert_close(*(model(X) for model in pair))

    run_ranks(check, 2)


def test_a_new_outer_unit_is_refused_in_the_middle_of_a_step() -> None:
    def check() -> None:
        model = Net()
        layer = fully_shard(model.layers[1])
        layer.get_submodule("up").register_forward_pre_hook(lambda *_: fully_shard(model))
        with pytest.raises(RuntimeError, match=r"Expected the unit 'layers\.1' to be at rest.*reset_iter_state\(\)"):
            model(X)

    run_ranks(check, 2)


# torch 2.13's name, and that of before.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class _FailsOnce:
    """A gather that raises the first time: memory ran out, say."""

    has_failed = False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        if not self.has_failed:
            self.has_failed = True
            raise Boom
        _all_gather(output_tensor, input_tensor, group=group)


@pytest.mark.parametrize("resets", [True, False])
def test_a_gather_that_failed_leaves_no_bytes_behind_and_may_be_tried_again(resets: bool) -> None:
    def check() -> None:
        reference, sharded = twins(Net, shard)
        layer = fsdp(sharded.get_submodule("layers.1"))
        layer.set_custom_all_gather(_FailsOnce())
        if resets:
            with pytest.raises(Boom):
                LOSS(sharded)
            fsdp(sharded).reset_iter_state()
        else:
            with pytest.raises(Boom):
                layer.hold()
        assert_at_rest(sharded)
        sharded.state_dict()
        assert_trains_alike(reference, sharded, LOSS)

    run_ranks(check, 2)
