"""Optimizers for tests: torch's by name, some in the manner of users' own, and a model of parameters with few rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, Optimizer) and kind is not Optimizer
}

# Optimizers beyond torch's own DTensor support. Each raises at its first step, on every rank alike;
# an optimizer without an error any more belongs among the compared optimizers.
WHOLE_TENSORS_ONLY = {
    "Adafactor": "scales by norms, which a DTensor has in part on each rank",
    "LBFGS": "flattens all parameters into one vector, which DTensor refuses for chunks of unequal size",
    "Muon": "orthogonalises whole matrices, and adds in place what DTensor has replicated to do so",
    "Rprop": "writes through boolean indices, or copies lists of tensors, for which DTensor has no in-place strategy",
    "SparseAdam": "takes sparse gradients only",
}
WHOLE_MATRICES_BEFORE = {"Muon": "2.12"}  # the first torch with the error; before, DTensor gathered the factors
NO_DTENSOR_FUSED_KERNEL = {"Adagrad", "SGD"}


class Short(nn.Module):
    """Parameters of one, two and three rows."""

    def __init__(self) -> None:
        super().__init__()
        self.two = nn.Linear(3, 2)
        self.three = nn.Linear(2, 3)
        self.one = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.one(torch.tanh(self.three(torch.tanh(self.two(x)))))
        return out


def flavours_of(name: str) -> Iterator[dict[str, bool]]:
    accepted = inspect.signature(OPTIMIZERS[name]).parameters
    yield {}
    for flavour in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        if accepted.keys() >= flavour.keys() and not (flavour == {"fused": True} and name in NO_DTENSOR_FUSED_KERNEL):
            yield flavour


class Lion(Optimizer):
    """As many write their own: no hooks, no flavours, state by hand."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "beta": 0.9})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    average = self.state[p].setdefault("average", torch.zeros_like(p))
                    average.lerp_(p.grad, 1 - group["beta"])
                    p.add_(average.sign(), alpha=-group["lr"])


class CountsInItsGroups(Lion):
    """Corrects for the number of steps, counted by each group."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["num_steps"] = group.get("num_steps", 0) + 1
        super().step()


class CountsItself(Lion):
    """Slows down with the number of steps, counted by the optimizer itself."""

    num_steps = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.num_steps += 1
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.sub_(p.grad, alpha=0.1 / self.num_steps)


class NormsOverAll(Lion):
    """Looks at all gradients before the first update."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum(p.grad.square().sum() for p in parameters)
        for p in parameters:
            p.sub_(p.grad / norm)
