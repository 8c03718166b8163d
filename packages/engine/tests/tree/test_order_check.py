"""Ranks with different orders raise before the collective, each with both orders in the message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_models import (
    Net,
    Routed,
    assert_trains_alike,
    fsdp,
    inputs,
    mean_square,
    rows_of_this_rank,
    shard,
    shard_on,
    twins,
)
from torch import nn

from lamella_engine import HSDP, ZERO3, ShardingOptions, fully_shard
from lamella_engine.testing import assert_at_rest
from lamella_testing import run_ranks

pytestmark = pytest.mark.usefixtures("steps_on_shards")

X = inputs()
LOSS = mean_square(lambda model: model(X))
# Long enough for a rank on a busy machine; tests with a missing rank wait a short time instead.
PATIENCE, IMPATIENCE = 60.0, 2.0


def _step(model: nn.Module) -> None:
    LOSS(model).backward()


def _error(model: nn.Module, run: Callable[[nn.Module], None]) -> str:
    with pytest.raises(RuntimeError, match="Expected every rank to run the same units") as caught:
        run(model)
    fsdp(model).reset_iter_state()
    assert_at_rest(model)
    model.zero_grad()
    return str(caught.value)


def _checked(make: Callable[[], Any] = Routed) -> Any:
    model = shard(make())
    fsdp(model).set_options(order_check=True, order_check_timeout_s=PATIENCE)
    for _ in range(2):
        _step(model)
    return model


def _the_odd_one() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_rank_that_leaves_out_a_block_is_found_on_every_rank_with_both_orders(num_ranks: int) -> None:
    def check() -> str:
        model = _checked()
        if _the_odd_one():
            model.route = (0, 2)
        text = _error(model, _step)
        model.route = (0, 1, 2)
        _step(model)  # and all may go on
        return text

    for rank, text in enumerate(run_ranks(check, num_ranks)):
        odd = num_ranks - 1
        assert f"rank {rank} (this one) is about to" in text
        other = 0 if rank == odd else odd
        mine, theirs = (next(line for line in text.splitlines() if f"rank {r} " in line) for r in (rank, other))
        regular, departed = (theirs, mine) if rank == odd else (mine, theirs)
        assert regular.endswith("forward of layers.0, gather layers.1, forward of layers.1")
        assert departed.endswith("forward of layers.0, gather layers.1, forward of layers.2")


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_rank_that_swaps_two_blocks_of_equal_shape_is_found(num_ranks: int) -> None:
    def check() -> str:
        model = _checked()
        if _the_odd_one():
            model.route = (1, 0, 2)
        return _error(model, _step)

    for text in run_ranks(check, num_ranks):
        assert "forward of layers.0" in text and "forward of layers.1" in text


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_rank_that_validates_alone_is_found(num_ranks: int) -> None:
    def run(model: nn.Module) -> None:
        out = model(X)
        if _the_odd_one():
            with torch.no_grad():
                model(X)
        out.mean().backward()

    def check() -> str:
        return _error(_checked(), run)

    for text in run_ranks(check, num_ranks):
        assert "about to gather layers.0" in text, "the validation begins, the root has stayed"
        assert "end the forward, backward of the outermost unit" in text


def test_a_swap_that_sends_nothing_is_found_at_the_end_of_the_pass() -> None:
    def check() -> str:
        model = Routed()
        for layer in model.layers:
            fully_shard(layer, reshard_after_forward=False)
        fully_shard(model, reshard_after_forward=False)
        fsdp(model).set_options(order_check=True, order_check_timeout_s=PATIENCE)
        LOSS(model)
        if _the_odd_one():
            model.route = (1, 0, 2)

        def look(model: nn.Module) -> None:
            model(X)

        return _error(model, look)

    for text in run_ranks(check, 2):
        assert text.count("about to end the forward") == 2


def test_the_order_check_reports_an_absent_rank_with_its_last_known_operation() -> None:
    def check() -> str:
        model = _checked()
        fsdp(model).set_options(order_check_timeout_s=IMPATIENCE)  # Not before: all ranks come to the first steps.
        if _the_odd_one():
            return ""
        return _error(model, _step)

    waiting, gone = run_ranks(check, 2)
    assert not gone
    assert "rank 0 (this one) is about to gather the outermost unit" in waiting
    assert "rank 1 did not come within 2 s, and was last seen when it was about to end the backward" in waiting


def test_ranks_of_other_groups_are_told_too() -> None:
    """Rows of two ranks each: the second row agrees in itself, and would wait for the first in the all-reduce."""

    def check() -> str:
        model: Any = shard_on((2, 2), options=ShardingOptions(placements=(HSDP, ZERO3)))(Routed())
        fsdp(model).set_options(order_check=True, order_check_timeout_s=PATIENCE)
        _step(model)
        if dist.get_rank() == 1:
            model.route = (0, 2)
        return _error(model, _step)

    for rank, text in enumerate(run_ranks(check, 4)):
        assert f"rank {rank} (this one)" in text
        assert "forward of layers.2" in text, "what rank 1 did, wherever it is reported"


def test_a_rank_that_trains_another_part_of_the_block_is_found_before_the_reduction() -> None:
    def check() -> str:
        model = _checked()
        if _the_odd_one():
            model.layers[1].get_submodule("up").requires_grad_(False)
        return _error(model, _step)

    for text in run_ranks(check, 2):
        assert text.count("is about to reduce layers.1") == 2, "the same, but of unequal size"


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks_that_agree_get_the_same_to_the_bit(num_ranks: int) -> None:
    def train(checked: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = shard(Routed())
        fsdp(model).set_options(order_check=checked)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for route in ((0, 1, 2), (0, 2), (2, 0, 0)):
            model.route = route  # type: ignore[assignment]
            model(rows_of_this_rank(X)).square().mean().backward()
            with torch.no_grad():
                model(X)
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.to_local().detach() for parameter in model.parameters()]  # type: ignore[attr-defined]

    def check() -> None:
        for unchecked, checked in zip(train(False), train(True), strict=True):
            assert torch.equal(unchecked, checked)

    run_ranks(check, num_ranks)


def test_lamella_debug_enables_the_order_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAMELLA_DEBUG", "something,order")

    def check() -> str:
        model = shard(Routed())
        if _the_odd_one():
            model.route = (0, 2)  # type: ignore[assignment]
        return _error(model, _step)

    assert all("forward of layers.2" in text for text in run_ranks(check, 2))


def test_the_order_check_leaves_only_its_last_comparison_in_the_store() -> None:
    def check() -> int:
        model = _checked()
        num_keys = dist.distributed_c10d._get_default_store().num_keys()
        for _ in range(3):
            _step(model)
        return dist.distributed_c10d._get_default_store().num_keys() - num_keys

    assert run_ranks(check, 1) == [0]
    assert all(abs(more) <= 3 for more in run_ranks(check, 2))


def test_invalid_order_check_options_are_refused() -> None:
    def check() -> None:
        model = shard(Net())
        with pytest.raises(ValueError, match="`order_check_timeout_s` to be a positive number of seconds, got 0"):
            fsdp(model).set_options(order_check=True, order_check_timeout_s=0)
        with pytest.raises(RuntimeError, match=r"outermost unit, got 'layers\.0'. Call set_options\(\)"):
            fsdp(model.layers[0]).set_options(order_check=True)

    run_ranks(check, 1)


def test_a_model_under_the_order_check_trains_as_unsharded() -> None:
    def check() -> None:
        reference, model = twins()
        fsdp(model).set_options(order_check=True)
        fsdp(model).set_options(prefetch_budget=10**9)
        assert_trains_alike(reference, model, LOSS, num_steps=3)

    run_ranks(check, 2)
