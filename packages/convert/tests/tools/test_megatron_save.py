"""Live models are written in Megatron's formats by their ranks, without a gather and without Megatron."""

import json
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from lamella_checkpoint import AsyncSaver, CheckpointFailed, Wanted
from lamella_convert import StoredPart, open_checkpoint, open_megatron, save_fsdp_dtensor, save_torch_dist
from lamella_layout import Chunk
from lamella_testing import run_ranks
from lamella_testing.forked_writers import started_writers

LAYER = "decoder.layers.0."
FC1, FC2, NORM = f"{LAYER}mlp.linear_fc1.weight", f"{LAYER}mlp.linear_fc2.weight", f"{LAYER}input_layernorm.weight"
IN_PROJ = f"{LAYER}self_attention.in_proj.weight"
SIZES = {"tp": 2, "qk": 4, "v": 8, "nvh": 4}
ARGS = Namespace(
    tensor_model_parallel_size=2,
    linear_num_key_heads=2,
    linear_key_head_dim=2,
    linear_num_value_heads=4,
    linear_value_head_dim=2,
)
WHOLE = {
    FC1: torch.arange(16.0).view(8, 2),
    FC2: torch.arange(100.0, 108.0).view(2, 4),
    NORM: torch.arange(4.0),
    IN_PROJ: torch.arange(200.0, 232.0).view(32, 1),
}
DIMS = {FC1: 0, FC2: 1, IN_PROJ: 0}


def local_part(name: str, *, dp: int, tp: int) -> torch.Tensor:
    tensor = WHOLE[name]
    part = tensor.chunk(2, DIMS[name])[tp] if name in DIMS else tensor
    return part.chunk(2)[dp].clone()


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Two data-parallel by two tensor-parallel ranks, cut by the latter first, after a step with known moments."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mesh._shard_order = [1, 0]  # type: ignore[attr-defined]
    dp, tp = divmod(dist.get_rank(), 2)
    model = nn.Module()
    for name, tensor in WHOLE.items():
        *path, last = name.split(".")
        module = model
        for module_name in path:
            if not hasattr(module, module_name):
                module.add_module(module_name, nn.Module())
            module = getattr(module, module_name)
        placements = [Shard(0), Shard(DIMS[name]) if name in DIMS else Replicate()]
        local = DTensor.from_local(
            local_part(name, dp=dp, tp=tp),
            mesh,
            placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
        module.register_parameter(last, nn.Parameter(local))
    optimizer = torch.optim.AdamW([{"params": list(model.parameters()), "lr": 0.25}])
    for parameter in model.parameters():
        moments = {slot: parameter.detach() * factor for slot, factor in {"exp_avg": 2, "exp_avg_sq": 3}.items()}
        optimizer.state[parameter] = {**moments, "step": torch.tensor(5.0)}
    return model, optimizer


def read_all(path: Path) -> dict[str, torch.Tensor]:
    source = open_checkpoint(path)
    tensors = {name: torch.full(info.shape, -1.0) for name, info in source.tensors.items()}
    source.read([Wanted(name, Chunk((0,) * into.ndim, tuple(into.shape)), into) for name, into in tensors.items()])
    return tensors


def canonical(name: str, factor: float = 1.0) -> dict[str, torch.Tensor]:
    tensor = WHOLE[name] * factor
    halves = tensor.chunk(2)
    if name == FC1:
        return {name: torch.cat([*(halve[:2] for halve in halves), *(halve[2:] for halve in halves)])}
    if name == IN_PROJ:
        parts = dict(zip(("query", "key", "value", "z", "beta", "alpha"), (2, 2, 4, 4, 2, 2), strict=True))
        cuts = [halve.split(list(parts.values())) for halve in halves]  # type: ignore[no-untyped-call]
        return {f"{name}.{part}": torch.cat([cut[index] for cut in cuts]) for index, part in enumerate(parts)}
    return {name: tensor}


def save_as_fsdp_dtensor(path: Path) -> None:
    model, optimizer = make()
    objects = {"args": ARGS, "iteration": 7, "checkpoint_version": 3.0, "opt_param_scheduler": {"num_steps": 9}}
    save_fsdp_dtensor(path, model=model, optimizer=optimizer, sizes=SIZES, objects=objects)


def test_ranks_write_fsdp_dtensor(tmp_path: Path) -> None:
    run_ranks(save_as_fsdp_dtensor, 4, tmp_path / "saved")
    opened = open_megatron(tmp_path / "saved")
    assert opened.counters.found == {"checkpoint_version": 3.0, "iteration": 7}
    assert opened.dialect is not None
    assert opened.dialect.name == "release-0.19"
    values = read_all(tmp_path / "saved")
    for name in WHOLE:
        for part, tensor in canonical(name).items():
            assert torch.equal(values[f"model.{part}"], tensor), part
        for slot, factor in {"exp_avg": 2, "exp_avg_sq": 3}.items():
            for part, tensor in canonical(name, factor).items():
                assert torch.equal(values[f"optimizer.state.{part}.{slot}"], tensor), (part, slot)
    assert opened.source.read_object(f"optimizer.param_groups.{IN_PROJ}.query.lr") == 0.25


def test_names_and_paths_are_megatrons(tmp_path: Path) -> None:
    run_ranks(save_as_fsdp_dtensor, 4, tmp_path / "saved")
    metadata = FileSystemReader(tmp_path / "saved").read_metadata()
    names = set(metadata.state_dict_metadata)
    inner = "module.module.module."
    assert {f"model.module.{FC1}_w", f"model.module.{IN_PROJ}", f"optimizer.state.{inner}{FC1}_v.exp_avg"} <= names
    # Options have the model's names, also where tensors are halves.
    assert f"optimizer.param_to_group_meta.{inner}{FC1}.lr" in names
    assert f"optimizer.param_to_group_meta.{inner}{FC1}_w.lr" not in names
    assert metadata.planner_data["opt_param_scheduler.num_steps"] == ("opt_param_scheduler", "num_steps")
    slot = f"optimizer.state.{inner}{FC2}.exp_avg"
    assert metadata.planner_data[slot] == ("optimizer", "state", f"{inner}{FC2}", "exp_avg")


def test_a_save_that_fails_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    run_ranks(save_as_fsdp_dtensor, 4, tmp_path / "saved")

    def fail() -> None:
        model, _ = make()
        sizes = SIZES if dist.get_rank() else {**SIZES, "tp": 3}
        with pytest.raises((ValueError, CheckpointFailed), match="divide by 'tp' \\(3\\)"):
            save_fsdp_dtensor(tmp_path / "saved", model=model, sizes=sizes)

    run_ranks(fail, 4)
    assert "optimizer.state." + NORM + ".exp_avg" in read_all(tmp_path / "saved")
    assert [file.name for file in tmp_path.iterdir()] == ["saved"]


def parts_of_rank() -> dict[str, list[StoredPart]]:
    """Places as from megatron-core: layers stacked, halves apart, each rank its own."""
    tp = dist.get_rank() % 2
    parts = {
        NORM: [StoredPart(Chunk((0,), (4,)), "decoder.layers.input_layernorm.weight", (1, 4), Chunk((0, 0), (1, 4)))]
    }
    key = "decoder.layers.mlp.linear_fc1.weight"
    parts[FC1] = [
        StoredPart(Chunk((4 * tp + 2 * half, 0), (2, 2)), key, (1, 8, 2), Chunk((0, 4 * half + 2 * tp, 0), (1, 2, 2)))
        for half in range(2)
    ]
    key = "decoder.layers.mlp.linear_fc2.weight"
    parts[FC2] = [StoredPart(Chunk((0, 2 * tp), (2, 2)), key, (1, 2, 4), Chunk((0, 0, 2 * tp), (1, 2, 2)))]
    return parts


def test_ranks_write_torch_dist(tmp_path: Path) -> None:
    def save_mine() -> None:
        model, optimizer = make()
        objects = {"core._extra_state/shard_0_1": None} if dist.get_rank() == 1 else {}
        save_torch_dist(
            tmp_path / "saved", model=model, optimizer=optimizer, parts=parts_of_rank(), objects=objects,
            common={"iteration": 7, "args": ARGS},
        )  # fmt: skip

    run_ranks(save_mine, 4)
    assert json.loads((tmp_path / "saved" / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
    opened = open_megatron(tmp_path / "saved")
    assert opened.format == "torch_dist"
    assert opened.counters.found["iteration"] == 7
    stored = FileSystemReader(tmp_path / "saved").read_metadata().state_dict_metadata
    assert "core._extra_state/shard_0_1" in stored
    values = read_all(tmp_path / "saved")
    expected = {f"model.{name}": canonical(name)[name] for name in (FC1, FC2, NORM)}
    for slot, factor in {"exp_avg": 2, "exp_avg_sq": 3}.items():
        expected |= {f"optimizer.state.{name}.{slot}": canonical(name, factor)[name] for name in (FC1, FC2, NORM)}
    assert values.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(values[name], tensor), name
    assert opened.source.read_object(f"optimizer.state.{FC1}.step") == 5.0


def make_saver() -> AsyncSaver:
    """Rank 0's process is started, as users' are: it lacks the modules of the rank, which a fork would inherit."""
    with started_writers() if dist.get_rank() == 0 else nullcontext():
        return AsyncSaver()


def test_a_save_in_the_background_has_the_objects_of_the_call(tmp_path: Path) -> None:
    def save_mine() -> None:
        model, optimizer = make()
        scales, common = [torch.ones(3)], {"iteration": 7, "args": ARGS, "seeds": [1]}
        objects = {"core._extra_state/shard_0_1": scales} if dist.get_rank() == 1 else {}
        arguments: dict[str, Any] = {"model": model, "optimizer": optimizer, "parts": parts_of_rank()}
        save_torch_dist(tmp_path / "blocking", objects=objects, common=common, **arguments)
        with make_saver() as saver:
            save_torch_dist(tmp_path / "saved", objects=objects, common=common, saver=saver, **arguments)
            scales[0].zero_()
            common["seeds"] = [2]

    run_ranks(save_mine, 4)
    for name in ("common.pt", "metadata.json", *(f"__{rank}_0.distcp" for rank in range(4))):
        assert (tmp_path / "saved" / name).read_bytes() == (tmp_path / "blocking" / name).read_bytes(), name


def test_an_error_of_one_rank_is_raised_by_the_call_on_every_rank_and_saving_goes_on(tmp_path: Path) -> None:
    def save_mine() -> None:
        model, optimizer = make()
        wrong = SIZES if dist.get_rank() else {**SIZES, "tp": 3}
        with make_saver() as saver:
            with pytest.raises((ValueError, CheckpointFailed), match="divide by 'tp' \\(3\\)"):
                save_fsdp_dtensor(tmp_path / "saved", model=model, sizes=wrong, saver=saver)
            assert not any(tmp_path.iterdir())
            dist.barrier()
            # Without an optimizer and with one, in either format: the ranks agree on each save.
            save_torch_dist(tmp_path / "first", model=model, parts=parts_of_rank(), saver=saver)
            arguments: dict[str, Any] = {"optimizer": optimizer, "sizes": SIZES, "objects": {"args": ARGS}}
            save_fsdp_dtensor(tmp_path / "saved", model=model, saver=saver, **arguments)

    run_ranks(save_mine, 4)
    assert "optimizer.state." + NORM + ".exp_avg" in read_all(tmp_path / "saved")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["first", "saved"]


def test_state_without_a_place_in_torch_dist_is_refused(tmp_path: Path) -> None:
    def save_mine() -> None:
        model, optimizer = make()
        parameter = model.get_parameter(FC1)
        optimizer.state[parameter]["step"] = torch.tensor(6.0)
        with pytest.raises(ValueError, match=r"stepped alike, got \[5.0, 6.0\] steps.*Save as fsdp_dtensor"):
            save_torch_dist(tmp_path / "saved", model=model, optimizer=optimizer, parts=parts_of_rank())
        optimizer.state[parameter] = {"row": parameter.new_zeros(8)}
        with pytest.raises(NotImplementedError, match=rf"'optimizer.state.{FC1}.row' of shape \(8,\).*fsdp_dtensor"):
            save_torch_dist(tmp_path / "saved", model=model, optimizer=optimizer, parts=parts_of_rank())
        missing = {**parts_of_rank(), FC1: parts_of_rank()[FC1][:1]}
        with pytest.raises((ValueError, CheckpointFailed), match="hold the 16 elements of"):
            save_torch_dist(tmp_path / "saved", model=model, parts=missing)

    run_ranks(save_mine, 4)
    assert not any(tmp_path.iterdir())
