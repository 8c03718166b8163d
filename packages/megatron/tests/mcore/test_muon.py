"""Muon over shards of megatron-core's models: whole matrices on one rank each, AdamW for all other parameters."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from muon_runs import (
    NEEDS_FLAT_LAYOUT,
    NUM_STEPS,
    STAGES,
    made,
    muon_config,
    products_in_fp64,
    train,
    whole_of,
    wrapped,
)
from torch import nn

from lamella_testing import run_ranks
from lamella_testing.megatron import ddp_config, token_losses
from lamella_testing.megatron_parity import BATCH, Layout, Weights, own_part


@pytest.fixture(scope="module", autouse=True)
def in_fp64(on_cpu: None) -> Iterator[None]:
    with products_in_fp64():
        yield


@cache
def _on_one_data_parallel_rank(kind: str, tp: int) -> list[Weights]:
    """Three steps of torch's Muon and AdamW over plain parameters, by tensor-parallel rank."""

    def on_each_rank() -> Weights:
        from lamella_megatron._muon import MuonAndAdam

        model = made(kind, Layout(num_ranks=tp, tp=tp))
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


@NEEDS_FLAT_LAYOUT
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

        model = wrapped(kind, layout, stage)
        optimizer = sharded_optimizer(muon_config(clip_grad=0.5 if layout.tp == 1 else 0.0), [model])
        train(model, optimizer)
        alone = expected[parallel_state.get_tensor_model_parallel_rank()]
        for name, parameter in model.module.named_parameters():
            wanted = alone[name] if layout.tp > 1 else own_part(name, parameter, alone)
            torch.testing.assert_close(whole_of(parameter), wanted, rtol=1e-5, atol=1e-6, msg=name)

    run_ranks(on_each_rank, layout.num_ranks)


@NEEDS_FLAT_LAYOUT
def test_state_and_learning_rates_are_one_optimizers(tmp_path: Path) -> None:
    def on_each_rank() -> None:
        from lamella_megatron.training import sharded_optimizer

        weights = []
        model = wrapped("gpt", Layout(num_ranks=2))
        optimizer = sharded_optimizer(muon_config(), [model])
        train(model, optimizer, 1)
        saved, before = optimizer.state_dict(), {n: p.detach().clone() for n, p in model.named_parameters()}
        torch.save(saved, tmp_path / f"{dist.get_rank()}.pt")
        kinds = {name for state in optimizer.optimizer.state.values() for name in state}
        assert {"momentum_buffer", "exp_avg"} <= kinds
        for again in (False, True):
            if again:
                optimizer = sharded_optimizer(muon_config(), [model])
                optimizer.load_state_dict(torch.load(tmp_path / f"{dist.get_rank()}.pt", weights_only=False))
                with torch.no_grad():
                    for name, parameter in model.named_parameters():
                        parameter.copy_(before[name])
            train(model, optimizer, 1)
            weights.append([whole_of(p).clone() for p in model.parameters()])
        assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))
        copied = copy.deepcopy(optimizer.optimizer)
        assert all(part.state is copied.state for part in copied.parts)
        assert all(group in copied.param_groups for part in copied.parts for group in part.param_groups)
        for group in optimizer.param_groups:  # as a learning-rate schedule does
            group["lr"] = 0.0
        train(model, optimizer, 1)
        assert all(torch.equal(whole_of(p), other) for p, other in zip(model.parameters(), weights[1], strict=True))

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

        module: Any = made("gpt", Layout(num_ranks=2))
        model = ShardedModel(module.config, ddp_config(), module)
        with pytest.raises(ValueError, match=words):
            sharded_optimizer(muon_config(**fields), [model])

    run_ranks(on_each_rank, 2)
