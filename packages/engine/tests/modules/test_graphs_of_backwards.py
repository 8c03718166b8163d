"""Gradients of gradients: walks through the graph that a backward recorded of itself, whose weights were freed."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
import torch
from engine_models import Net, assert_gradients_equal, descend, fsdp, inputs, shard, shard_on, twins
from torch import nn

from lamella_engine import HFSDP, ZERO1, ZERO3, ShardingOptions
from lamella_engine.testing import assert_at_rest, record
from lamella_testing import run_ranks

Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def _gradient_penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    (gradient,) = torch.autograd.grad(model(x).sin().sum(), x, create_graph=True)
    return gradient.square().sum()


def _gradient_penalty_before_another_forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    penalty = _gradient_penalty(model, x)
    return cast(torch.Tensor, penalty + model(x + 1.0).square().mean())


def _score_matching(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    output = model(x)
    (gradient,) = torch.autograd.grad(output.sin().sum(), x, create_graph=True)
    return cast(torch.Tensor, gradient.sum() + output.square().mean())


def _through_two_vjps(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    output = model(x)
    v = torch.zeros_like(output, requires_grad=True)
    (pullback,) = torch.autograd.grad(output, x, v, create_graph=True)
    (tangent,) = torch.autograd.grad(pullback, v, torch.ones_like(x))
    return cast(torch.Tensor, tangent.square().sum() + model(x).square().mean())


def _curvature(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    hessian = torch.func.hessian(lambda row: model(row).sum())(x[0].detach())
    return cast(torch.Tensor, hessian.square().sum())


LOSSES: list[Loss] = [
    _gradient_penalty,
    _gradient_penalty_before_another_forward,
    _score_matching,
    _through_two_vjps,
    _curvature,
]


def _assert_second_derivatives(apply: Callable[..., object], losses: list[Loss] = LOSSES) -> None:
    reference, sharded = twins(_Smooth, apply)
    for loss_of in losses:
        for step in range(3):
            losses_of_step = []
            for model in (reference, sharded):
                x = inputs(4, seed=step).requires_grad_()
                loss = loss_of(model, x)
                loss.backward()  # type: ignore[no-untyped-call]
                losses_of_step.append(loss.detach())
            torch.testing.assert_close(losses_of_step[1], losses_of_step[0])
            assert_gradients_equal(reference, sharded, rtol=1e-4, atol=1e-5)
            assert_at_rest(sharded)
            for model in (reference, sharded):
                descend(model)


class _Smooth(Net):
    """No bias in the head: every parameter has second derivatives, and so a gradient of each loss."""

    def __init__(self) -> None:
        super().__init__(num_layers=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).tanh()


STAGES: dict[str, Callable[[Net], Net]] = {
    "ZERO3": shard,
    "ZERO1": shard_on((2,), options=ShardingOptions(placements=ZERO1)),
    "HFSDP": shard_on((2, 1), options=ShardingOptions(placements=(HFSDP, ZERO3))),
    "stays for backward": shard_on((2,), reshard_after_forward=False),
}


@pytest.mark.parametrize("stage", STAGES)
def test_losses_of_gradients_train_as_unsharded(stage: str) -> None:
    run_ranks(lambda: _assert_second_derivatives(STAGES[stage]), 2)


def test_between_a_backward_and_a_walk_through_its_graph_units_are_at_rest() -> None:
    def check() -> None:
        model = shard(_Smooth())
        x = inputs(4).requires_grad_()
        output = model(x)
        v = torch.zeros_like(output, requires_grad=True)
        (pullback,) = torch.autograd.grad(output, x, v, create_graph=True)
        assert_at_rest(model)
        log = record(model)
        torch.autograd.grad(pullback, v, torch.ones_like(x))
        assert set(log.units_of("gather")) == {"root", "layers.0", "layers.1"}
        assert_at_rest(model)

    run_ranks(check, 2)


def test_units_that_stay_unsharded_need_no_gather_for_third_derivatives() -> None:
    def third(model: nn.Module) -> torch.Tensor:
        x = inputs(4).requires_grad_()
        (first,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
        return torch.autograd.grad(second.square().sum(), x)[0]

    def check() -> None:
        reference, sharded = twins(_Smooth, shard_on((2,), reshard_after_forward=False))
        fsdp(sharded).set_reshard_after_backward(False)
        torch.testing.assert_close(third(sharded), third(reference))

    run_ranks(check, 2)
