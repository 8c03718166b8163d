"""Muon over shards of megatron-core's models: whole matrices on one rank each, AdamW for all other parameters."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from lamella_engine import DDP, ZERO1, ZERO3, ShardingOptions
from lamella_testing import run_ranks
from lamella_testing.megatron import NUM_EXPERTS, ddp_config, token_losses
from lamella_testing.megatron_parity import BATCH, Layout, Weights, make_model, own_part

if TYPE_CHECKING:
    from lamella_megatron.training import ShardedModel, ShardedOptimizer

NUM_STEPS = 3
STAGES = {"DDP": (DDP, "no_shard"), "ZeRO-1": (ZERO1, "optim"), "ZeRO-3": (ZERO3, "optim_grads_params")}


@pytest.fixture(scope="module", autouse=True)
def in_fp64(on_cpu: None) -> Iterator[None]:
    # torch multiplies in bf16, in which the sums of two ranks round to other numbers than a single rank's.
    with patch("torch.optim._muon._zeropower_via_newtonschulz", _orthogonal):
        yield


def _orthogonal(
    update: torch.Tensor, coefficients: tuple[float, float, float], num_steps: int, eps: float
) -> torch.Tensor:
    """torch's Newton-Schulz iteration, in fp64."""
    a, b, c = coefficients
    found = update.double() / update.double().norm().clamp(min=eps)
    for _ in range(num_steps):
        square = found @ found.T
        found = a * found + (b * square + c * square @ square) @ found
    return torch.as_tensor(found, dtype=update.dtype)


def _config(**fields: Any) -> Any:
    from megatron.core.optimizer import OptimizerConfig

    made = OptimizerConfig(optimizer="adam", lr=0.02, weight_decay=0.0, clip_grad=0.5, adam_eps=1e-3)
    torchs = {"optimizer": "muon", "muon_extra_scale_factor": 0.2, "muon_split_qkv": False, "muon_nesterov": True}
    for name, value in {**torchs, **fields}.items():
        setattr(made, name, value)  # The constructor asks for emerging_optimizers.
    return made


def _fill(model: nn.Module) -> None:
    """Weights of each parameter by its name, with the global numbers of experts."""
    from megatron.core import parallel_state

    first = NUM_EXPERTS // parallel_state.get_expert_model_parallel_world_size()
    first *= parallel_state.get_expert_model_parallel_rank()
    for name, parameter in model.named_parameters():
        whole = re.sub(r"local_experts\.(\d+)", lambda m: f"local_experts.{first + int(m[1])}", name)
        generator = torch.Generator().manual_seed(zlib.crc32(whole.encode()))
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.1, generator=generator)


@cache
def _on_one_data_parallel_rank(kind: str, tp: int) -> list[Weights]:
    """Three steps of torch's Muon and AdamW over plain parameters, by tensor-parallel rank."""

    def on_each_rank() -> Weights:
        from lamella_megatron._muon import MuonAndAdam

        model = _made(kind, Layout(num_ranks=tp, tp=tp))
        muon = {"lr": 0.02, "weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"}
        adam = {"lr": 0.02, "weight_decay": 0.0, "betas": (0.9, 0.999), "eps": 1e-3}
        optimizer = MuonAndAdam([{"params": list(model.parameters())}], muon=muon, adam=adam)
        for _ in range(NUM_STEPS):
            optimizer.zero_grad()
            token_losses(model, BATCH).mean().backward()  # type: ignore[no-untyped-call]
            if tp == 1:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        return {name: parameter.detach() for name, parameter in model.named_parameters()}

    return run_ranks(on_each_rank, tp)


def _made(kind: str, layout: Layout) -> nn.Module:
    model = make_model(kind, layout)
    _fill(model)
    return model


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    assert isinstance(parameter, DTensor)
    return parameter.full_tensor().detach()


def _wrapped(kind: str, layout: Layout, stage: str = "ZeRO-3") -> ShardedModel:
    from lamella_megatron.training import ShardedModel, keep_matrices

    placement, strategy = STAGES[stage]
    model: Any = _made(kind, layout)
    options = ShardingOptions(placements=placement, keep_together=keep_matrices)
    return ShardedModel(model.config, ddp_config(data_parallel_sharding_strategy=strategy), model, options=options)


def _train(model: ShardedModel, optimizer: ShardedOptimizer, num_steps: int = NUM_STEPS) -> None:
    from megatron.core import parallel_state

    rows = BATCH.chunk(parallel_state.get_data_parallel_world_size())[parallel_state.get_data_parallel_rank()]
    for _ in range(num_steps):
        optimizer.zero_grad()
        token_losses(model, rows).mean().backward()  # type: ignore[no-untyped-call]
        model.finish_grad_sync()
        success, norm, _ = optimizer.step()
        assert success
        assert norm is not None


@pytest.mark.skipif(torch.__version__ < "2.12", reason="the flat layout needs torch 2.12")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("gpt", Layout(num_ranks=2)),
        ("gpt", Layout(num_ranks=4, tp=2)),
        ("moe", Layout(num_ranks=2)),
        ("moe", Layout(num_ranks=2, ep=2)),
    ],
    ids=str,
)
def test_shards_take_the_steps_of_whole_matrices(kind: str, layout: Layout, stage: str) -> None:
    expected = _on_one_data_parallel_rank(kind, layout.tp)

    def on_each_rank() -> None:
        from megatron.core import parallel_state

        from lamella_megatron.training import sharded_optimizer

        model = _wrapped(kind, layout, stage)
        optimizer = sharded_optimizer(_config(clip_grad=0.5 if layout.tp == 1 else 0.0), [model])
        _train(model, optimizer)
        alone = expected[parallel_state.get_tensor_model_parallel_rank()]
        for name, parameter in model.module.named_parameters():
            wanted = alone[name] if layout.tp > 1 else own_part(name, parameter, alone)
            torch.testing.assert_close(_whole(parameter), wanted, rtol=1e-5, atol=1e-6, msg=name)

    run_ranks(on_each_rank, layout.num_ranks)


@pytest.mark.skipif(torch.__version__ < "2.12", reason="the flat layout needs torch 2.12")
def test_state_and_learning_rates_are_one_optimizers(tmp_path: Path) -> None:
    def on_each_rank() -> None:
        from lamella_megatron.training import sharded_optimizer

        weights = []
        model = _wrapped("gpt", Layout(num_ranks=2))
        optimizer = sharded_optimizer(_config(), [model])
        _train(model, optimizer, 1)
        saved, before = optimizer.state_dict(), {n: p.detach().clone() for n, p in model.named_parameters()}
        torch.save(saved, tmp_path / f"{dist.get_rank()}.pt")
        kinds = {name for state in optimizer.optimizer.state.values() for name in state}
        assert {"momentum_buffer", "exp_avg"} <= kinds
        for again in (False, True):
            if again:
                optimizer = sharded_optimizer(_config(), [model])
                optimizer.load_state_dict(torch.load(tmp_path / f"{dist.get_rank()}.pt", weights_only=False))
                with torch.no_grad():
                    for name, parameter in model.named_parameters():
                        parameter.copy_(before[name])
            _train(model, optimizer, 1)
            weights.append([_whole(p).clone() for p in model.parameters()])
        assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))
        for group in optimizer.param_groups:  # as a learning-rate schedule does
            group["lr"] = 0.0
        _train(model, optimizer, 1)
        assert all(torch.equal(_whole(p), other) for p, other in zip(model.parameters(), weights[1], strict=True))

    run_ranks(on_each_rank, 2)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, r"Expected whole matrices for Muon, got \d+ rows of \d+ for '.*weight'. .*keep_matrices"),
        ({"muon_extra_scale_factor": 1.0}, r"torch's scales, .* got \('spectral', 1.0\)"),
        ({"muon_split_qkv": True}, "`config.muon_split_qkv` to be False for torch's Muon, got True"),
    ],
)
def test_muon_that_torch_does_not_have_is_refused(fields: dict[str, Any], words: str) -> None:
    def on_each_rank() -> None:
        from lamella_megatron.training import ShardedModel, sharded_optimizer

        module: Any = _made("gpt", Layout(num_ranks=2))
        model = ShardedModel(module.config, ddp_config(), module)
        with pytest.raises(ValueError, match=words):
            sharded_optimizer(_config(**fields), [model])

    run_ranks(on_each_rank, 2)
