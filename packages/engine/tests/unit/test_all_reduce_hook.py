"""The argument of a hook on reduced gradients, in cases without a counterpart in FSDP2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_models import case, fsdp, local, mesh_of
from torch import nn

from lamella_engine import HFSDP, HSDP, ZERO1, ZERO3, Rows, ShardingOptions, fully_shard
from lamella_testing import run_ranks


def _watched(**options: Any) -> tuple[nn.Linear, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(3, 5), **options)
    shown: list[torch.Tensor] = []
    fsdp(model).set_all_reduce_hook(lambda reduced: shown.append(reduced.clone()))
    return model, shown


def _assert_same_norm(shown: torch.Tensor, model: nn.Module, factor: float = 1.0) -> None:
    gradients = torch.cat([local(p.grad).flatten() for p in model.parameters() if p.grad is not None])
    assert shown.isfinite().all()
    torch.testing.assert_close(shown.norm(), factor * gradients.norm())


@pytest.mark.parametrize(
    "options",
    [
        {"options": ShardingOptions(placements=ZERO1)},
        {"options": ShardingOptions(placements=ZERO3)},
        {"options": ShardingOptions(keep_together=Rows(1))},
    ],
    ids=str,
)
def test_the_all_reduce_hook_sees_the_norm_of_this_ranks_gradients(options: dict[str, Any]) -> None:
    def on_each_rank() -> None:
        model, shown = _watched(**options)
        model(torch.ones(2, 3)).sum().backward()
        (reduced,) = shown
        _assert_same_norm(reduced, model)

    run_ranks(on_each_rank, 3)


def test_the_all_reduce_hook_sees_the_norm_of_this_ranks_gradients_on_two_axes() -> None:
    def on_each_rank() -> None:
        for outer in (HSDP, HFSDP):
            with case(outer):
                model, shown = _watched(mesh=mesh_of((2, 2)), options=ShardingOptions(placements=(outer, ZERO3)))
                model(torch.ones(2, 3)).sum().backward()
                _assert_same_norm(torch.cat(shown), model)

    run_ranks(on_each_rank, 4)


@pytest.mark.parametrize("only_sums", [False, True])
def test_the_all_reduce_hook_sees_the_mean_or_the_sum_where_sums_are_forced(only_sums: bool) -> None:
    def on_each_rank() -> None:
        model, shown = _watched()
        fsdp(model).set_gradient_divide_factor(5.0)
        fsdp(model).set_force_sum_reduction_for_comms(only_sums)
        model(torch.ones(2, 3)).sum().backward()
        (reduced,) = shown
        _assert_same_norm(reduced, model, factor=5.0 if only_sums else 1.0)
        assert model.bias.grad is not None
        assert (local(model.bias.grad) == 2 * 2 / 5).all()

    run_ranks(on_each_rank, 2)


def test_the_all_reduce_hook_may_be_set_while_replicas_keep_their_sums() -> None:
    def on_each_rank() -> None:
        torch.manual_seed(0)
        model = fully_shard(nn.Linear(3, 5), mesh=mesh_of((2, 2)))
        shown: list[torch.Tensor] = []
        fsdp(model).set_requires_all_reduce(False)
        model(torch.ones(2, 3)).sum().backward()
        fsdp(model).set_all_reduce_hook(lambda reduced: shown.append(reduced.clone()))
        fsdp(model).set_requires_all_reduce(True)
        model(torch.ones(2, 3)).sum().backward()
        (reduced,) = shown
        _assert_same_norm(reduced, model)
        assert model.bias.grad is not None
        assert (local(model.bias.grad) == 4).all()

    run_ranks(on_each_rank, 4)
