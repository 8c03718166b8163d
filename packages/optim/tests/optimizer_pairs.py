"""A model trained in the ordinary way, and a twin with another kind of step, to the same bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from engine_models import Net, fsdp, inputs, local, mean_square, rows_of_this_rank, shard
from optimizer_models import OPTIMIZERS
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lamella_engine.testing import CollectiveLog, record
from lamella_optim import overlap_optimizer

X = inputs(24)
LOSS = mean_square(lambda model: model(rows_of_this_rank(X)).float())

Make = Callable[[nn.Module], Optimizer]
Act = Callable[[nn.Module], None]


def named(name: str, **options: Any) -> Make:
    """A maker of one of torch's optimizers over a model's parameters."""
    return lambda model: OPTIMIZERS[name](model.parameters(), **options)


ADAMW = named("AdamW", lr=1e-2)


def run_backward(model: nn.Module) -> None:
    LOSS(model).backward()


def two_microbatches(model: nn.Module, *, reduces_each: bool) -> None:
    for is_last in (False, True):
        fsdp(model).set_is_last_backward(is_last)
        fsdp(model).set_requires_gradient_sync(is_last or reduces_each)
        (LOSS(model) * (1 + is_last)).backward()


def do_nothing(model: nn.Module) -> None:
    return


def assert_same_state(expected: dict[str, Any], got: dict[str, Any]) -> None:
    """Two state dicts say the same, in the same structure, to the bit."""
    assert got["param_groups"] == expected["param_groups"]
    assert got["state"].keys() == expected["state"].keys()
    for key, state in expected["state"].items():
        assert list(got["state"][key]) == list(state)
        for a, b in zip(pytree.tree_leaves(state), pytree.tree_leaves(got["state"][key]), strict=True):
            assert type(a) is type(b)
            assert torch.equal(local(a), local(b)) if isinstance(a, torch.Tensor) else a == b


def assert_same_weights(expected: nn.Module, got: nn.Module) -> None:
    """This rank's parts are equal to the bit."""
    for (name, a), b in zip(expected.named_parameters(), got.parameters(), strict=True):
        assert torch.equal(local(a), local(b)), name


class Pair:
    """The two models, and the optimizer of each: first the ordinary pair."""

    def __init__(
        self,
        make: Callable[[], nn.Module] = Net,
        apply: Callable[..., object] = shard,
        optimizer: Make = ADAMW,
        backward: Act = run_backward,
    ) -> None:
        self.models, self.optimizers = [], []
        for _ in range(2):
            torch.manual_seed(0)
            self.models.append(model := make())
            apply(model)
            self.optimizers.append(optimizer(model))
        self._backward = backward

    @property
    def model(self) -> nn.Module:
        """The twin."""
        return self.models[1]

    @property
    def optimizer(self) -> Optimizer:
        """The twin's."""
        return self.optimizers[1]

    def assert_equal(self) -> None:
        """Weights, gradients and state dicts are the same to the bit."""
        assert_same_weights(*self.models)
        for (name, expected), got in zip(self.models[0].named_parameters(), self.model.parameters(), strict=True):
            assert (got.grad is None) == (expected.grad is None), name
            if got.grad is not None and expected.grad is not None:
                assert torch.equal(local(got.grad), local(expected.grad)), name
        assert_same_state(*(optimizer.state_dict() for optimizer in self.optimizers))

    def compile_steps(self) -> list[list[object]]:
        """Compile both optimizers' steps from now on; returns a growing list of graphs for each."""
        graphs_of: list[list[object]] = [[], []]
        for optimizer, graphs in zip(self.optimizers, graphs_of, strict=True):
            optimizer.step = torch.compile(optimizer.step, backend=partial(_noted, graphs))  # type: ignore[assignment, method-assign]
        return graphs_of

    def _step(self, set_to_none: bool) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        self.assert_equal()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)


def _noted(graphs: list[object], graph: Any, _: object) -> Any:
    graphs.append(graph)
    return graph.forward


class Overlapped(Pair):
    """The twin's optimizer hides gathers; both models' collectives are logged with `looks`."""

    def __init__(self, *args: Any, looks: bool = True, late_gradients: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self.handle = overlap_optimizer(self.optimizer, late_gradients=late_gradients)
        self.logs: list[CollectiveLog] = [record(model) if looks else CollectiveLog() for model in self.models]

    def backward(self) -> None:
        for model, log in zip(self.models, self.logs, strict=True):
            log.clear()
            self._backward(model)

    def step(self, *, set_to_none: bool = True) -> list[str]:
        """The units gathered by the step."""
        for log in self.logs:
            log.clear()
        self._step(set_to_none)
        ordinary, gathered = (log.units_of("gather") for log in self.logs)
        assert ordinary == []
        return gathered

    def train(self, num_steps: int = 3, *, set_to_none: bool = True, between: Act = do_nothing) -> list[str]:
        """The units gathered by the last step."""
        for _ in range(num_steps):
            self.backward()
            gathered = self.step(set_to_none=set_to_none)
            for model in self.models:
                between(model)
        return gathered

    def assert_looks_alike(self) -> None:
        with torch.no_grad():
            assert torch.equal(*(model(X) for model in self.models))
