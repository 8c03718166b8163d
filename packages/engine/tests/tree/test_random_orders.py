"""A model with a random order, equal on all ranks, driven in every manner of training loops.

With any prefetch results are the unsharded model's, waiting units fit the budget, and no unit is
gathered in vain in a step equal to the last. A failure names its seed and the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from engine_models import (
    Boom,
    Net,
    Residual,
    assert_gradients_equal,
    assert_weights_equal,
    case,
    fsdp,
    no_gradient_sync,
    twins,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from lamella_engine import fully_shard
from lamella_engine._unit.weights import UnitWeights
from lamella_engine.testing import Residency, assert_at_rest, named_units
from lamella_testing import run_ranks

pytestmark = pytest.mark.usefixtures("steps_on_shards")

NUM_STEPS, NUM_BLOCKS = 12, 5
X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _boom(_: torch.Tensor) -> None:
    raise Boom


class _Nested(nn.Module):
    """A unit around two units, run in either order."""

    is_reversed = False

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList([Residual(), Residual()])
        self.scale = nn.Parameter(torch.ones(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for half in reversed(self.halves) if self.is_reversed else self.halves:
            x = half(x)
        return x * self.scale


class _Random(Net):
    """Runs blocks along a route; may recompute blocks, stop early, or fail."""

    route: tuple[int, ...] = tuple(range(NUM_BLOCKS))
    recomputes: bool | None = None  # None: no; else whether the reentrant way
    fails_at: tuple[str, int] = ("nowhere", 0)

    def __init__(self) -> None:
        super().__init__(NUM_BLOCKS)
        self.layers[2] = _Nested()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for position, i in enumerate(self.route):
            if self.fails_at == ("forward", position):
                raise Boom
            if self.fails_at == ("backward", position):
                x.register_hook(_boom)  # type: ignore[no-untyped-call]
            if self.recomputes is None or not torch.is_grad_enabled():
                x = self.layers[i](x)
            else:
                x = checkpoint(self.layers[i], x, use_reentrant=self.recomputes)
        head: torch.Tensor = self.head(x)
        return head


def _make() -> nn.Module:
    return _Random().double()


def _cut(model: Any) -> None:
    for half in model.layers[2].halves:
        fully_shard(half)
    for i, layer in enumerate(model.layers):
        fully_shard(layer, reshard_after_forward=i != 3)
    fully_shard(model)


# -- ways to take a step: each acts on both models alike --------------------------------------------------------------

Pair = tuple[Any, Any]


def _reroute(choose: Random, pair: Pair) -> None:
    """Another way through the model, except inside recomputed parts, which must not change."""
    route = tuple(choose.choices(range(NUM_BLOCKS), k=choose.randrange(7)))
    is_reversed = choose.random() < 0.5
    for model in pair:
        model.route = route
        if model.recomputes is None:
            model.layers[2].is_reversed = is_reversed


def _loss(model: Any, i: int = 0) -> Any:
    return model(X + i).square().mean()


def _plain(choose: Random, pair: Pair) -> None:
    losses = [_loss(model) for model in pair]
    torch.testing.assert_close(losses[1], losses[0])
    for loss in losses:
        loss.backward()


def _validating_in_between(choose: Random, pair: Pair) -> None:
    mode = choose.choice([torch.no_grad, torch.inference_mode])
    losses = [_loss(model) for model in pair]
    routes = pair[0].route
    _reroute(choose, pair)
    with mode():
        torch.testing.assert_close(pair[1](X), pair[0](X))
    for model, loss in zip(pair, losses, strict=True):
        loss.backward()
        model.route = routes


def _several_forwards_first(choose: Random, pair: Pair) -> None:
    losses: list[list[Any]] = [[], []]
    for i in range(3):
        _reroute(choose, pair)
        for model, model_losses in zip(pair, losses, strict=True):
            model_losses.append(_loss(model, i))
    for model_losses in losses:
        sum(model_losses).backward()


def _microbatches(choose: Random, pair: Pair) -> None:
    reference, sharded = pair
    for i in range(3):
        _reroute(choose, pair)
        _loss(reference, i).backward()
        if i < 2:
            with no_gradient_sync(sharded):
                _loss(sharded, i).backward()
        else:
            _loss(sharded, i).backward()


def _failing_first(choose: Random, pair: Pair) -> None:
    fails_at = (choose.choice(["forward", "backward"]), choose.randrange(NUM_BLOCKS))
    for model in pair:
        route, model.route, model.fails_at = model.route, tuple(range(NUM_BLOCKS)), fails_at
        with pytest.raises(Boom):
            _loss(model).backward()
        model.route, model.fails_at = route, ("nowhere", 0)
        model.zero_grad()
    fsdp(pair[1]).reset_iter_state()
    assert_at_rest(pair[1])
    _plain(choose, pair)


WAYS = [_plain, _plain, _validating_in_between, _several_forwards_first, _microbatches, _failing_first]


# -- the watch on units -----------------------------------------------------------------------------------------------


class _Watch:
    """Sees every change of every unit's residency."""

    def __init__(self, model: nn.Module) -> None:
        self._units = [unit for _, unit in named_units(model)]
        self._largest = max(unit.parameters.unsharded_nbytes for unit in self._units)
        self.budget: int | None = None
        self.num_gathers = self.num_used = 0

    @contextmanager
    def watching(self, patch: pytest.MonkeyPatch) -> Iterator[None]:
        become = UnitWeights._become

        def change(weights: UnitWeights, to: Residency) -> None:
            become(weights, to)
            self.num_gathers += to is Residency.UNSHARDING
            if to is Residency.UNSHARDED:
                self.num_used += 1
                self._check_room()

        patch.setattr(UnitWeights, "_become", change)
        yield
        patch.undo()

    def _check_room(self) -> None:
        """The running unit has its parameters: parameters still on their way were prefetched."""
        waiting = [
            unit.parameters.unsharded_nbytes for unit in self._units if unit.weights.residency is Residency.UNSHARDING
        ]
        assert len(waiting) <= 1 or sum(waiting) <= (self.budget or 0), f"{waiting} beside {self.budget}"


def _run(seed: int) -> None:
    choose = Random(seed)
    pair = twins(_make, _cut, seed=seed)
    watch = _Watch(pair[1])
    block = dict(named_units(pair[1]))["layers.0"].parameters.unsharded_nbytes
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9) for model in pair]
    done: list[str] = []
    with watch.watching(pytest.MonkeyPatch()):
        for _ in range(NUM_STEPS):
            watch.budget = choose.choice([None, 0, block, int(2.5 * block), 10**9])
            fsdp(pair[1]).set_options(prefetch_budget=watch.budget)
            fsdp(pair[1]).set_options(keep_budget=choose.choice([0, 0, block, int(2.5 * block), 10**9]))
            fsdp(pair[1]).set_options(order_check=choose.random() < 0.2)
            _reroute(choose, pair)
            recomputes = choose.choice([None, True, False])
            for model in pair:
                assert isinstance(model, _Random)
                model.recomputes = recomputes
            way: Callable[[Random, Pair], None] = choose.choice(WAYS)
            done.append(way.__name__)
            with case(f"seed {seed}, {pair[0].route}, budget {watch.budget}, {recomputes}, after {', '.join(done)}"):
                way(choose, pair)
                _check(pair)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert_weights_equal(*pair, rtol=1e-7, atol=1e-9)
        with case(f"seed {seed}, a step that repeats the last one"):
            _repeat(choose, pair, watch)


def _check(pair: Pair) -> None:
    assert_at_rest(pair[1])
    assert_gradients_equal(*pair, rtol=1e-7, atol=1e-9)


def _repeat(choose: Random, pair: Pair, watch: _Watch) -> None:
    for _ in range(2):
        watch.num_gathers = watch.num_used = 0
        for model in pair:
            model.zero_grad()
        _plain(choose, pair)
        _check(pair)
    assert watch.num_gathers == watch.num_used, "all is known by now"


def _run_all(seeds: range) -> None:
    for seed in seeds:
        _run(seed)


def test_a_random_order_trains_as_unsharded_within_every_budget() -> None:
    run_ranks(_run_all, 2, range(4))


@pytest.mark.slow
def test_many_random_orders_train_as_unsharded_within_every_budget() -> None:
    for first in range(100, 180, 20):
        run_ranks(partial(_run_all, range(first, first + 20)), 2, timeout_s=900.0)
