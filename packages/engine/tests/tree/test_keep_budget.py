"""A budget of bytes keeps the units unsharded between forward and backward that backward wants first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_models import Net, Routed, assert_trains_alike, fsdp, inputs, mean_square, record_third_step, shard, twins
from torch.utils.checkpoint import checkpoint

from lamella_engine import ZERO1, ShardingOptions, fully_shard
from lamella_engine.testing import CollectiveLog, assert_at_rest, named_units, unsharded_nbytes
from lamella_testing import run_ranks

X = inputs()
LOSS = mean_square(lambda model: model(X))
BLOCKS = [f"layers.{i}" for i in range(5)]


def _unsharded_blocks(model: Any) -> list[str]:
    return [name for name, unit in named_units(model) if unit.weights.is_unsharded and name != "root"]


def _learned(model: Any, num_blocks: float) -> tuple[Any, CollectiveLog]:
    """A model whose order is known, whose budget holds so many blocks."""
    fsdp(model).set_options(keep_budget=int(num_blocks * unsharded_nbytes(model.layers[0])))
    return model, record_third_step(model, LOSS)


@pytest.mark.parametrize(("num_blocks", "num_kept"), [(0, 0), (0.9, 0), (1, 1), (2.5, 2), (100, 5)])
def test_the_last_units_that_fit_stay_and_are_gathered_once(num_blocks: float, num_kept: int) -> None:
    def check() -> None:
        model, log = _learned(shard(Net(num_layers=5)), num_blocks)
        loss = LOSS(model)
        assert _unsharded_blocks(model) == BLOCKS[5 - num_kept :]
        assert sorted(log.units_of("gather")) == sorted(["root", *BLOCKS])
        log.clear()
        loss.backward()
        assert log.units_of("gather") == BLOCKS[: 5 - num_kept][::-1]
        assert log.units_of("reduce") == [*BLOCKS[::-1], "root"]
        assert_at_rest(model)

    run_ranks(check, 2)


@pytest.mark.parametrize("num_blocks", [1, 2.5, 100])
def test_training_is_the_unsharded_models(num_blocks: float) -> None:
    def check() -> None:
        reference, model = twins()
        _learned(model, num_blocks)
        assert_trains_alike(reference, model, LOSS, num_steps=3)

    run_ranks(check, 2)


def test_a_keep_budget_keeps_no_unit_of_the_first_forward_or_without_gradients() -> None:
    def check() -> None:
        model = shard(Net())
        fsdp(model).set_options(keep_budget=10**9)
        LOSS(model)
        assert _unsharded_blocks(model) == []
        fsdp(model).reset_iter_state()
        LOSS(model).backward()
        with torch.no_grad():
            model(X)
        assert_at_rest(model)

    run_ranks(check, 2)


def test_a_unit_above_the_keep_budget_is_left_out_for_smaller_units() -> None:
    def apply(model: Net) -> None:
        fully_shard([model.layers[1], model.layers[2]])
        fully_shard(model.layers[0])
        fully_shard(model)

    def check() -> None:
        reference, model = twins(Net, apply)
        _learned(model, 1)
        LOSS(model)
        assert _unsharded_blocks(model) == ["layers.0"]
        fsdp(model).reset_iter_state()
        assert_trains_alike(reference, model, LOSS)

    run_ranks(check, 2)


def test_several_forwards_before_their_backward_share_the_budget() -> None:
    def check() -> None:
        model, _ = _learned(shard(Routed()), 1)
        losses = []
        for route, block in (((0, 1, 2), "layers.2"), ((0, 1), "layers.2"), ((0, 1), "layers.2"), ((2, 1), "layers.1")):
            model.route = route
            losses.append(LOSS(model))
            # The third forward would keep the second block, without room until the last block runs again and goes.
            assert _unsharded_blocks(model) == [block]
        torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
        assert_at_rest(model)

    run_ranks(check, 2)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_units_may_stay(reentrant: bool) -> None:
    class RecomputedNet(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            head: torch.Tensor = self.head(x)
            return head

    def check() -> None:
        reference, model = twins(RecomputedNet)
        _, log = _learned(model, 2)
        LOSS(model).backward()
        assert sorted(log.units_of("gather")) == ["layers.0", "layers.0", "layers.1", "layers.2", "root"]
        model.zero_grad()
        assert_trains_alike(reference, model, LOSS)

    run_ranks(check, 2)


def test_whole_copies_that_stay_anyway_take_no_room() -> None:
    def apply(model: Net) -> None:
        fully_shard(model.layers[2], options=ShardingOptions(placements=ZERO1))
        fully_shard(model.layers[1])
        fully_shard(model.layers[0])
        fully_shard(model)

    def check() -> None:
        reference, model = twins(Net, apply)
        _learned(model, 1)
        LOSS(model)
        assert _unsharded_blocks(model) == ["layers.1"]
        fsdp(model).reset_iter_state()
        assert_trains_alike(reference, model, LOSS)

    run_ranks(check, 2)


def test_an_invalid_keep_budget_is_refused() -> None:
    def check() -> None:
        model = shard(Net())
        for nbytes, error in ((None, TypeError), (1.5, TypeError), (-1, ValueError)):
            with pytest.raises(error, match=r"Expected `keep_budget` to be"):
                fsdp(model).set_options(keep_budget=nbytes)
        with pytest.raises(RuntimeError, match=r"outermost unit, got 'layers\.0'. Call set_options\(\)"):
            fsdp(model.layers[0]).set_options(keep_budget=1)

    run_ranks(check, 1)
