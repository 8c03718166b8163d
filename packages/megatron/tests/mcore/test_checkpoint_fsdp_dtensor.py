"""`fsdp_dtensor` goes from lamella to megatron-core, and from Megatron-Bridge to lamella."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from resuming import (
    World,
    adamw,
    assert_equal,
    build,
    fill,
    load_and_save,
    make,
    on_rank_zero,
    read,
    save_random,
    sharded,
    train,
)
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from lamella_checkpoint import CheckpointMismatch
from lamella_checkpoint.testing import read_tensor
from lamella_convert import MegatronOptions, convert, open_checkpoint
from lamella_engine import FSDPModule, MixedPrecisionPolicy
from lamella_megatron import fully_shard_model, load_checkpoint, save_checkpoint
from lamella_testing import run_ranks


class _FakeWrapper(nn.Module):
    """A wrapper of Megatron, by its name alone."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.config = module.config


def _ask_as_megatron_does(world: World, kind: str, path: Path) -> list[str]:
    """Fill what megatron-core's training asks a checkpoint for; the names of parts that differ from the model's."""
    fsdp = "megatron.core.distributed.fsdp.src.megatron_fsdp"
    checkpoints = importlib.import_module("megatron.core.transformer.fsdp_dtensor_checkpoint")
    as_shard = importlib.import_module(f"{fsdp}.param_and_grad_buffer").make_fsdp_dtensor
    mesh = init_device_mesh("cpu", (world.num_ranks // world.tp, world.tp), mesh_dim_names=("dp", "tp"))
    index = importlib.import_module(f"{fsdp}.utils").FSDPDistributedIndex(mesh, dp_shard_dim="dp", tp_dim="tp")
    model = make(world, kind, seed=3)
    wrapped = _FakeWrapper(_FakeWrapper(model))
    rank, num = mesh.get_local_rank("dp"), mesh.size(0)
    weights, slots = {}, {}
    for name, parameter in model.named_parameters():
        shard: Any = parameter
        rows, row = -(-len(parameter) // num), parameter[:1].numel()
        first, last = (min(rows * position, len(parameter)) for position in (rank, rank + 1))
        shard.megatron_fsdp_slice, shard.megatron_fsdp_dist_index = slice(first * row, last * row), index
        blank = [torch.full(((last - first) * row,), -1.0) for _ in range(3)]
        dtensors = [as_shard(tensor, parameter, dist_index=index, run_check=True) for tensor in blank]
        weights[f"module.{name}"] = dtensors[0]
        slots[f"module.module.module.{name}"] = {
            "exp_avg": dtensors[1], "exp_avg_sq": dtensors[2], "step": torch.tensor(-1.0),
        }  # fmt: skip
    asked: dict[str, Any] = {"args": None, "iteration": None, "checkpoint_version": None, "model": weights}
    asked["optimizer"] = {"state": slots}
    state = dict(asked)
    checkpoints.handle_fp8_extra_state_case(state["model"])
    if model.config.gated_linear_unit:  # type: ignore[union-attr]
        state["model"], state["optimizer"] = checkpoints.handle_swiglu_in_state_dict(
            wrapped, state["model"], state["optimizer"]
        )
    importlib.import_module(f"{fsdp}.uneven_dtensor").preprocess_state_dict_for_uneven_dtensor(state)
    dcp.load(state, checkpoint_id=path, planner=DefaultLoadPlanner(allow_partial_load=False))  # type: ignore[attr-defined]
    assert state["iteration"] == 2
    assert state["args"].hidden_size == 32

    mine = fully_shard_model(build(world, kind, seed=5))
    optimizer = adamw(mine)
    load_checkpoint(path, model=mine, optimizer=optimizer)
    wrong = []
    for name, parameter in mine.named_parameters():
        mapped = slots[f"module.module.module.{name}"]
        for slot, filled in {"": weights[f"module.{name}"], **mapped}.items():
            owner: Any = optimizer.state[parameter][slot] if slot else parameter
            local = owner.to_local() if isinstance(owner, DTensor) else owner
            got = filled.to_local() if isinstance(filled, DTensor) else filled
            if not torch.equal(got.reshape(-1), local.detach().reshape(-1)):
                wrong.append(f"{name} {slot}")
    return wrong


def _save_fsdp(world: World, kind: str, path: Path) -> None:
    model, optimizer = sharded(world, kind)
    train(model, optimizer)
    save_checkpoint(path, model=model, optimizer=optimizer, iteration=2)


@pytest.mark.filterwarnings("ignore::Warning")  # megatron-core and torch warn about what they do to themselves.
@pytest.mark.parametrize(
    ("kind", "first", "other"),
    [
        ("gated", World(4, tp=2), World(4, tp=2)),
        pytest.param("gated", World(1), World(4, tp=4), marks=pytest.mark.slow),
        pytest.param("biases", World(2), World(4, tp=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_megatron_core_opens_fsdp_dtensor(tmp_path: Path, kind: str, first: World, other: World) -> None:
    on_rank_zero(first, _save_fsdp, kind, tmp_path)
    assert run_ranks(_ask_as_megatron_does, other.num_ranks, other, kind, tmp_path) == [[]] * other.num_ranks


def test_a_conversion_to_another_tensor_parallel_size_equals_a_save_at_that_size(tmp_path: Path) -> None:
    """Mamba layers and gated delta nets are stored in the order of the tensor-parallel ranks."""
    on_rank_zero(World(2, tp=2), save_random, "hybrid", tmp_path / "two")
    run_ranks(load_and_save, 1, World(1), "hybrid", tmp_path / "two", tmp_path / "one")
    convert(tmp_path / "two", tmp_path / "made", to="fsdp_dtensor", megatron=MegatronOptions(tensor_parallel_size=1))
    saved, converted = open_checkpoint(tmp_path / "one").raw, open_checkpoint(tmp_path / "made").raw
    weights = [name for name in saved.tensors if name.startswith("model.")]
    assert weights and not set(weights) ^ {name for name in converted.tensors if name.startswith("model.")}
    for name in weights:
        assert read_tensor(converted, name).equal(read_tensor(saved, name)), name


GDN_ROWS = {"query": 16, "key": 16, "value": 32, "z": 32, "beta": 8, "alpha": 8}


def _by_component(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """A gated delta net's fused tensor of one tensor-parallel rank, by component."""
    if not name.endswith(("self_attention.in_proj.weight", "self_attention.conv1d.weight")):
        return {name: tensor}
    parts = list(GDN_ROWS)[: 3 if "conv1d" in name else 6]
    cut = tensor.split([GDN_ROWS[part] for part in parts])  # type: ignore[no-untyped-call]
    return {f"{name}.{part}": component for part, component in zip(parts, cut, strict=True)}


def _write_as_bridge_does(world: World, kind: str, path: Path) -> None:
    """A directory of Megatron-Bridge's, from Hugging Face's weights: no `args`, no optimizer; and lamella's own."""
    model = make(world, kind)
    fill(model)
    stored: dict[str, Any] = {"checkpoint_version": 3.0, "iteration": 1}
    for name, parameter in model.named_parameters():
        for part, tensor in _by_component(name, parameter.detach()).items():
            halves = {f"{part}_w": tensor.chunk(2)[0], f"{part}_v": tensor.chunk(2)[-1]}
            is_gated = "mlp" in part and "linear_fc1.weight" in part
            stored |= {
                f"model.module.{stored_name}": t for stored_name, t in (halves if is_gated else {part: tensor}).items()
            }
    directory = path / "iter_0000003"
    dcp.save(stored, checkpoint_id=directory)  # type: ignore[attr-defined]
    (directory / "run_config.yaml").write_text("model:\n  tensor_model_parallel_size: 1\n")
    for file in (directory / "train_state.pt", path / "latest_train_state.pt"):
        torch.save({"step": torch.tensor(3), "consumed_train_samples": torch.tensor(24)}, file)
    fully_shard_model(model)
    save_checkpoint(path / "0", model=model)


def _load_bridge(world: World, kind: str, path: Path) -> bool:
    model = fully_shard_model(
        make(world, kind, seed=7), mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    )
    extra = load_checkpoint(path, model=model)
    assert (extra["iteration"], extra["consumed_train_samples"]) == (3, 24)
    save_checkpoint(path / "1", model=model)
    unit: Any = next(module for module in model.modules() if isinstance(module, FSDPModule) and module is not model)
    main = {name: p.full_tensor() for name, p in unit.named_parameters() if isinstance(p, DTensor)}
    unit.unshard()
    return all(
        parameter.dtype is torch.bfloat16 and torch.equal(parameter, main[name].bfloat16())
        for name, parameter in unit.named_parameters()
    )


@pytest.mark.filterwarnings("ignore::Warning")  # torch warns about deprecated parts of its own.
@pytest.mark.parametrize(("kind", "world"), [("hybrid", World(4, tp=2)), ("experts", World(4, ep=2))], ids=str)
def test_bridges_checkpoint_fills_main_weights_at_full_precision(tmp_path: Path, kind: str, world: World) -> None:
    on_rank_zero(World(1), _write_as_bridge_does, kind, tmp_path)
    expected = read(tmp_path / "0")
    assert not all(torch.equal(tensor, tensor.bfloat16().float()) for tensor in expected.values())
    assert run_ranks(_load_bridge, world.num_ranks, world, kind, tmp_path) == [True] * world.num_ranks
    assert_equal(read(tmp_path / "1"), expected)


def _refused_optimizer(world: World, kind: str, path: Path) -> str:
    model, optimizer = sharded(world, kind, seed=7)
    with pytest.raises(CheckpointMismatch) as error:
        load_checkpoint(path, model=model, optimizer=optimizer)
    partial_load = load_checkpoint(path, model=model, optimizer=optimizer, strict=False)
    assert {name.partition(".")[0] for name in partial_load.left.missing} == {"optimizer"}
    assert not optimizer.state
    return str(error.value)


@pytest.mark.filterwarnings("ignore::Warning")  # torch warns about deprecated parts of its own.
def test_an_optimizer_that_a_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    on_rank_zero(World(1), _write_as_bridge_does, "gated", tmp_path)
    message = on_rank_zero(World(2, tp=2), _refused_optimizer, "gated", tmp_path)
    assert "optimizer.param_groups.embedding.word_embeddings.weight: absent from the checkpoint" in message
