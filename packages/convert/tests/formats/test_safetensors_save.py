"""A live model written as safetensors from shards: the library reads back the unsharded model's values."""

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from lamella_checkpoint import CheckpointFailed, TensorInfo, save
from lamella_convert import convert, save_safetensors
from lamella_convert._formats import safetensors_write as _safetensors_write
from lamella_convert._formats.safetensors import SafetensorsSource
from lamella_convert._formats.safetensors_write import Blank, plan_files
from lamella_convert._tools import safetensors_save as _safetensors_save
from lamella_testing import RankFailure, run_ranks
from lamella_testing.tiny import Kit


def opened(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a directory, by the library."""
    tensors: dict[str, torch.Tensor] = {}
    for file in path.glob("*.safetensors"):
        tensors.update(load_file(file))
    return tensors


def equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    assert set(one) == set(other)
    return all(one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("num_ranks", [0, 1, 2, 4])
@pytest.mark.parametrize("max_shard_nbytes", [1 << 30, 100])
def test_any_number_of_ranks_writes_the_model(kit: Kit, tmp_path: Path, num_ranks: int, max_shard_nbytes: int) -> None:
    def write() -> None:
        model, _ = kit.build(sharded=num_ranks > 0)
        assert save_safetensors(tmp_path / "a", model=model, max_shard_nbytes=max_shard_nbytes) == tmp_path / "a"

    run_ranks(write, num_ranks) if num_ranks else write()
    assert equal(opened(tmp_path / "a"), kit.weights(kit.build(sharded=False)[0]))
    assert set(SafetensorsSource(tmp_path / "a").tensors) == set(kit.weights(kit.build(sharded=False)[0]))
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


PLACEMENTS: dict[str, tuple[tuple[int, ...], list[Placement]]] = {
    "rows": ((4,), [Shard(0)]),
    "columns": ((4,), [Shard(1)]),
    "replicas": ((4,), [Replicate()]),
    "HSDP": ((2, 2), [Replicate(), Shard(0)]),
    "rows and columns": ((2, 2), [Shard(0), Shard(1)]),
    "rows twice": ((2, 2), [Shard(0), Shard(0)]),
    "TP first": ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    "columns, TP first": ((2, 2), [_StridedShard(1, split_factor=2), Shard(1)]),
}


@pytest.mark.parametrize("shape", [(8, 8), (7, 5, 3), (3, 1)], ids=str)
def test_ranks_write_their_boxes_at_their_places_in_safetensors_files(tmp_path: Path, shape: tuple[int, ...]) -> None:
    full_tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)

    def write() -> list[str]:
        model = nn.Module()
        for name, (sizes, placements) in PLACEMENTS.items():
            mesh = init_device_mesh("cpu", sizes)
            plain = [
                Shard(placement.dim) if isinstance(placement, _StridedShard) else placement for placement in placements
            ]
            tensor = distribute_tensor(full_tensor, mesh, plain)
            if plain != placements:
                if any(
                    isinstance(placement, Shard | _StridedShard) and shape[placement.dim] % 4
                    for placement in placements
                ):
                    continue  # torch cuts strided shards of uneven sizes in ways of its own.
                tensor = distribute_tensor(full_tensor, mesh, placements)
            model.register_buffer(name, tensor)
        save_safetensors(tmp_path / "a", model=model)
        return list(model.state_dict())

    [names, *_] = run_ranks(write, 4)
    assert len(names) == len(PLACEMENTS) - (0 if shape == (8, 8) else 2)
    assert equal(opened(tmp_path / "a"), dict.fromkeys(names, full_tensor))


@pytest.mark.parametrize("shape", [(300, 200), (2, 130, 257), (128, 128)], ids=str)
def test_float8_blocks_shared_by_ranks_have_the_scale_of_one_process(tmp_path: Path, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    full_tensor = torch.randn(shape) * torch.rand(shape).exp()

    def write() -> None:
        model = nn.Module()
        for name, (sizes, placements) in PLACEMENTS.items():
            if not any(isinstance(placement, _StridedShard) for placement in placements):
                model.register_buffer(name, distribute_tensor(full_tensor, init_device_mesh("cpu", sizes), placements))
        model.register_buffer("left", distribute_tensor(full_tensor, init_device_mesh("cpu", (4,)), [Shard(0)]))
        model.register_buffer("vector", torch.ones(3))
        save(tmp_path / "dcp", model=model)
        save_safetensors(tmp_path / "a", model=model, float8=matrices, like=tmp_path / "like")

    (tmp_path / "like").mkdir()
    (tmp_path / "like" / "config.json").write_text('{"model_type": "tiny"}')
    run_ranks(write, 4)
    convert(tmp_path / "dcp", tmp_path / "b", to="hf", float8=matrices, like=tmp_path / "like")
    tensors, expected = opened(tmp_path / "a"), opened(tmp_path / "b")
    assert tensors["rows"].dtype == torch.float8_e4m3fn and "left_scale_inv" not in tensors
    assert equal(
        {name: bits(tensor) for name, tensor in tensors.items()},
        {name: bits(tensor) for name, tensor in expected.items()},
    )
    configs = [json.loads((tmp_path / path / "config.json").read_text()) for path in "ab"]
    assert configs[0] == configs[1]
    assert configs[0]["quantization_config"]["modules_to_not_convert"] == ["left"]


def matrices(name: str, info: TensorInfo) -> bool:
    return len(info.shape) > 1 and name != "left"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def test_nonfinite_values_and_vectors_for_float8_are_refused_by_name_on_every_rank(tmp_path: Path) -> None:
    def write(number: float) -> None:
        model = nn.Linear(4, 4)
        weight = torch.zeros(4, 4)
        weight[3, 1] = number
        model.weight = nn.Parameter(distribute_tensor(weight, init_device_mesh("cpu", (2,)), [Shard(0)]))
        with pytest.raises((ValueError, CheckpointFailed), match="finite values to quantise, got others in 'weight'"):
            save_safetensors(tmp_path / "a", model=model, float8=matrices)
        with pytest.raises(ValueError, match=r"matrices to quantise, got 'bias' of shape \(4,\)"):
            save_safetensors(tmp_path / "a", model=model, float8=lambda name, info: name == "bias")

    for number in (float("inf"), float("nan")):
        run_ranks(write, 2, number)
    assert not list(tmp_path.iterdir())


def test_replicated_tensors_are_written_to_safetensors_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_written: list[int] = []
    pwrite = os.pwrite

    def count(*args: Any) -> int:
        num_written.append(pwrite(*args))
        return num_written[-1]

    monkeypatch.setattr(os, "pwrite", count)

    def write() -> int:
        model = nn.Module()
        model.register_buffer("plain", torch.ones(10))
        model.register_buffer(
            "everywhere", distribute_tensor(torch.ones(10), init_device_mesh("cpu", (4,)), [Replicate()])
        )
        hybrid = distribute_tensor(torch.ones(10, 4), init_device_mesh("cpu", (2, 2)), [Replicate(), Shard(0)])
        model.register_buffer("hybrid", hybrid)
        save_safetensors(tmp_path / "a", model=model)
        return sum(num_written)

    assert sum(run_ranks(write, 4)) == (10 + 10 + 10 * 4) * 4


def test_parts_of_a_model_on_different_ranks_make_one_model(tmp_path: Path) -> None:
    def write() -> None:
        shared = nn.Linear(1, 1)
        model = nn.ModuleDict({f"layer{dist.get_rank()}": nn.Linear(2, 3), "shared": shared})
        nn.init.constant_(shared.weight, 3)
        save_safetensors(tmp_path / "a", model=model)

    run_ranks(write, 3)
    tensors = opened(tmp_path / "a")
    assert {name.split(".")[0] for name in tensors} == {"layer0", "layer1", "layer2", "shared"}
    assert tensors["shared.weight"].item() == 3


def test_ranks_that_differ_are_told_the_tensor(tmp_path: Path) -> None:
    def write() -> None:
        with pytest.raises((ValueError, CheckpointFailed), match=r"'model.weight'.*\(1, 2\).*rank 1.*\(1, 1\)"):
            save_safetensors(tmp_path / "a", model=nn.Linear(1 + dist.get_rank(), 1))

    run_ranks(write, 2)
    assert not list(tmp_path.iterdir())


def test_a_dtype_is_for_floating_point(kit: Kit, tmp_path: Path) -> None:
    model = nn.Module()
    model.register_buffer("a", torch.tensor([1.0009765625]))
    model.register_buffer("count", torch.tensor([300]))
    model.register_buffer("mask", torch.tensor([True]))
    model.register_buffer("float8", torch.ones(2).to(torch.float8_e4m3fn))
    save_safetensors(tmp_path / "a", model=model, dtype=torch.bfloat16)
    tensors = opened(tmp_path / "a")
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {
        "a": torch.bfloat16,
        "count": torch.int64,
        "mask": torch.bool,
        "float8": torch.float8_e4m3fn,
    }
    assert tensors["a"].item() == 1.0 and tensors["count"].item() == 300


def test_a_tied_weight_is_written_under_its_first_name(tmp_path: Path) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
    model["head"].weight = model["embed"].weight
    save_safetensors(tmp_path / "a", model=model)
    assert set(opened(tmp_path / "a")) == {"embed.weight"}


def test_files_that_lie_beside_the_weights_come_along(tmp_path: Path) -> None:
    like = tmp_path / "like"
    like.mkdir()
    for name in ("config.json", "tokenizer.json", "merges.txt", "modeling_x.py"):
        (like / name).write_text(name)
    for name in (
        "model.safetensors",
        "pytorch_model.bin",
        "model.safetensors.index.json",
        "pytorch_model.bin.index.json",
    ):
        (like / name).write_text("weights")
    save_safetensors(tmp_path / "a", model=nn.Linear(1, 1), like=like)
    names = {"config.json", "merges.txt", "model.safetensors", "modeling_x.py", "tokenizer.json"}
    assert {file.name for file in (tmp_path / "a").iterdir()} == names
    assert (tmp_path / "a" / "config.json").read_text() == "config.json"


def test_a_dtype_that_the_format_lacks_is_named(tmp_path: Path) -> None:
    model = nn.Module()
    model.register_buffer("wave", torch.ones(1, dtype=torch.complex128))
    with pytest.raises(TypeError, match="complex128 for 'wave'"):
        save_safetensors(tmp_path / "a", model=model)


def test_a_tensor_that_is_not_reduced_is_refused(tmp_path: Path) -> None:
    def write() -> None:
        model = nn.Module()
        model.register_buffer("a", DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [Partial()]))
        with pytest.raises(ValueError, match="no rank has its values"):
            save_safetensors(tmp_path / "a", model=model)

    run_ranks(write, 2)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("existing", ["file", "checkpoint"])
def test_saving_safetensors_never_replaces_existing_files(tmp_path: Path, existing: str) -> None:
    path = tmp_path / "a"
    path.mkdir()
    (path / ("notes.txt" if existing == "file" else ".metadata")).write_text("mine")
    with pytest.raises(FileExistsError, match="an empty directory or nothing to replace"):
        save_safetensors(path, model=nn.Linear(1, 1))
    assert len(list(path.iterdir())) == 1


def test_a_killed_save_leaves_nothing_by_that_name_and_the_next_cleans_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object) -> None:
        if dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def write() -> None:
        save_safetensors(tmp_path / "a", model=nn.Linear(2, 2))

    with monkeypatch.context() as patch:
        patch.setattr(_safetensors_write.FileFilling, "sync", die)
        with pytest.raises(RankFailure, match="SIGKILL"):
            run_ranks(write, 2)
    assert not (tmp_path / "a").exists() and len(list(tmp_path.iterdir())) == 1
    run_ranks(write, 2)
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_rank_that_cannot_write_makes_every_rank_raise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing_rank: int
) -> None:
    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def write() -> type[BaseException]:
        if dist.get_rank() == failing_rank:
            monkeypatch.setattr(_safetensors_write.FileFilling, "sync", no_space)
        with pytest.raises((OSError, CheckpointFailed), match="No space left") as info:
            save_safetensors(tmp_path / "a", model=nn.Linear(2, 2))
        return info.type

    assert run_ranks(write, 2)[1 - failing_rank] is CheckpointFailed
    assert not list(tmp_path.iterdir())


def test_every_file_is_on_the_disk_before_the_directory_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        assert not (tmp_path / "a").exists() or synced[-1] == tmp_path.name
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    save_safetensors(tmp_path / "a", model=nn.Linear(4, 4), max_shard_nbytes=64)
    names = {name.split(".saving")[0] for name in synced}
    assert names == {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "a",
        tmp_path.name,
    }


class TestPlan:
    def test_shards_are_full_and_a_larger_tensor_has_one_of_its_own(self) -> None:
        blanks = {name: Blank((nbytes,), torch.uint8) for name, nbytes in zip("abcde", (4, 5, 20, 3, 7), strict=True)}
        files = plan_files(blanks, 10)
        assert [list(file.tensors) for file in files] == [["a", "b"], ["c"], ["d", "e"]]
        assert files[1].name == "model-00002-of-00003.safetensors"

    def test_planned_tensors_are_aligned_after_tensors_of_any_size(self, tmp_path: Path) -> None:
        blanks = {"a": Blank((3,), torch.bool), "b": Blank((1,), torch.float64), "c": Blank((1,), torch.bfloat16)}
        [file] = plan_files(blanks)
        assert all(stored.start % stored.dtype.itemsize == 0 for stored in file.tensors.values())
        _safetensors_write.make_files(tmp_path, [file])
        assert {name: tensor.dtype for name, tensor in load_file(tmp_path / file.name).items()} == {
            name: blank.dtype for name, blank in blanks.items()
        }

    def test_an_index_is_the_hubs(self, tmp_path: Path) -> None:
        files = plan_files({"a": Blank((4,), torch.float32), "b": Blank((2,), torch.float32)}, 16)
        _safetensors_write.write_index(tmp_path, files)
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert index == {
            "metadata": {"total_size": 24},
            "weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"},
        }

    def test_planning_safetensors_of_no_tensors_is_refused(self) -> None:
        with pytest.raises(ValueError, match="got none"):
            plan_files({})

    def test_the_formats_own_name_is_refused(self) -> None:
        with pytest.raises(ValueError, match="__metadata__"):
            plan_files({"__metadata__": Blank((), torch.uint8)})


def test_a_failure_while_files_are_made_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_safetensors_save, "make_files", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_safetensors(tmp_path / "a", model=nn.Linear(1, 1))
    assert not list(tmp_path.iterdir())
