"""A recipe whose scales are of whole tensors: one reduction for all units, a step behind the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from block_recipe import Blocks, Linear, twins_in_8_bits
from engine_models import assert_weights_equal
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from lamella_engine import MixedPrecisionPolicy, fully_shard
from lamella_precision import Direction, PayloadFormat
from lamella_testing import run_ranks

Columns = Sequence[torch.Tensor]


class _Scaled(torch.Tensor):
    """Integers that travel, and a scale that every rank computes."""

    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # integers, scale, main weight

    @staticmethod
    def __new__(cls, parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor], shape: Sequence[int]) -> Self:
        made = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=torch.float32)
        made.parts = parts
        return made

    def read(self, direction: Direction) -> torch.Tensor:
        return self.parts[0].float() * self.parts[1]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            return Linear.apply(args[0], args[1], _Scaled.read)  # type: ignore[no-untyped-call]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        assert func is torch.ops.aten.detach.default
        return cls(args[0].parts, args[0].shape)


class _ScaledRecipe:
    block_rows = 1

    def __init__(self) -> None:
        self.weights: list[_Scaled] = []
        self.num_calls = 0

    def payloads(self, shape: Sequence[int], main_dtype: torch.dtype) -> tuple[PayloadFormat, ...]:
        return (PayloadFormat(torch.int8, tuple(shape)),)

    def encode(self, shards: Columns, payloads: Sequence[Columns | None], weights: Columns) -> None:
        self.num_calls += 1
        scales = [cast(_Scaled, weight).parts[1] for weight in weights]
        (into,) = payloads
        assert into is not None
        torch._foreach_copy_(list(into), [each.round() for each in torch._foreach_div(list(shards), scales)])

    def decode(self, payloads: Columns, shape: torch.Size, main_weight: torch.Tensor) -> torch.Tensor:
        self.weights.append(_Scaled((payloads[0], torch.ones(()), main_weight), shape))
        return self.weights[-1]

    def update_scales(self) -> None:
        shards = [cast(DTensor, weight.parts[2]).to_local() for weight in self.weights]
        largest = torch.stack([shard.detach().abs().amax() if shard.numel() else torch.zeros(()) for shard in shards])
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        for weight, scale in zip(self.weights, largest / 127, strict=True):
            weight.parts[1].copy_(scale)


def _read_main(weight: torch.Tensor, direction: Direction) -> torch.Tensor:
    main = weight.detach()
    scale = main.abs().amax() / 127
    return (main / scale).round() * scale


def _train(model: Blocks, recipe: _ScaledRecipe | None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x = torch.randn(6, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
    for _ in range(3):
        if recipe is not None:
            with CommDebugMode() as counted:  # type: ignore[no-untyped-call]
                recipe.update_scales()
            assert counted.get_total_counts() == 1
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_scales_of_whole_tensors_are_reduced_for_all_units_at_once_and_found_by_every_encoding() -> None:
    def check() -> None:
        mine, oracle = twins_in_8_bits(rows=10)
        recipe = _ScaledRecipe()
        policy = MixedPrecisionPolicy(recipe=lambda parameter: recipe if parameter.ndim == 2 else None)
        for block in mine.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(mine)
        for linear in oracle.blocks.modules():
            if isinstance(linear, nn.Linear):
                vars(linear)["read"] = _read_main
        _train(mine, recipe)
        assert recipe.num_calls == 3 * 3 * 2  # one a unit and gather, whatever the number of matrices
        _train(oracle, None)
        assert_weights_equal(oracle, mine, rtol=0.0, atol=0.0)

    for num_ranks in (2, 4):
        run_ranks(check, num_ranks)
