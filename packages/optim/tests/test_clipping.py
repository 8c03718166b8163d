"""Gradients on any meshes are clipped as the unsharded model's are."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from engine_models import (
    Net,
    assert_gradients_equal,
    inputs,
    mean_square,
    mesh_of,
    rows_of_this_rank,
    shard,
    shard_on,
    twins,
    whole,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lamella_engine import HFSDP, ZERO2, ZERO3, CPUOffloadPolicy, Rows, ShardingOptions, Whole, fully_shard
from lamella_optim import clip_grad_norm_
from lamella_testing import run_ranks

X = inputs(24)


def _on_three_meshes(model: Net) -> None:
    one, two = init_device_mesh("cpu", (4,)), mesh_of((2, 2))
    fully_shard(model.layers[0], mesh=two, options=ShardingOptions(placements=(HFSDP, ZERO3)))
    fully_shard(model.layers[1], mesh=two)
    fully_shard(model.layers[2], mesh=one, options=ShardingOptions(placements=ZERO2))
    fully_shard(model, mesh=one, ignored_params={model.head.bias})


def _with_gradients() -> tuple[nn.Module, nn.Module]:
    pair = twins(lambda: Net(dim=8), _on_three_meshes)
    pair[0](X).square().mean().backward()
    pair[1](rows_of_this_rank(X)).square().mean().backward()
    # Ignored: each rank has a separate gradient, equal on all ranks only by the trainer's care.
    pair[1].get_parameter("head.bias").grad = pair[0].get_parameter("head.bias").grad.clone()  # type: ignore[union-attr]
    return pair


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("options", [{}, {"foreach": False}])
def test_gradients_on_several_meshes_are_clipped_as_one(norm_type: float, options: dict[str, Any]) -> None:
    def on_each_rank() -> None:
        reference, sharded = _with_gradients()
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1, norm_type)
        got = clip_grad_norm_(sharded.parameters(), 0.1, norm_type, **options)
        torch.testing.assert_close(got, expected)
        assert expected > 0.1
        for a, b in zip(reference.parameters(), sharded.parameters(), strict=True):
            assert a.grad is not None and b.grad is not None
            torch.testing.assert_close(whole(b.grad), a.grad)

    run_ranks(on_each_rank, 4)


def test_clipping_leaves_gradients_below_the_max_norm_unchanged() -> None:
    def on_each_rank() -> None:
        reference, sharded = _with_gradients()
        clip_grad_norm_(sharded.parameters(), 1e6)
        for a, b in zip(reference.parameters(), sharded.parameters(), strict=True):
            assert a.grad is not None and b.grad is not None
            torch.testing.assert_close(whole(b.grad), a.grad)
        sharded.zero_grad()
        assert clip_grad_norm_(sharded.parameters(), 1.0) == 0

    run_ranks(on_each_rank, 4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_gradients_that_float32_does_not_hold_are_clipped_as_unsharded(dtype: torch.dtype) -> None:
    def on_each_rank() -> None:
        # In float32 too, and of one row: this rank owns nothing, or all.
        parameters = [nn.Parameter(torch.zeros(shape, dtype=kind)) for shape, kind in (((3, 2), dtype), ((1,), None))]
        norms = []
        for is_sharded in (False, True):
            holder = _Holder([nn.Parameter(parameter.detach().clone()) for parameter in parameters])
            if is_sharded:
                fully_shard(holder)
            for parameter in holder.parameters():
                parameter.grad = torch.full_like(parameter, 3.0)
            clip = clip_grad_norm_ if is_sharded else nn.utils.clip_grad_norm_
            norms.append(clip(holder.parameters(), 0.1))
            for parameter in holder.parameters():
                assert parameter.grad is not None
                value = 0.1 / math.sqrt(7)
                torch.testing.assert_close(whole(parameter.grad), torch.full_like(whole(parameter), value))
        torch.testing.assert_close(*norms)

    run_ranks(on_each_rank, 2)


class _Holder(nn.Module):
    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self.parameter_list = nn.ParameterList(parameters)

    def forward(self) -> None: ...


def test_norm_types_not_above_zero_are_refused() -> None:
    for norm_type in (0.0, -math.inf):
        with pytest.raises(ValueError, match=f"`norm_type` above 0, got {norm_type}"):
            clip_grad_norm_([], 1.0, norm_type)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_error_if_nonfinite_raises_on_every_rank_for_a_nan_gradient_of_one_rank(norm_type: float) -> None:
    def on_each_rank() -> None:
        _, sharded = _with_gradients()
        gradient = sharded.get_parameter("stem.weight").grad
        assert gradient is not None
        if torch.distributed.get_rank() == 1:  # gloo's maximum keeps a NaN of rank 0 alone
            gradient.to_local().fill_(math.nan)  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match="finite norm of the gradients, got nan"):
            clip_grad_norm_(sharded.parameters(), 1.0, norm_type, error_if_nonfinite=True)

    run_ranks(on_each_rank, 4)


@pytest.mark.usefixtures("small_parameters_are_cut")
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("foreach", [True, False])
def test_gradients_in_the_flat_layout_are_clipped_as_the_unsharded_models(norm_type: float, foreach: bool) -> None:
    loss_of = mean_square(lambda model: model(inputs()))

    def check() -> None:
        for keep in (Rows(1), Whole()):
            reference, sharded = twins(Net, partial(shard, options=ShardingOptions(keep_together=keep)))
            norms = []
            for model in (reference, sharded):
                loss_of(model).backward()
                norms.append(clip_grad_norm_(model.parameters(), 0.1, norm_type, foreach=foreach))
            torch.testing.assert_close(whole(norms[1]), norms[0])
            assert norms[0] > 0.1
            assert_gradients_equal(reference, sharded)

    run_ranks(check, 3)


def test_norms_of_offloaded_gradients_are_the_whole_gradients() -> None:
    def check() -> None:
        reference, sharded = twins(lambda: Net(dim=8), shard_on(offload_policy=CPUOffloadPolicy()))
        reference(X).square().mean().backward()
        sharded(rows_of_this_rank(X)).square().mean().backward()
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
        assert expected > 0.01
        torch.testing.assert_close(clip_grad_norm_(sharded.parameters(), 0.01), expected)
        assert_gradients_equal(reference, sharded, rtol=1e-4, atol=1e-6)

    run_ranks(check, 2)
