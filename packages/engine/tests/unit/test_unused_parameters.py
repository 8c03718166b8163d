"""Parameters that a step does not use, on all ranks or on some."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_models import (
    Net,
    Residual,
    assert_gradients_equal,
    assert_trains_alike,
    assert_weights_equal,
    fsdp,
    inputs,
    mean_square,
    mesh_of,
    shard,
    twins,
)
from torch import nn

from lamella_engine import HFSDP, HSDP, ZERO3, ShardingOptions, fully_shard
from lamella_engine.testing import assert_at_rest
from lamella_testing import run_ranks

X = inputs()
LOSS = mean_square(lambda model: model(X))


class _TwoExperts(nn.Module):
    """Two linears; a call uses one or none."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(dim, dim) for _ in range(2))

    def forward(self, x: torch.Tensor, expert: int | None) -> torch.Tensor:
        return x * 1 if expert is None else x + self.experts[expert](x)


class _Moe(Net):
    def make_layer(self, dim: int) -> nn.Module:
        return _TwoExperts(dim)

    def forward(self, x: torch.Tensor, experts: tuple[int | None, ...]) -> torch.Tensor:  # type: ignore[override]
        x = self.stem(x)
        for layer, expert in zip(self.layers, experts, strict=True):
            x = layer(x, expert)
        head: torch.Tensor = self.head(x)
        return head


@pytest.mark.parametrize("experts", [(0, 1, 0), (0, None, 1), (None, None, None)])
def test_a_parameter_that_no_rank_uses_has_no_gradient(experts: tuple[int | None, ...]) -> None:
    def check() -> None:
        reference, sharded = twins(_Moe)
        for _ in range(2):
            for model in (reference, sharded):
                model(X, experts).square().mean().backward()
            assert_gradients_equal(reference, sharded)
            assert_at_rest(sharded)

    run_ranks(check, 2)


def test_an_optimizer_leaves_unused_parameters_alone() -> None:
    def check() -> None:
        pair = twins(_Moe)
        for model in pair:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
            for experts in ((0, 0, 0), (1, None, 0)):
                model(X, experts).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert_weights_equal(*pair, rtol=1e-4, atol=1e-5)

    run_ranks(check, 2)


def test_parameters_that_only_some_ranks_use_get_the_mean_over_all_when_asked() -> None:
    routes: list[tuple[int | None, ...]] = [(0, 1, 0), (1, None, 0), (None, None, 1)]

    def check() -> None:
        reference, sharded = twins(_Moe)
        fsdp(sharded).set_reduce_scatter_unused_params(True)
        for _ in range(2):
            reference.zero_grad()
            sharded.zero_grad()
            losses = [reference(x, route).square().mean() for x, route in zip(X.chunk(3), routes, strict=True)]
            sum(losses).div(len(losses)).backward()
            rank = dist.get_rank()
            sharded(X.chunk(3)[rank], routes[rank]).square().mean().backward()
            _zero_where_absent(reference)  # what the flag says: zeros take the place of no gradient
            assert_gradients_equal(reference, sharded)
            assert_at_rest(sharded)

    run_ranks(check, 3)


def test_parameters_that_only_some_ranks_use_are_refused_when_nothing_was_said() -> None:
    """A rank without a gradient would leave its rows untrained, beside trained rows of the remaining ranks."""

    def check() -> None:
        _, sharded = twins(_Moe)
        route = (dist.get_rank(), 0, 0)
        match = rf"'experts\.{1 - dist.get_rank()}\.\w+'.*another rank.*set_reduce_scatter_unused_params\(True\)"
        with pytest.raises(RuntimeError, match=match):
            sharded(X, route).square().mean().backward()
        fsdp(sharded).reset_iter_state()
        assert_at_rest(sharded)

    run_ranks(check, 2)


def _zero_where_absent(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def test_an_input_that_a_unit_does_not_use_gets_no_gradient() -> None:
    class Picky(Net):
        def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x)

    def check() -> None:
        pair = twins(Picky)
        for model in pair:
            x, other = X.clone().requires_grad_(), torch.ones(2, requires_grad=True)
            model(x, other).square().mean().backward()
            assert x.grad is not None
            assert other.grad is None
        assert_gradients_equal(*pair)

    run_ranks(check, 2)


def test_a_unit_with_unused_output_gets_no_gradient_and_is_at_rest() -> None:
    class Ignored(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            self.layers[1](x)
            head: torch.Tensor = self.head(self.layers[2](self.layers[0](x)))
            return head

    def check() -> None:
        reference, sharded = twins(Ignored)
        for _ in range(2):
            for model in (reference, sharded):
                model(X).square().mean().backward()
            assert_gradients_equal(reference, sharded)
            assert_at_rest(sharded)

    run_ranks(check, 2)


def test_a_unit_without_parameters_is_a_unit_all_the_same() -> None:
    class Bare(Net):
        def __init__(self) -> None:
            super().__init__()
            self.activation = nn.Tanh()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.activation(super().forward(x))
            return out

    def apply(model: Bare) -> None:
        fully_shard(model.activation)
        shard(model)

    def check() -> None:
        reference, sharded = twins(Bare, apply)
        for _ in range(2):
            for model in (reference, sharded):
                model(X).square().mean().backward()
            assert_gradients_equal(reference, sharded)
        assert_at_rest(sharded)

    run_ranks(check, 2)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_parameters_without_elements_are_sharded_like_any_other(num_ranks: int) -> None:
    class Nothing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Parameter(torch.zeros(0, 4))
            self.columns = nn.Parameter(torch.zeros(4, 0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.rows.sum() + self.columns.sum()

    class NothingNet(Net):
        def make_layer(self, dim: int) -> nn.Module:
            return Nothing()

        def __init__(self) -> None:
            super().__init__()
            self.nothing = Nothing()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.nothing(super().forward(x))
            return out

    def check() -> None:
        assert_trains_alike(*twins(NothingNet), LOSS)

    run_ranks(check, num_ranks)


@pytest.mark.parametrize("outer", [HSDP, HFSDP])
def test_a_parameter_without_elements_may_lie_beside_rows_that_do_not_divide(outer: Any) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.nothing = nn.Parameter(torch.zeros(0, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.linear(x) + self.nothing.sum()
            return out

    def check() -> None:
        options = ShardingOptions(placements=(outer, ZERO3))
        apply = partial(fully_shard, mesh=mesh_of((2, 2)), options=options)
        assert_trains_alike(*twins(Odd, apply), LOSS)

    run_ranks(check, 4)


def test_tensors_upstream_of_an_input_that_a_unit_ignores_have_no_gradient() -> None:
    class Stopper(Residual):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.detach())

    class StopperNet(Net):
        def make_layer(self, dim: int) -> nn.Module:
            return Stopper(dim)

    def check() -> None:
        pair = twins(StopperNet)
        for _ in range(2):
            gradients = []
            for model in pair:
                x = X.clone().requires_grad_()
                model(x).square().mean().backward()
                gradients.append(x.grad)
            assert gradients == [None, None]
            assert_gradients_equal(*pair)
            assert_at_rest(pair[1])

    run_ranks(check, 2)
