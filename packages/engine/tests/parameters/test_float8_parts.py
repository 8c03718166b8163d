"""Parts of weights that come as DTensors, as experts on several ranks do, quantised as the whole weights are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from engine_models import assert_weights_equal, descend
from float8_models import RECIPES, AnyRecipe, quantised_straight
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lamella_engine import MixedPrecisionPolicy, fully_shard
from lamella_engine.testing import record
from lamella_precision import Float8Recipe
from lamella_testing import run_ranks


class _Float8Part(nn.Module):
    """A matrix, or a stack of matrices, cut over a mesh; without a mesh, an oracle with a `recipe`."""

    def __init__(self, mesh: DeviceMesh | None, shape: Sequence[int], dim: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        matrix = torch.randn(*shape, generator=generator) / shape[-1] ** 0.5
        self.weight = nn.Parameter(matrix if mesh is None else distribute_tensor(matrix, mesh, [Shard(dim)]))
        self.recipe: AnyRecipe | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(self.weight, DTensor):
            assert self.recipe is not None
            return _product(x, quantised_straight(self.weight, self.recipe))
        mesh, dims = self.weight.device_mesh, [Shard(0 if self.weight.ndim > 2 else 1)]
        if self.weight.ndim > 2:  # as experts read their stacks
            return DTensor.from_local(_product(x, self.weight.to_local()), mesh, dims).full_tensor()
        return cast(DTensor, _product(DTensor.from_local(x, mesh, [Replicate()]), self.weight)).full_tensor()


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight) if weight.ndim == 2 else x @ weight.mT


def _train_part(model: nn.Module) -> list[float]:
    x = torch.randn(6, 16, generator=torch.Generator().manual_seed(1))  # the same on all ranks: a mean of equals
    losses = []
    for _ in range(3):
        losses.append(model(x).square().mean())
        losses[-1].backward()
        descend(model)
    return [loss.item() for loss in losses]


@pytest.mark.parametrize("num_data", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_parts_of_experts_and_of_tensor_parallel_rows_train_as_the_whole_quantised_weight(num_data: int) -> None:
    """Each matrix of a stack has separate scales, and also each row, or each block of rows."""

    def check() -> None:
        mesh = init_device_mesh("cpu", (num_data, 2), mesh_dim_names=("shards", "parts"))
        stacks = [(name, (6, 12, 16)) for name in ("tensor", "row", "cut-block")]
        for name, shape in [*stacks, ("row", (12, 16)), ("cut-block", (32, 16))]:
            model, oracle = _Float8Part(mesh["parts"], shape), _Float8Part(None, shape)
            oracle.recipe = RECIPES[name]
            fully_shard(model, mesh=mesh["shards"], mp_policy=MixedPrecisionPolicy(recipe=RECIPES[name]))
            losses = _train_part(model)
            assert losses == pytest.approx(_train_part(oracle), rel=1e-6)
            assert losses[-1] < losses[0] * 0.99
            assert cast(DTensor, model.weight).shape == shape
            assert_weights_equal(oracle, model, rtol=1e-6, atol=1e-7)

    run_ranks(check, 2 * num_data)


def test_half_of_the_bytes_of_bf16_travel_to_a_part() -> None:
    """Counted: gathers, and the reduction of the amaxes of a rank's own matrices."""

    def check() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shards", "parts"))
        nbytes = []
        for recipe in (Float8Recipe(), None):
            model = _Float8Part(mesh["parts"], (4, 64, 64))
            fully_shard(model, mesh=mesh["shards"], mp_policy=MixedPrecisionPolicy(torch.bfloat16, recipe=recipe))
            log = record(model)
            model(torch.ones(3, 64, dtype=torch.bfloat16)).sum().backward()
            nbytes.append(sum(event.nbytes for event in log.events if event.kind in ("gather", "all-reduce")))
        assert nbytes[1] == 2 * 64 * 64 * 2  # once, two of the four matrices in bf16
        assert 0.5 < nbytes[0] / nbytes[1] <= 0.51

    run_ranks(check, 4)


def test_parts_that_would_not_be_quantised_as_in_the_whole_are_refused_at_the_call() -> None:
    def check() -> None:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shards", "tensor"))
        for name, shape, dim in [
            ("tensor", (8, 8), 0),  # one scale for the rows of both ranks
            ("cut-block", (24, 8), 0),  # 12 rows a rank, in blocks of 8
            ("row", (8, 8), 1),
            ("tensor", (4, 8, 8), 1),
            ("mxfp8", (64, 64), 0),
        ]:
            split = _Float8Part(mesh["tensor"], shape, dim)
            policy = MixedPrecisionPolicy(recipe=RECIPES[name])
            with pytest.raises(NotImplementedError, match=r"'weight' to be a plain parameter, or .* got .* DTensor"):
                fully_shard(split, mesh=mesh["shards"], mp_policy=policy)

    run_ranks(check, 2)
