"""Gathers are issued ahead from the second step on; a step that departs costs late gathers, never a wrong result."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from engine_models import (
    Net,
    Residual,
    Routed,
    assert_gradients_equal,
    assert_trains_alike,
    inputs,
    mean_square,
    shard,
    twins,
)
from torch import nn

from lamella_engine.testing import CollectiveLog, assert_at_rest, record
from lamella_testing import run_ranks

X = inputs()


def _gathers(log: CollectiveLog) -> list[str]:
    return log.units_of("gather")


def test_from_the_second_step_units_are_gathered_before_the_previous_unit_computes() -> None:
    def check() -> None:
        model = shard(Net())
        log = record(model)
        model(X).mean().backward()
        assert log.order[:8] == [
            *("gather root", "compute root"),
            *("gather layers.0", "compute layers.0"),
            *("gather layers.1", "compute layers.1"),
            *("gather layers.2", "compute layers.2"),
        ]
        for _ in range(2):
            log.clear()
            out = model(X)
            assert log.order == [
                *("gather root", "gather layers.0", "compute root"),
                *("gather layers.1", "compute layers.0"),
                *("gather layers.2", "compute layers.1"),
                "compute layers.2",
            ]
            log.clear()
            out.mean().backward()
            # A block's reduction ends backward of the block: the gather of the block below starts before.
            assert log.order == [
                *("gather layers.2", "gather layers.1", "reduce layers.2"),
                *("gather layers.0", "reduce layers.1"),
                *("reduce layers.0", "reduce root"),
            ]

    run_ranks(check, 2)


def test_several_outputs_and_inputs_of_a_unit_do_not_disturb_the_order() -> None:
    @dataclass
    class State:
        x: torch.Tensor
        memory: torch.Tensor

    class PairBlock(Residual):
        def forward(self, state: State) -> State:  # type: ignore[override]
            return State(super().forward(state.x), super().forward(state.memory))

    class PairNet(Net):
        def make_layer(self, dim: int) -> nn.Module:
            return PairBlock(dim)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state = State(self.stem(x), self.stem(-x))
            for layer in self.layers:
                state = layer(state)
            head: torch.Tensor = self.head(state.x * state.memory)
            return head

    def check() -> None:
        model = shard(PairNet())
        for _ in range(2):
            model(X).mean().backward()
        out = model(X)
        log = record(model)
        out.mean().backward()
        assert log.order == [
            *("gather layers.2", "gather layers.1", "reduce layers.2"),
            *("gather layers.0", "reduce layers.1"),
            *("reduce layers.0", "reduce root"),
        ]

    run_ranks(check, 2)


def test_the_first_backward_already_gathers_ahead() -> None:
    def check() -> None:
        model = shard(Net())
        out = model(X)
        log = record(model)
        out.mean().backward()
        assert log.order[:3] == ["gather layers.2", "gather layers.1", "reduce layers.2"]

    run_ranks(check, 2)


def test_a_skipped_block_is_gathered_for_nothing_once_and_freed() -> None:
    def check() -> None:
        reference, sharded = twins(Routed)
        assert isinstance(sharded, Routed)
        assert isinstance(reference, Routed)
        assert_trains_alike(reference, sharded, lambda model: model(X).square().mean())
        reference.route = sharded.route = (0, 2)
        log = record(sharded)
        assert_trains_alike(reference, sharded, lambda model: model(X).square().mean(), num_steps=1)
        assert _gathers(log).count("layers.1") == 1, "the first step that departs does not know yet"
        log.clear()
        assert_trains_alike(reference, sharded, lambda model: model(X).square().mean(), num_steps=2)
        assert "layers.1" not in _gathers(log)

    run_ranks(check, 2)


def test_a_random_order_that_is_equal_on_all_ranks_gives_the_unsharded_result() -> None:
    def check() -> list[str]:
        reference, sharded = twins(Routed)
        log = record(sharded)
        choose = random.Random(7)
        for _ in range(6):
            route = tuple(choose.choices(range(3), k=choose.randrange(5)))
            reference.route = sharded.route = route  # type: ignore[assignment]
            assert_trains_alike(reference, sharded, mean_square(lambda model: model(X)), num_steps=1)
        return log.order

    orders = run_ranks(check, 3)
    assert orders == [orders[0]] * 3


def test_a_validation_pass_on_another_route_leaves_the_next_step_right_and_its_order_known() -> None:
    def check() -> None:
        reference, sharded = twins(Routed)
        log = record(sharded)
        for _ in range(3):
            for model in (reference, sharded):
                model.zero_grad()
                model.route = (0, 1, 2)  # type: ignore[assignment]
                loss = model(X).square().mean()
                with torch.no_grad():
                    model.route = (2, 0)  # type: ignore[assignment]
                    model(X)
                log.clear()
                loss.backward()
            assert_gradients_equal(reference, sharded)
            assert_at_rest(sharded)
            # The backward still is the training forward's, though another forward came between.
            assert [unit for unit in _gathers(log) if unit != "root"] == ["layers.2", "layers.1", "layers.0"]

    run_ranks(check, 2)


def test_an_early_exit_leaves_all_units_at_rest() -> None:
    def check() -> None:
        reference, sharded = twins(Routed)
        assert_trains_alike(reference, sharded, mean_square(lambda model: model(X)), num_steps=2)
        for route in ((0,), (), (0, 1)):
            reference.route = sharded.route = route  # type: ignore[assignment]
            with torch.no_grad():
                torch.testing.assert_close(sharded(X), reference(X))
            assert_at_rest(sharded)
            assert_trains_alike(reference, sharded, mean_square(lambda model: model(X)), num_steps=1)

    run_ranks(check, 2)


def test_an_early_exit_by_a_detached_output_gathers_for_the_backward_that_happens() -> None:
    class Probe(Routed):
        """Backward reaches the upper layers only."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers[1](self.layers[0](self.stem(x)).detach())
            head: torch.Tensor = self.head(x)
            return head

    def check() -> None:
        reference, sharded = twins(Probe)
        log = record(sharded)
        assert_trains_alike(reference, sharded, mean_square(lambda model: model(X)), num_steps=2)
        log.clear()
        assert_trains_alike(reference, sharded, mean_square(lambda model: model(X)), num_steps=1)
        assert sorted(_gathers(log)) == ["layers.0", "layers.1", "layers.1", "root"]

    run_ranks(check, 2)
