"""Muon over shards of megatron-core's models: whole matrices on one rank each, AdamW for all other parameters."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from muon_runs import (
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
def _on_one_data_parallel_rank(kind: str, tp: int, is_split: bool) -> list[Weights]:
    """Three steps of torch's Muon and AdamW over plain parameters, by tensor-parallel rank."""

    def on_each_rank() -> Weights:
        from lamella_megatron._driver.muon import is_matrix
        from lamella_optim import MuonAndAdam

        model: Any = made(kind, Layout(num_ranks=tp, tp=tp))
        heads, groups, width = (
            getattr(model.config, name) for name in ("num_attention_heads", "num_query_groups", "kv_channels")
        )
        rows = heads // groups * width, width, width
        fused = {p: rows for name, p in model.named_parameters() if is_split and name.endswith("linear_qkv.weight")}
        muon = {"lr": 0.02, "weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"}
        adam = {"lr": 0.02, "weight_decay": 0.0, "betas": (0.9, 0.999), "eps": 1e-3}
        optimizer = MuonAndAdam(
            [{"params": list(model.parameters())}], is_matrix=is_matrix, muon=muon, adam=adam, fused=fused
        )
        for _ in range(NUM_STEPS):
            optimizer.zero_grad()
            token_losses(model, BATCH).mean().backward()  # type: ignore[no-untyped-call]
            if tp == 1:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        return {name: parameter.detach() for name, parameter in model.named_parameters()}

    return run_ranks(on_each_rank, tp)


@pytest.mark.parametrize(
    ("kind", "layout", "is_split"),
    [
        ("gpt", Layout(num_ranks=2), True),
        pytest.param("gpt", Layout(num_ranks=2), False, marks=pytest.mark.slow),
        ("gpt", Layout(num_ranks=4, tp=2), True),
        pytest.param("moe", Layout(num_ranks=2), True, marks=pytest.mark.slow),
        ("moe", Layout(num_ranks=2, ep=2), False),
    ],
    ids=str,
)
def test_shards_take_the_steps_of_whole_matrices(kind: str, layout: Layout, is_split: bool) -> None:
    """In every stage, and with matrices cut over ranks."""
    expected = _on_one_data_parallel_rank(kind, layout.tp, is_split)

    def on_each_rank() -> None:
        from megatron.core import parallel_state

        from lamella_megatron.training import sharded_optimizer

        for stage, for_muon in [*((stage, True) for stage in STAGES), ("ZeRO-3", False)]:
            model = wrapped(kind, layout, stage, for_muon=for_muon)
            config = muon_config(clip_grad=0.5 if layout.tp == 1 else 0.0, muon_split_qkv=is_split)
            optimizer = sharded_optimizer(config, [model])
            train(model, optimizer)
            alone = expected[parallel_state.get_tensor_model_parallel_rank()]
            for name, parameter in model.module.named_parameters():
                expected_weight = alone[name] if layout.tp > 1 else own_part(name, parameter, alone)
                message = f"{stage}, {for_muon=}: {name}"
                torch.testing.assert_close(whole_of(parameter), expected_weight, rtol=1e-5, atol=1e-6, msg=message)
            parallel_state.destroy_model_parallel()

    run_ranks(on_each_rank, layout.num_ranks)


def test_queries_keys_and_values_are_matrices_of_their_own() -> None:
    from lamella_megatron._driver.muon import is_matrix
    from lamella_optim import MuonAndAdam

    rows, num_groups = (4, 2, 3), 3
    generator = torch.Generator().manual_seed(0)
    fused = nn.Parameter(torch.randn(num_groups * sum(rows), 6, generator=generator))
    numbers = torch.split(torch.arange(len(fused)).view(num_groups, sum(rows)), list(rows), 1)
    apart = [nn.Parameter(fused.detach()[matrix_rows.flatten()]) for matrix_rows in numbers]
    muon: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    optimizer = MuonAndAdam([{"params": [fused]}], is_matrix=is_matrix, muon=muon, adam={}, fused={fused: rows})
    reference = torch.optim.Muon(apart, **muon)
    for _ in range(NUM_STEPS):
        fused.grad = torch.randn(fused.shape, generator=generator)
        for parameter, matrix_rows in zip(apart, numbers, strict=True):
            parameter.grad = fused.grad[matrix_rows.flatten()]
        optimizer.step()
        reference.step()  # type: ignore[no-untyped-call]
    for parameter, matrix_rows in zip(apart, numbers, strict=True):
        assert torch.equal(fused.detach()[matrix_rows.flatten()], parameter)
        assert torch.equal(
            optimizer.state[fused]["momentum_buffer"][matrix_rows.flatten()],
            reference.state[parameter]["momentum_buffer"],
        )


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
        ({"muon_extra_scale_factor": 1.0}, r"torch's scales, .* got \('spectral', 1.0\)"),
        ({"muon_scalar_optimizer": "lion"}, "`config.muon_scalar_optimizer` to be 'adam' for torch's Muon, got 'lion'"),
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


def test_a_fused_matrix_of_other_rows_than_the_config_says_is_refused() -> None:
    from lamella_megatron._driver.muon import muon_maker

    model_config = SimpleNamespace(num_attention_heads=4, num_query_groups=2, kv_channels=3, attention_output_gate=True)
    name, words = (
        "decoder.linear_qkv.weight",
        r"'decoder.linear_qkv.weight' to have 18 rows for each query group, got 12",
    )
    muon_maker(muon_config(), [(name, torch.zeros(36, 4))], 1, model_config)
    with pytest.raises(ValueError, match=words):
        muon_maker(muon_config(), [(name, torch.zeros(12, 4))], 1, model_config)
