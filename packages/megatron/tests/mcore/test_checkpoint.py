"""A run that is saved and resumed on other ranks goes on as if it had never stopped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from resuming import (
    World,
    assert_equal,
    build,
    fill,
    load_and_save,
    make,
    on_rank_zero,
    read,
    save_random,
    sharded_chunks,
    train,
)
from torch.distributed.device_mesh import init_device_mesh

from lamella_engine import DDP, HFSDP, HSDP, ZERO1, ZERO2, ZERO3, ShardingOptions, fully_shard
from lamella_megatron import fully_shard_model, load_checkpoint, save_checkpoint
from lamella_testing import run_ranks

Stages = list[tuple[Any, Any]]
"""The stage of all parameters, and the stage of experts or None."""


def _begin(world: World, kind: str, path: Path) -> list[float]:
    """Train, save, and train on: the run that never stopped."""
    chunks, optimizer = sharded_chunks(world, kind)
    train(chunks, optimizer)
    save_checkpoint(path / "saved", model=chunks, optimizer=optimizer, iteration=2)
    losses = train(chunks, optimizer)
    save_checkpoint(path / "went on", model=chunks, optimizer=optimizer, iteration=4)
    return losses


def _resume(world: World, kind: str, path: Path) -> list[float]:
    chunks, optimizer = sharded_chunks(world, kind, seed=7)
    extra = load_checkpoint(path / "saved", model=chunks, optimizer=optimizer)
    assert extra["iteration"] == 2
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    losses = train(chunks, optimizer)
    save_checkpoint(path / f"resumed {world}", model=chunks, optimizer=optimizer, iteration=4)
    return losses


RESUMED = [
    ("dense", World(4, tp=2), [World(2, tp=2)]),
    ("gated", World(4, tp=2), [World(2), World(4, tp=4)]),
    ("experts", World(4, tp=2, ep=2, etp=1), [World(2), World(4, ep=4)]),
    ("tied", World(4, pp=2), [World(2), World(2, pp=2)]),
]
FURTHER_RESUMED = [
    ("gated", World(4, pp=2), [World(4, tp=2, pp=2)]),
    ("tied", World(2), [World(4, pp=2)]),
    ("dense", World(4, tp=2), [World(2), World(1)]),
    ("dense", World(1), [World(4, tp=2), World(4, tp=4)]),
    ("gated", World(4, tp=2), [World(4)]),
    ("tied", World(4, tp=2), [World(2)]),
    ("biases", World(4, tp=2), [World(2)]),
    ("gated", World(4, pp=2), [World(2)]),
    # On two stages gloo would mix up the interleaved schedule's messages to the next and to the last stage.
    ("eight", World(4, pp=4, vp=2), [World(4, pp=4, vp=2), World(2)]),
]


@pytest.mark.parametrize(
    ("kind", "first", "others"),
    [*RESUMED, *(pytest.param(*case, marks=pytest.mark.slow) for case in FURTHER_RESUMED)],
    ids=str,
)
def test_megatron_runs_resumed_on_other_ranks_go_on_as_uninterrupted(
    tmp_path: Path, kind: str, first: World, others: list[World]
) -> None:
    losses = on_rank_zero(first, _begin, kind, tmp_path)
    expected = read(tmp_path / "went on")
    assert any(name.endswith("exp_avg_sq") for name in expected)
    for world in others:
        torch.testing.assert_close(on_rank_zero(world, _resume, kind, tmp_path), losses, rtol=1e-6, atol=1e-6)
        assert_equal(read(tmp_path / f"resumed {world}"), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "worlds"),
    [
        pytest.param("gated", [World(4, tp=2), World(4, tp=4), World(3)], marks=pytest.mark.slow),
        pytest.param("mtp", [World(4, tp=2), World(1)], marks=pytest.mark.slow),
        pytest.param("hybrid", [World(4, tp=2), World(1), World(4, tp=4)], marks=pytest.mark.slow),
        ("experts", [World(4, tp=2, ep=2, etp=2), World(2, ep=2), World(4, tp=2, ep=2, etp=1), World(1)]),
        ("offsets", [World(2, tp=2), World(2, tp=2), World(4, tp=4), World(1)]),
    ],
    ids=str,
)
def test_every_element_survives_any_change_of_ranks(tmp_path: Path, kind: str, worlds: list[World]) -> None:
    parts = run_ranks(save_random, worlds[0].num_ranks, worlds[0], kind, tmp_path / "0")
    expected = read(tmp_path / "0")
    for name, (part, dim) in parts[0].items():
        full_tensor = (
            part if dim is None else torch.cat([rank_parts[name][0] for rank_parts in parts[: worlds[0].tp]], dim)
        )
        name = name.replace("decoder.final_norm.", "decoder.final_layernorm.")
        assert torch.equal(expected[f"model.{name}"], full_tensor), name
    for index, world in enumerate(worlds[1:]):
        on_rank_zero(world, load_and_save, kind, tmp_path / f"{index}", tmp_path / f"{index + 1}")
        assert_equal(read(tmp_path / f"{index + 1}"), expected)


def _save_in_stages(world: World, kind: str, path: Path, stages: Stages) -> None:
    """Save from each stage in a directory of the stage's number, and once more from what was loaded."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    for number, (stage, expert_stage) in enumerate(stages):
        model = build(world, kind, seed=0) if number else make(world, kind)
        fill(model)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        fully_shard_model(model, groups=groups, options=ShardingOptions(placements=stage), expert_stage=expert_stage)
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.sin(100 * parameter.detach())
        optimizer.step()
        saved = path / f"{number}"
        save_checkpoint(saved / "0", model=model, optimizer=optimizer, groups=groups)
        for slots in optimizer.state.values():
            slots["exp_avg"].zero_()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        load_checkpoint(saved / "0", model=model, optimizer=optimizer, groups=groups)
        save_checkpoint(saved / "1", model=model, optimizer=optimizer, groups=groups)


@pytest.mark.parametrize(
    ("kind", "world", "stages"),
    [
        ("experts", World(4, tp=2, ep=2, etp=1), [(DDP, None), (ZERO2, None)]),
        pytest.param("experts", World(4, tp=2, ep=2, etp=1), [(ZERO1, None), (ZERO3, DDP)], marks=pytest.mark.slow),
        ("gated", World(4, instances=2), [((HFSDP, ZERO3), None), ((HSDP, ZERO1), None)]),
        pytest.param("gated", World(8, tp=2, instances=2), [((HFSDP, ZERO3), None)], marks=pytest.mark.slow),
        ("experts", World(4, ep=2, instances=2), [((HFSDP, ZERO3), None), ((HSDP, ZERO1), (HFSDP, ZERO3))]),
        pytest.param(
            *("experts", World(8, ep=2, etp=2, instances=2), [((HSDP, ZERO1), (HFSDP, ZERO3))]),
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_every_zero_stage_saves_and_loads_the_checkpoint_of_full_sharding(
    tmp_path: Path, kind: str, world: World, stages: Stages
) -> None:
    """Of all parameters, and of experts in a stage of their own."""
    on_rank_zero(world, _save_in_stages, kind, tmp_path, stages)
    one_instance = replace(world, num_ranks=world.num_ranks // world.instances, instances=1)
    on_rank_zero(one_instance, save_random, kind, tmp_path / "full")
    expected = read(tmp_path / "full")
    for number in range(len(stages)):
        for saved in ("0", "1"):
            assert_equal(read(tmp_path / f"{number}" / saved), expected)


def _save_replicated(world: World, kind: str, path: Path) -> None:
    model = make(world, kind)
    fill(model)
    rank, num = dist.get_rank(), world.num_ranks // world.tp  # Tensor-parallel ranks are neighbours.
    grid = torch.arange(world.num_ranks).view(2, num // 2, world.tp)
    mesh = init_device_mesh("cpu", tuple(grid.shape), mesh_dim_names=("replicate", "shard", "tensor"))
    assert mesh.get_local_rank("tensor") == rank % world.tp
    fully_shard(model, mesh=mesh["replicate", "shard"])
    save_checkpoint(path, model=model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    load_checkpoint(path, model=model)
    save_checkpoint(path.with_name("again"), model=model)


def _save_filled(world: World, kind: str, path: Path) -> None:
    model = make(world, kind)
    fill(model)
    save_checkpoint(path, model=fully_shard_model(model))


def test_parameters_replicated_between_instances_are_saved_once(tmp_path: Path) -> None:
    on_rank_zero(World(8, tp=2), _save_replicated, "gated", tmp_path / "0")
    on_rank_zero(World(2, tp=2), _save_filled, "gated", tmp_path / "1")
    for name in ("0", "again"):
        assert_equal(read(tmp_path / name), read(tmp_path / "1"))
