"""Scales and past amaxes of delayed scaling, of weights and of layers, go on from a checkpoint, equal to the bit."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
from resuming import World, adamw, make_chunks, train
from torch import nn

from lamella_engine import MixedPrecisionPolicy, local_scaling_state
from lamella_megatron import fully_shard_model, load_checkpoint, save_checkpoint
from lamella_precision import Float8Recipe, matrices_of
from lamella_testing import run_ranks

NUM_PAST = 3
FP32 = torch.float32
Format = Literal["fsdp_dtensor", "torch_dist"]


def _add_scaling(layer: Any) -> None:
    """Attributes and a function of Transformer Engine's layers with delayed scaling, before their first forward."""

    def init(recipe: Any) -> None:
        for key, num_tensors in (("scaling_fwd", 3), ("scaling_bwd", 2)):
            num = num_tensors * layer.fp8_meta["num_gemms"]
            layer.fp8_meta[key] = SimpleNamespace(
                scale=torch.ones(num), amax_history=torch.zeros(recipe.amax_history_len, num)
            )
        layer.fp8_meta_tensors_initialized = True

    layer.fp8_meta, layer.fp8_meta_tensors_initialized, layer.init_fp8_meta_tensors = {}, False, init


def _layers(chunks: list[nn.Module]) -> Iterator[tuple[str, Any]]:
    for chunk in chunks:
        yield from ((name, module) for name, module in chunk.named_modules() if hasattr(module, "fp8_meta"))


def _chunks(world: World, *, seed: int = 0, num_past: int = NUM_PAST) -> tuple[list[nn.Module], torch.optim.Optimizer]:
    chunks = make_chunks(world, "experts" if world.ep > 1 else "dense", seed)
    for chunk in chunks:
        recipe = matrices_of(chunk, Float8Recipe(num_past_amaxes=num_past, compute_dtype=FP32))
        fully_shard_model(chunk, mp_policy=MixedPrecisionPolicy(FP32, recipe=recipe))
        for layer in chunk.decoder.layers:  # type: ignore[union-attr]
            layer.config.fp8, layer.config.fp8_recipe = "hybrid", "delayed"
            _add_scaling(layer.self_attention.linear_proj)
    return chunks, adamw(*chunks)


def _scale_layers(chunks: list[nn.Module]) -> None:
    """A first forward and further steps of the layers: numbers of their own on ranks with other parts."""
    for name, layer in _layers(chunks):
        layer.fp8_meta["num_gemms"] = 1
        layer.init_fp8_meta_tensors(SimpleNamespace(amax_history_len=NUM_PAST))
        seed = torch.Generator().manual_seed(len(name) + 17 * _place())
        for scaling in (layer.fp8_meta["scaling_fwd"], layer.fp8_meta["scaling_bwd"]):
            scaling.scale.copy_(torch.rand(scaling.scale.shape, generator=seed))
            scaling.amax_history.copy_(torch.rand(scaling.amax_history.shape, generator=seed))


def _place() -> int:
    state = importlib.import_module("megatron.core.parallel_state")
    return int(state.get_tensor_model_parallel_rank() + 4 * state.get_pipeline_model_parallel_rank())


def _states(chunks: list[nn.Module]) -> dict[str, list[list[float]]]:
    """All scales and past amaxes of this rank."""
    states = {name: rows for i, chunk in enumerate(chunks) for name, rows in local_scaling_state(chunk).items()}
    for name, layer in _layers(chunks):
        for key in ("scaling_fwd", "scaling_bwd"):
            scaling = layer.fp8_meta[key]
            states[f"{name}.{key}"] = [scaling.scale.tolist(), *scaling.amax_history.tolist()]
    return states


def _save(world: World, path: Path, file_format: Format) -> tuple[dict[str, Any], list[float]]:
    chunks, optimizer = _chunks(world)
    train(chunks, optimizer)
    _scale_layers(chunks)
    save_checkpoint(path, model=chunks, optimizer=optimizer, format=file_format, iteration=2)
    return _states(chunks), train(chunks, optimizer)


def _load(world: World, path: Path) -> tuple[dict[str, Any], list[float]]:
    chunks, optimizer = _chunks(world, seed=7)
    extra = load_checkpoint(path, model=chunks, optimizer=optimizer)
    assert not any("scaling" in name for name in extra), "the state is no entry for the caller"
    return _states(chunks), train(chunks, optimizer)


@pytest.fixture(autouse=True)
def _recipe() -> Iterator[None]:
    """megatron-core's function asks Transformer Engine for the recipe."""
    utils = importlib.import_module("megatron.core.fp8_utils")
    with patch.object(utils, "get_fp8_recipe", lambda _: SimpleNamespace(amax_history_len=NUM_PAST)):
        yield


@pytest.mark.parametrize("file_format", ["fsdp_dtensor", "torch_dist"])
@pytest.mark.parametrize("world", [World(4, tp=2, ep=2, etp=1), World(2, pp=2)], ids=str)
def test_scales_after_a_resume_equal_to_the_bit(tmp_path: Path, world: World, file_format: Format) -> None:
    saved = run_ranks(_save, world.num_ranks, world, tmp_path / "saved", file_format)
    resumed = run_ranks(_load, world.num_ranks, world, tmp_path / "saved")
    for (state, losses), (resumed_state, resumed_losses) in zip(saved, resumed, strict=True):
        assert any(rows[0] != [1.0] and rows[2][0] > 0 for rows in state.values()), "measured twice"
        assert resumed_state == state
        assert resumed_losses == losses


def test_on_other_tensor_parallel_ranks_and_with_a_longer_past_scales_start_anew(tmp_path: Path) -> None:
    run_ranks(_save, 2, World(2, tp=2), tmp_path / "saved", "fsdp_dtensor")

    def resume(world: World, num_past: int) -> None:
        chunks, _ = _chunks(world, num_past=num_past)
        with pytest.warns(
            UserWarning, match=r"'embedding.word_embeddings.weight' in the checkpoint .* start anew. Resume on as many"
        ):
            load_checkpoint(tmp_path / "saved", model=chunks)
        state = local_scaling_state(chunks[0])
        assert state
        assert all(row == [-1.0] for rows in state.values() for row in rows[1:])

    run_ranks(resume, 1, World(1), NUM_PAST)
    run_ranks(resume, 2, World(2, tp=2), NUM_PAST + 1)
