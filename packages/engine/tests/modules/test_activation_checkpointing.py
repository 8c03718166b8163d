"""Activation checkpointing, both kinds of it, runs a forward again inside backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
import torch
from engine_models import Net, Residual, assert_trains_alike, case, inputs, mean_square, shard, twins
from recomputing_models import KINDS, RecomputedInsides, RecomputedUnits, Several, recomputing_net
from torch import nn
from torch.utils.checkpoint import checkpoint

from lamella_engine import fully_shard
from lamella_engine.testing import record
from lamella_testing import run_ranks

X = inputs()
BLOCKS = ["layers.0", "layers.1", "layers.2"]


@pytest.mark.parametrize("reentrant", KINDS)
def test_recomputed_units_train_as_the_unsharded_model_does(reentrant: bool) -> None:
    def check() -> None:
        for model in (RecomputedUnits, RecomputedInsides, Several):
            with case(model.__name__):
                assert_trains_alike(*twins(recomputing_net(model, reentrant)), mean_square(lambda net: net(X)))

    run_ranks(check, 2)


@pytest.mark.parametrize("reentrant", KINDS)
def test_the_root_can_be_recomputed(reentrant: bool) -> None:
    def forward(model: nn.Module) -> torch.Tensor:
        out: torch.Tensor = checkpoint(model, X.clone().requires_grad_(), use_reentrant=reentrant)
        return out

    def check() -> None:
        assert_trains_alike(*twins(), mean_square(forward))

    run_ranks(check, 2)


@pytest.mark.parametrize("reentrant", KINDS)
def test_units_without_a_root_can_be_recomputed(reentrant: bool) -> None:
    def forward(model: nn.Module) -> torch.Tensor:
        x = torch.ones(2, 7, requires_grad=True)
        for layer in model.children():
            x = checkpoint(layer, x, use_reentrant=reentrant)
        return x

    def apply(model: nn.ModuleList) -> None:
        for layer in model:
            fully_shard(layer)

    def make() -> nn.Module:
        return nn.ModuleList(Residual() for _ in range(3))

    def check() -> None:
        assert_trains_alike(*twins(make, apply), mean_square(forward))

    run_ranks(check, 2)


@pytest.mark.parametrize("reentrant", KINDS)
def test_a_recomputed_forward_finds_its_unit_unsharded_and_gathers_nothing_more(reentrant: bool) -> None:
    def check() -> None:
        for model in (RecomputedUnits, RecomputedInsides):
            with case(model.__name__):
                sharded = shard(recomputing_net(model, reentrant)())
                sharded(X).mean().backward()
                log = record(sharded)
                sharded(X).mean().backward()
                assert Counter(log.units_of("gather")) == Counter([*BLOCKS, *BLOCKS, "root"])
                assert sorted(log.units_of("reduce")) == sorted([*BLOCKS, "root"])

    run_ranks(check, 2)


class _Twice(Net):
    """The middle unit runs on two branches: recomputed on one, and on the other without gradients of its inputs."""

    is_recomputed_first: bool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](self.stem(x))
        branches: list[Callable[[], torch.Tensor]] = [
            lambda: checkpoint(self.layers[1], x, use_reentrant=True),
            lambda: self.layers[1](x.detach() / 2),
        ]
        first, second = (branch() for branch in (branches if self.is_recomputed_first else branches[::-1]))
        head: torch.Tensor = self.head(self.layers[2](first * second))
        return head


@pytest.mark.parametrize("is_recomputed_first", [True, False])
def test_a_unit_may_be_recomputed_beside_a_call_whose_backward_no_input_ends(is_recomputed_first: bool) -> None:
    make = type("_Twice", (_Twice,), {"is_recomputed_first": is_recomputed_first})

    def check() -> None:
        assert_trains_alike(*twins(make), mean_square(lambda model: model(X)))

    run_ranks(check, 2)


def test_a_forward_without_gradients_inside_a_recomputed_one_reads_the_weights() -> None:
    """A teacher in the student's recomputed loss, say."""

    class Guided(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(self._guided, self.stem(x), use_reentrant=False)
            head: torch.Tensor = self.head(x)
            return head

        def _guided(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                target = self.layers[1](x)
            out: torch.Tensor = self.layers[0](x) * target
            return out

    forward: Callable[[nn.Module], torch.Tensor] = partial(lambda model: model(X))

    def check() -> None:
        assert_trains_alike(*twins(Guided), mean_square(forward))

    run_ranks(check, 2)
