"""Transformer Engine's layers, fused and delayed, have the same gradients in units and without units."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from lamella_engine import (
    ZERO1,
    ZERO2,
    ZERO3,
    AxisPlacement,
    FSDPModule,
    MixedPrecisionPolicy,
    ShardingOptions,
    fully_shard,
)
from lamella_megatron import connect_fused_layers
from lamella_testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::Warning")  # of Transformer Engine

WIDTH, ROWS, NUM_GEMMS = 256, 64, 4
Gradients = dict[str, torch.Tensor]
STAGES = {"ZeRO-1": ZERO1, "ZeRO-2": ZERO2, "ZeRO-3": ZERO3}


class _GroupedLinear(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.linear = _te().GroupedLinear(NUM_GEMMS, WIDTH, WIDTH, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.linear(x, [len(x) // NUM_GEMMS] * NUM_GEMMS)
        return output


LAYERS: dict[str, Callable[..., nn.Module]] = {
    "Linear": lambda **options: _te().Linear(WIDTH, WIDTH, **options),
    "LayerNormLinear": lambda **options: _te().LayerNormLinear(WIDTH, WIDTH, **options),
    "LayerNormMLP": lambda **options: _te().LayerNormMLP(WIDTH, 2 * WIDTH, **options),
    "GroupedLinear": _GroupedLinear,
}


def _te() -> Any:
    return importlib.import_module("transformer_engine.pytorch")


def _make(kind: str, dtype: torch.dtype, **options: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(LAYERS[kind](params_dtype=dtype, device="cuda", **options) for _ in range(2)))


def _microbatches(num: int, rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1 + rank)
    return [torch.randn(ROWS, WIDTH, generator=generator).to("cuda", dtype) for _ in range(num)]


def _backward(model: nn.Module, x: torch.Tensor) -> None:
    model(x).float().square().mean().backward()
    for layer in reversed(list(model.modules())):
        if getattr(layer, "need_backward_dw", bool)():
            layer.backward_dw()  # type: ignore[operator]


def _without_units(kind: str, dtype: torch.dtype, x: torch.Tensor, *, fuse: bool) -> Gradients:
    """Gradients of plain layers in fp32: in `main_grad` by layers that fuse, cast after the backward otherwise."""
    model = _make(kind, dtype, fuse_wgrad_accumulation=fuse)
    gradients = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.main_grad = gradients[name]  # type: ignore[attr-defined]
        parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    _backward(model, x)
    for name, parameter in model.named_parameters():
        if not parameter.grad_added_to_main_grad and parameter.grad is not None:  # type: ignore[attr-defined]
            gradients[name] += parameter.grad
    return gradients


def _sum(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """The sum, added up in the order of the arguments."""
    return reduce(torch.add, tensors)


def _in_units(
    kind: str, dtype: torch.dtype, batches: list[torch.Tensor], stage: AxisPlacement, **options: bool
) -> Gradients:
    """Gradients of sharded layers, whole."""
    model = _make(kind, torch.float32, **options)
    with torch.no_grad():
        for sharded, plain in zip(model.parameters(), _make(kind, dtype).parameters(), strict=True):
            sharded.copy_(plain)
    policy = MixedPrecisionPolicy(dtype, torch.float32)
    for unit in (*model, model):
        fully_shard(unit, mp_policy=policy, options=ShardingOptions(placements=stage))
    connect_fused_layers(model)
    assert isinstance(model, FSDPModule)
    for i, x in enumerate(batches):
        model.set_is_last_backward(i == len(batches) - 1)
        _backward(model, x)
    gradients = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor), name
        gradients[name] = parameter.grad.full_tensor()
    return gradients


def _assert_equal_in_units(kind: str, stage: AxisPlacement, num_ranks: int, *, fuse: bool, delay: bool) -> None:
    _te()  # once, before the forks
    options = {"fuse_wgrad_accumulation": fuse, "delay_wgrad_compute": delay}

    def on_each_rank() -> None:
        # Layers that fuse do not round their gradients to bf16: layers that do not are held against in fp32.
        for dtype, fuses in ((torch.float32, False), (torch.bfloat16, fuse)):
            for num_microbatches in (1, 3):
                parts = [_microbatches(num_microbatches, rank, dtype) for rank in range(num_ranks)]
                alone = [[_without_units(kind, dtype, x, fuse=fuses) for x in part] for part in parts]
                gradients = _in_units(kind, dtype, parts[dist.get_rank()], stage, **options)
                assert gradients.keys() == alone[0][0].keys()
                for name, gradient in gradients.items():
                    plain_gradients = torch.stack(
                        [torch.stack([microbatch_gradients[name] for microbatch_gradients in part]) for part in alone]
                    )
                    # The order in which units add up: ZeRO-1 reduces what the last microbatch completes, others each.
                    expected = (
                        _sum(plain_gradients.unbind(1)).mean(0) if stage is ZERO1 else _sum(plain_gradients.mean(0))
                    )
                    description = f"{name} in {dtype}, {num_microbatches} microbatches"
                    assert torch.equal(gradient, expected), f"{description}: {(gradient - expected).abs().max()}"

    run_ranks(on_each_rank, num_ranks, device="cuda")


_OPTIONS = pytest.mark.parametrize(("fuse", "delay"), [(False, False), (True, False), (False, True), (True, True)])


@pytest.mark.gpu1
@_OPTIONS
@pytest.mark.parametrize("kind", LAYERS)
def test_transformer_engine_units_on_one_gpu_have_the_gradients_of_plain_layers(
    kind: str, fuse: bool, delay: bool
) -> None:
    _assert_equal_in_units(kind, ZERO3, 1, fuse=fuse, delay=delay)


@pytest.mark.gpu2
@_OPTIONS
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", LAYERS)
def test_transformer_engine_units_on_two_gpus_have_the_mean_gradients_of_plain_layers(
    kind: str, stage: str, fuse: bool, delay: bool
) -> None:
    _assert_equal_in_units(kind, STAGES[stage], 2, fuse=fuse, delay=delay)
