"""Layers with the protocol of Transformer Engine's, fused and delayed, have the gradients of plain layers."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo  # by DTensors, once here and not in each forked rank
import torch.distributed as dist
from te_like import GroupedLinear
from torch import nn
from torch.distributed.tensor import DTensor

from lamella_engine import DDP, ZERO1, ZERO2, ZERO3, AxisPlacement, FSDPModule, ShardingOptions, fully_shard
from lamella_megatron import connect_fused_layers
from lamella_testing import run_ranks

WIDTH, NUM_RANKS = 8, 2
ROWS = torch.randn(3, 6 * NUM_RANKS, WIDTH, generator=torch.Generator().manual_seed(0))  # microbatches


def _make(*, fuse: bool = False, delay: bool = False) -> nn.Sequential:
    torch.manual_seed(1)
    options = {"fuse": fuse, "delay": delay}
    layers = [nn.Sequential(GroupedLinear(n, WIDTH, **options), nn.LayerNorm(WIDTH)) for n in (1, 3)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))


def _gradients(model: nn.Module, microbatches: torch.Tensor) -> dict[str, torch.Tensor]:
    """The gradients of some microbatches, whole: of the mean over ranks."""
    for i, rows in enumerate(microbatches):
        if isinstance(model, FSDPModule):
            model.set_is_last_backward(i == len(microbatches) - 1)
        model(rows).square().mean().backward()
        for layer in model.modules():
            if isinstance(layer, GroupedLinear) and layer.delays:
                layer.backward_dw()
    gradients = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        gradients[name] = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
    return gradients


def _shard(model: nn.Sequential, stage: AxisPlacement) -> None:
    for layer in list(model)[:-1]:
        fully_shard(layer, options=ShardingOptions(placements=stage))
    fully_shard(model, options=ShardingOptions(placements=stage))
    connect_fused_layers(model)


@pytest.mark.parametrize("stage", [DDP, ZERO1, ZERO2, ZERO3], ids=["DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3"])
def test_fused_and_delayed_layers_have_the_gradients_of_plain_layers(stage: AxisPlacement) -> None:
    """Of layers that are fused, delayed, or both, after one microbatch and after three."""

    def on_each_rank() -> None:
        for num_microbatches in (1, 3):
            parts = ROWS[:num_microbatches].chunk(NUM_RANKS, dim=1)  # a grouped linear tells its rows apart by place
            alone = [_gradients(_make(), part) for part in parts]
            expected = {name: sum(rank_gradients[name] for rank_gradients in alone) / NUM_RANKS for name in alone[0]}
            for fuse, delay in ((True, False), (False, True), (True, True)):
                model = _make(fuse=fuse, delay=delay)
                _shard(model, stage)
                for _ in range(2):  # a second step finds buffers and callbacks as the first did
                    gradients = _gradients(model, parts[dist.get_rank()])
                    assert gradients.keys() == expected.keys()
                    for name, gradient in expected.items():
                        message = f"{num_microbatches=}, {fuse=}, {delay=}: {name}"
                        torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-6, msg=message)
                    model.zero_grad()

    run_ranks(on_each_rank, NUM_RANKS)


def test_a_linear_that_would_write_over_earlier_sums_returns_its_gradient() -> None:
    class ColumnParallelLinear(nn.Linear):
        gradient_accumulation_fusion = True

    def on_one_rank() -> None:
        model = nn.Sequential(ColumnParallelLinear(WIDTH, WIDTH))
        fully_shard(model)
        connect_fused_layers(model)
        assert not model[0].gradient_accumulation_fusion
        assert ColumnParallelLinear.gradient_accumulation_fusion, "models that are not sharded still fuse"
        assert not hasattr(model[0].weight, "get_main_grad")

    run_ranks(on_one_rank, 1)


def test_an_optimizer_steps_when_delayed_gradients_have_come() -> None:
    def on_each_rank() -> None:
        model = _make(delay=True)
        _shard(model, ZERO3)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model(ROWS[0]).square().mean().backward()
        with pytest.raises(RuntimeError, match=r"weight0"):
            optimizer.step()

    run_ranks(on_each_rank, 1)
