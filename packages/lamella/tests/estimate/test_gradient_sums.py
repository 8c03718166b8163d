"""Sums of gradients take memory as autograd's engine takes it without modes: whether the first gradient's is reused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

from lamella._estimate.live_bytes import LiveBytes


class _Sums(TorchDispatchMode):
    """Counts sums into new tensors, without gradients."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_sums = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_sums += func is torch.ops.aten.add.Tensor and not torch.is_grad_enabled()
        return func(*args, **(kwargs or {}))


class _Keeps(torch.autograd.Function):
    """Keeps the gradient that it returns."""

    kept: torch.Tensor | None = None

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def backward(context: Any, *grads: torch.Tensor) -> torch.Tensor:
        _Keeps.kept = 2 * grads[0]
        return _Keeps.kept


class _AddsInPython(torch.autograd.Function):
    """Adds gradients up in its own code."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return tensor.clone(), tensor.clone()

    @staticmethod
    def backward(context: Any, *grads: torch.Tensor) -> torch.Tensor:
        products = [3 * grad for grad in grads]
        return products[0] + products[1]


def _kept_first(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cos() * 2 + _Keeps.apply(tensor)  # type: ignore[no-any-return, no-untyped-call]


def _one_gradient_twice(tensor: torch.Tensor) -> torch.Tensor:
    scaled = 2 * tensor
    return scaled.sin() + (scaled + 3 * tensor)


def _tied(tensor: torch.Tensor) -> torch.Tensor:
    rows = nn.functional.embedding(torch.arange(8), tensor.view(8, 8))
    return rows.exp() @ tensor.view(8, 8).t()


def _in_python(tensor: torch.Tensor) -> torch.Tensor:
    first, second = _AddsInPython.apply(tensor)  # type: ignore[no-untyped-call]
    return first.sin() + second.cos()  # type: ignore[no-any-return]


CASES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
    "two users": (lambda tensor: tensor.sin() * 2 + tensor.cos() * 3, 0),
    "three users": (lambda tensor: tensor.sin() * 2 + tensor.cos() * 3 + tensor.exp() * 4, 0),
    "a tied embedding, whose gradient is a view": (_tied, 1),
    "a gradient that is kept": (_kept_first, 1),
    "a gradient for two sums": (_one_gradient_twice, 1),
    "a sum of a layer": (_in_python, 1),
}


@pytest.mark.parametrize("name", CASES)
def test_a_sum_takes_memory_as_without_modes(name: str) -> None:
    function, num_sums = CASES[name]
    tensor = torch.linspace(0, 1, 64, requires_grad=True)
    loss = function(tensor).sum()
    with profile() as events:
        (expected,) = torch.autograd.grad(loss, tensor)
    assert sum(event.name == "aten::add" for event in events.function_events) == num_sums
    live = LiveBytes()
    with _Sums() as sums, live:
        live.sums.learn()
        loss = function(tensor).sum()
        sums.num_sums = 0
        (gradient,) = torch.autograd.grad(loss, tensor)
    assert torch.equal(gradient, expected)
    assert sums.num_sums == num_sums
