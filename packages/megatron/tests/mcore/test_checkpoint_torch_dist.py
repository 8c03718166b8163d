"""`torch_dist` goes from lamella to megatron-core and back."""

from __future__ import annotations

import functools
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from resuming import (
    World,
    assert_equal,
    build,
    fill,
    make,
    on_rank_zero,
    read,
    sharded,
)
from torch.distributed.tensor import DTensor

from lamella_megatron import fully_shard_model, load_checkpoint, save_checkpoint
from lamella_testing import run_ranks
from lamella_testing.megatron import ddp_config


class _OptimizerWrapper:
    """As megatron-core's around an optimizer."""


def _save_both(world: World, kind: str, path: Path) -> None:
    from lamella_megatron.training import ShardedModel

    model: Any = make(world, kind)
    fill(model)
    fully_shard_model(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.sin(100 * parameter.detach())
    optimizer.step()
    save_checkpoint(path / "fsdp", model=model, optimizer=optimizer)
    wrapped = ShardedModel(model.config, ddp_config(), model)
    save_checkpoint(path / "dist", model=wrapped, optimizer=optimizer, format="torch_dist", iteration=5)
    with pytest.raises(TypeError, match=r"got _OptimizerWrapper. Pass `optimizer\.optimizer`"):
        save_checkpoint(path / "other", model=wrapped, optimizer=_OptimizerWrapper())  # type: ignore[call-overload]


def _megatrons_own(world: World, kind: str, path: Path) -> bool:
    """megatron-core loads into a plain model, and lamella into a sharded one: the same parts."""
    from megatron.core import dist_checkpointing, parallel_state

    plain = make(world, kind, seed=3)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state = {"model": plain.sharded_state_dict(metadata={"dp_cp_group": group})}  # type: ignore[operator]
    loaded = dist_checkpointing.load(state, str(path / "dist"), strict="raise_unexpected")
    assert loaded["iteration"] == 5
    assert loaded["args"].hidden_size == 32
    plain.load_state_dict(loaded["model"], strict=False)
    model = fully_shard_model(build(world, kind, seed=5))
    load_checkpoint(path / "fsdp", model=model)
    for (name, mine), plain_parameter in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(mine, DTensor)
        assert torch.equal(mine.full_tensor(), plain_parameter), name
    return True


@pytest.mark.filterwarnings("ignore::Warning")  # megatron-core and torch warn about their own code
@pytest.mark.parametrize(
    ("kind", "first", "others"),
    [
        ("gated", World(4, tp=2), [World(2, tp=2), World(2, pp=2)]),
        pytest.param("gated", World(4, tp=2), [World(1)], marks=pytest.mark.slow),
        ("tied", World(4, pp=2), [World(1), World(2, pp=2)]),
        pytest.param("tied", World(2, tp=2), [World(1), World(2, tp=2)], marks=pytest.mark.slow),
        pytest.param("biases", World(4, tp=2), [World(1), World(2, tp=2)], marks=pytest.mark.slow),
        ("experts", World(4, tp=2, ep=2, etp=1), [World(1), World(2, ep=2), World(4, tp=2, ep=2, etp=2)]),
        ("offsets", World(4, tp=2), [World(1), World(2, tp=2), World(4, tp=4)]),
    ],
    ids=str,
)
def test_megatron_core_opens_torch_dist(tmp_path: Path, kind: str, first: World, others: list[World]) -> None:
    on_rank_zero(first, _save_both, kind, tmp_path)
    for world in others:
        assert run_ranks(_megatrons_own, world.num_ranks, world, kind, tmp_path) == [True] * world.num_ranks


def _save_by_megatron(world: World, kind: str, path: Path) -> None:
    from megatron.core import dist_checkpointing, parallel_state

    model = make(world, kind)
    fill(model)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state = model.sharded_state_dict(metadata={"dp_cp_group": group})  # type: ignore[operator]
    args = Namespace(tensor_model_parallel_size=world.tp)
    (path / "dist").mkdir(exist_ok=True)
    dist_checkpointing.save({"model": state, "iteration": 12, "args": args}, str(path / "dist"))
    fully_shard_model(model)
    save_checkpoint(path / "0", model=model)


def _load_torch_dist(world: World, kind: str, path: Path, *, optimizer: bool) -> None:
    model, mine = sharded(world, kind, seed=7)
    extra = load_checkpoint(path / "dist", model=model, optimizer=mine if optimizer else None)
    assert extra["iteration"] in (5, 12)
    save_checkpoint(path / "1", model=model, optimizer=mine if optimizer else None)


@pytest.mark.filterwarnings("ignore::Warning")  # megatron-core and torch warn about their own code
@pytest.mark.parametrize(
    ("kind", "first", "other"),
    [
        ("gated", World(2, tp=2), World(4, tp=4)),
        pytest.param("biases", World(2, tp=2), World(3), marks=pytest.mark.slow),
        ("hybrid", World(2, tp=2), World(4, tp=4)),
        pytest.param("mtp", World(2, tp=2), World(2), marks=pytest.mark.slow),
        ("experts", World(4, tp=2, ep=2, etp=1), World(2)),
        ("offsets", World(2, tp=2), World(2, tp=2)),
        ("offsets", World(2, tp=2), World(4, tp=4)),
    ],
    ids=str,
)
def test_torch_dist_of_megatron_core_is_loaded(tmp_path: Path, kind: str, first: World, other: World) -> None:
    run_ranks(_save_by_megatron, first.num_ranks, first, kind, tmp_path)
    on_rank_zero(other, functools.partial(_load_torch_dist, optimizer=False), kind, tmp_path)
    assert_equal(read(tmp_path / "1"), read(tmp_path / "0"))


@pytest.mark.parametrize(
    "kind", [pytest.param("gated", marks=pytest.mark.slow), "experts", pytest.param("hybrid", marks=pytest.mark.slow)]
)
def test_torch_dist_brings_the_optimizers_state_back(tmp_path: Path, kind: str) -> None:
    on_rank_zero(World(4, tp=2, ep=2 if kind == "experts" else 1, etp=1), _save_both, kind, tmp_path)
    on_rank_zero(World(2), functools.partial(_load_torch_dist, optimizer=True), kind, tmp_path)
    restored = read(tmp_path / "1")
    assert any(name.endswith("exp_avg_sq") for name in restored)
    assert_equal(restored, read(tmp_path / "fsdp"))


def _save_main_weights(world: World, kind: str, path: Path) -> dict[str, torch.Tensor]:
    """A bf16 model, and the distributed optimizer's fp32 weights, written by megatron-core."""
    from megatron.core import dist_checkpointing, parallel_state

    model = make(world, kind)
    fill(model)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    exact = {f"model.{name}": parameter.detach().clone() for name, parameter in model.named_parameters()}
    sharded_tensors = model.sharded_state_dict(metadata={"dp_cp_group": group})  # type: ignore[operator]
    sharded_tensors = {
        name: sharded_tensor
        for name, sharded_tensor in sharded_tensors.items()
        if isinstance(sharded_tensor.data, torch.Tensor)
    }
    main = {
        name: replace(sharded_tensor, key=f"optimizer.state.fp32_param.{sharded_tensor.key}")
        for name, sharded_tensor in sharded_tensors.items()
    }
    rounded = {
        name: replace(sharded_tensor, data=sharded_tensor.data.bfloat16())
        for name, sharded_tensor in sharded_tensors.items()
        if hasattr(sharded_tensor, "build_fn")
    }
    rounded |= {
        name: replace(sharded_tensor, data=sharded_tensor.data.bfloat16(), dtype=torch.bfloat16)
        for name, sharded_tensor in sharded_tensors.items()
        if name not in rounded
    }
    (path / "dist").mkdir()
    dist_checkpointing.save({"model": rounded, "optimizer": main, "iteration": 12}, str(path / "dist"))
    return exact


@pytest.mark.filterwarnings("ignore::Warning")  # megatron-core and torch warn about their own code
def test_main_weights_of_torch_dist_are_the_models(tmp_path: Path) -> None:
    expected = on_rank_zero(World(1), _save_main_weights, "gated", tmp_path)
    on_rank_zero(World(4, tp=2), functools.partial(_load_torch_dist, optimizer=False), "gated", tmp_path)
    assert_equal(read(tmp_path / "1"), expected)
