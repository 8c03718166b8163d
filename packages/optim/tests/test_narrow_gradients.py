"""Optimizers over gradients of another dtype than the weights'."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_models import Net, inputs, rows_of_this_rank, shard, whole
from torch import nn
from torch.distributed.tensor import DTensor

from lamella_engine import MixedPrecisionPolicy
from lamella_optim import clip_grad_norm_, step_on_local_shards
from lamella_testing import run_ranks

BF16, FP32 = torch.bfloat16, torch.float32


def _model() -> Net:
    torch.manual_seed(0)
    return shard(Net(), mp_policy=MixedPrecisionPolicy(BF16, FP32, main_grads_dtype=BF16))


def _backward(model: Net) -> dict[str, DTensor]:
    model(rows_of_this_rank(inputs())).float().square().mean().backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor), name
        assert parameter.grad.dtype == BF16
        gradients[name] = parameter.grad
    return gradients


def test_clipping_takes_the_norm_in_fp32() -> None:
    def check() -> None:
        model = _model()
        gradients = _backward(model).values()
        for gradient in gradients:
            gradient.to_local().fill_(1.0)
        norm = clip_grad_norm_(model.parameters(), 1.0)
        num_elements = sum(gradient.numel() for gradient in gradients)
        assert norm.dtype == FP32
        torch.testing.assert_close(norm, torch.tensor(float(num_elements)).sqrt())
        clipped = {value for gradient in gradients for value in gradient.to_local().flatten().tolist()}
        assert clipped == {torch.tensor(1 / norm.item()).to(BF16).item()}

    run_ranks(check, 2)


class _Decoupled(torch.optim.Optimizer):
    """Plain tensors, `decoupled_grad` and moments in bf16, as Transformer Engine's FusedAdam takes them."""

    def __init__(self, params: Any, *, use_decoupled_grad: bool) -> None:
        super().__init__(params, {})
        self.use_decoupled_grad = use_decoupled_grad

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.param_groups[0]["params"]:
            # Of the two names one, as Transformer Engine's.
            setattr(parameter, "decoupled_grad" if self.use_decoupled_grad else "grad", None)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            assert not isinstance(parameter, DTensor)
            name = "decoupled_grad" if self.use_decoupled_grad else "grad"
            if (gradient := getattr(parameter, name, None)) is None:
                continue
            assert gradient.dtype == BF16
            mean = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter, dtype=BF16))
            mean.lerp_(gradient, 0.5)
            parameter.sub_(mean.float())


@pytest.mark.parametrize("use_decoupled_grad", [False, True])
def test_plain_kernels_find_narrow_gradients_in_grad_or_decoupled_grad(use_decoupled_grad: bool) -> None:
    def check() -> None:
        model = _model()
        before = {name: whole(parameter).clone() for name, parameter in model.named_parameters()}
        optimizer = step_on_local_shards(_Decoupled(model.parameters(), use_decoupled_grad=use_decoupled_grad))
        expected = {name: before[name] - 0.5 * whole(g).float() for name, g in _backward(model).items()}
        optimizer.step()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(whole(parameter), expected[name], rtol=1e-2, atol=1e-6, msg=name)
            assert isinstance(parameter, DTensor)
            if parameter.to_local().numel() > 0:
                mean = optimizer.state[parameter]["exp_avg"]
                assert isinstance(mean, DTensor)
                assert mean.dtype == BF16
            assert parameter.grad is not None
            assert not hasattr(parameter, "decoupled_grad")
        optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())
        _backward(model)
        optimizer.step()

    run_ranks(check, 2)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_clears_both_names_of_a_gradient(set_to_none: bool) -> None:
    def check() -> None:
        model, plain = _model(), nn.Parameter(torch.ones(2))
        plain.decoupled_grad = torch.ones(2, dtype=BF16)  # type: ignore[attr-defined]
        optimizer = step_on_local_shards(_Decoupled([*model.parameters(), plain], use_decoupled_grad=True))
        _backward(model)
        optimizer.zero_grad(set_to_none=set_to_none)
        gradients = [parameter.grad for parameter in model.parameters()]
        gradients.append(plain.decoupled_grad)  # type: ignore[attr-defined]
        for gradient in gradients:
            assert gradient is None if set_to_none else gradient is not None and not gradient.any()

    run_ranks(check, 2)


def test_a_class_clears_gradients_in_its_own_way() -> None:
    """Without `use_decoupled_grad` the class's own zero_grad runs."""
    cleared = []

    class Own(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            cleared.append(set_to_none)

    step_on_local_shards(Own([nn.Parameter(torch.ones(2))])).zero_grad(set_to_none=False)
    assert cleared == [False]
