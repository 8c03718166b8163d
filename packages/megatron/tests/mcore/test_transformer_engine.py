"""A model of Transformer Engine's layers trains in bf16 in units as without, also if layers fuse weight gradients."""

from __future__ import annotations

import importlib
import math
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from lamella_megatron import fully_shard_model
from lamella_testing import run_ranks
from lamella_testing.megatron import seed_random_states, tiny_config, tiny_gpt, token_losses
from lamella_testing.megatron_parity import BATCH, LEARNING_RATE, Layout

pytestmark = pytest.mark.filterwarnings("ignore::Warning")  # of megatron-core and Transformer Engine

DEVICE: Final = "cuda"
NUM_STEPS = 3
Weights = dict[str, torch.Tensor]


def _make(*, fuse: bool = False) -> nn.Module:
    """A GPTModel on the current GPU. Effects: collective over the world."""
    Layout(num_ranks=dist.get_world_size()).initialize()
    seed_random_states(0)
    specs = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    config = tiny_config(
        hidden_size=128,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_cpu_initialization=False,
        gradient_accumulation_fusion=fuse,
    )
    if fuse:  # The output layer asks for apex in its constructor, and is unfused by the units.
        layers: Any = importlib.import_module("megatron.core.tensor_parallel.layers")
        layers._grad_accum_fusion_available = True
    model = tiny_gpt(config, transformer_layer_spec=specs.get_gpt_layer_with_transformer_engine_spec())
    return model.to(DEVICE, torch.bfloat16)  # position embeddings are built in fp32


def _train(model: nn.Module, rows: torch.Tensor) -> list[float]:
    """Train by SGD, and return the loss over all ranks before each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for _ in range(NUM_STEPS):
        loss = token_losses(model, rows.to(DEVICE)).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean := loss.detach() / dist.get_world_size())
        losses.append(mean.item())
    return losses


def _weights(model: nn.Module) -> Weights:
    return {name: parameter.detach().cpu().float() for name, parameter in model.named_parameters()}


def _on_one_rank() -> tuple[Weights, list[float], Weights]:
    model = _make()
    before = _weights(model)
    return before, _train(model, BATCH), _weights(model)


def _distance(weights: Weights, expected: Weights) -> float:
    return math.sqrt(sum(float((weights[name] - other).square().sum()) for name, other in expected.items()))


def _assert_trains_as_without_units(num_ranks: int, *, fuse: bool) -> None:
    [(before, expected_losses, expected)] = run_ranks(_on_one_rank, 1, device=DEVICE)
    assert expected_losses[-1] < expected_losses[0] - 0.05, f"nothing was learned: {expected_losses}"
    assert any("layer_norm_weight" in name for name in before), "no fused layer of Transformer Engine"

    def on_each_rank() -> None:
        model = _make(fuse=fuse)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(before[name])
        fully_shard_model(model)
        losses = _train(model, BATCH.chunk(num_ranks)[dist.get_rank()])
        torch.testing.assert_close(losses, expected_losses, rtol=1e-2, atol=0.0)
        trained = {}
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor), name
            trained[name] = parameter.full_tensor().detach().cpu().float()
        # bf16 rounds each update. A gradient that is wrong by a factor of 2 is off by half of the way, or more.
        assert _distance(trained, expected) < 0.25 * _distance(before, expected)

    run_ranks(on_each_rank, num_ranks, device=DEVICE)


@pytest.mark.gpu1
@pytest.mark.parametrize("fuse", [False, True])
def test_transformer_engine_models_on_one_gpu_train_as_without_units(fuse: bool) -> None:
    _assert_trains_as_without_units(1, fuse=fuse)


@pytest.mark.gpu2
@pytest.mark.parametrize("fuse", [False, True])
def test_transformer_engine_models_on_two_gpus_train_as_without_units(fuse: bool) -> None:
    _assert_trains_as_without_units(2, fuse=fuse)
