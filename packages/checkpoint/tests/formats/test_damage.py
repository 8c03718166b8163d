"""A damaged checkpoint is refused with the name of the file, and nothing pickled in it runs."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lamella_checkpoint import CheckpointDamaged, load, save
from lamella_checkpoint._formats import dcp_read as _dcp_read
from lamella_checkpoint.testing import forget_checksums
from lamella_testing import run_ranks
from lamella_testing.plain_dcp import change_metadata
from lamella_testing.tiny import Kit


@pytest.fixture
def model() -> nn.Linear:
    return nn.Linear(3, 3)


@pytest.fixture
def path(tmp_path: Path, model: nn.Linear) -> Path:
    save(tmp_path / "a", model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), extra={"step": 3})
    return tmp_path / "a"


def refused(path: Path, model: nn.Linear, file: str) -> str:
    before = model.weight.clone()
    with pytest.raises(CheckpointDamaged) as info:
        load(path, model=model, optimizer=torch.optim.SGD(model.parameters()))
    assert info.value.file == str(path / file) and repr(info.value.file) in str(info.value)
    assert torch.equal(model.weight, before)
    return str(info.value)


def rewrite_metadata(path: Path, change: Callable[[Metadata], object]) -> None:
    """As a writer that made the mistake itself."""
    forget_checksums(path)
    change_metadata(path, change)


def test_an_absent_checkpoint_is_named(tmp_path: Path, model: nn.Linear) -> None:
    with pytest.raises(FileNotFoundError, match="absent'"):
        load(tmp_path / "absent", model=model)


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp", "lamella.json"])
def test_an_absent_file_is_named(path: Path, model: nn.Linear, file: str) -> None:
    (path / file).unlink()
    assert "No such file" in refused(path, model, file)


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp", "lamella.json"])
def test_a_truncated_file_is_named(path: Path, model: nn.Linear, file: str) -> None:
    os.truncate(path / file, (path / file).stat().st_size - 10)
    refused(path, model, file)


def test_a_truncated_checkpoint_file_is_refused_before_tensors_are_read(
    path: Path, model: nn.Linear, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_dcp_read, "read_tensors", lambda *_: pytest.fail("read"))
    size = (path / "__0_0.distcp").stat().st_size
    os.truncate(path / "__0_0.distcp", size - 1)
    assert f"expected {size} bytes or more, got {size - 1}" in refused(path, model, "__0_0.distcp")


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp", "lamella.json"])
def test_a_file_of_garbage_is_named(path: Path, model: nn.Linear, file: str) -> None:
    size = (path / file).stat().st_size
    (path / file).write_bytes(b"\x13" * size)
    refused(path, model, file)


def test_no_bit_of_a_checkpoint_can_flip_unseen(path: Path, model: nn.Linear) -> None:
    optimizer = torch.optim.SGD(model.parameters())
    for file in sorted(path.iterdir()):
        content = file.read_bytes()
        for position in range(0, len(content), 61):
            flipped = bytearray(content)
            flipped[position] ^= 1 << position % 7
            file.write_bytes(flipped)
            with pytest.raises(CheckpointDamaged):
                load(path, model=model, optimizer=optimizer)
        file.write_bytes(content)
    load(path, model=model, optimizer=optimizer)


def test_an_error_names_the_file_and_the_tensor_whose_bits_flipped(path: Path, model: nn.Linear) -> None:
    content = bytearray((path / "__0_0.distcp").read_bytes())
    position = content.find(model.weight.detach().numpy().tobytes())
    content[position] ^= 1
    (path / "__0_0.distcp").write_bytes(content)
    with pytest.raises(CheckpointDamaged, match="with the checksum .* for 'model.weight'") as info:
        load(path, model=model)
    assert info.value.file == str(path / "__0_0.distcp")
    load(path, model=model, verify=False)


def test_a_later_format_is_refused(path: Path, model: nn.Linear) -> None:
    content = json.loads((path / "lamella.json").read_text())
    (path / "lamella.json").write_text(json.dumps(content | {"format_version": 3}))
    assert "expected format version 2 or less, got 3" in refused(path, model, "lamella.json")


def test_a_tensor_with_missing_chunks_is_refused(path: Path, model: nn.Linear) -> None:
    def clear(metadata: Metadata) -> None:
        entry = metadata.state_dict_metadata["model.bias"]
        assert isinstance(entry, TensorStorageMetadata)
        entry.chunks.clear()

    rewrite_metadata(path, clear)
    assert "0 of the 3 elements of 'model.bias'" in refused(path, model, ".metadata")


@pytest.mark.parametrize("name", ["model.bias", "optimizer.param_groups.bias.lr"])
def test_a_name_without_a_place_in_any_file_is_refused(path: Path, model: nn.Linear, name: str) -> None:
    def forget(metadata: Metadata) -> None:
        for index in [index for index in metadata.storage_data if index.fqn == name]:
            del metadata.storage_data[index]

    rewrite_metadata(path, forget)
    assert f"no place in any file for '{name}'" in refused(path, model, ".metadata")


def test_paths_do_not_lead_outside(path: Path, model: nn.Linear) -> None:
    def lead_outside(metadata: Metadata) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = "../elsewhere.distcp"

    rewrite_metadata(path, lead_outside)
    assert "leads outside" in refused(path, model, ".metadata")


def test_a_file_is_no_checkpoint(tmp_path: Path, model: nn.Linear) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointDamaged, match="a checkpoint of torch DCP in .*, got a file"):
        load(tmp_path / "file", model=model)


def _fill(file: Path) -> None:
    file.write_bytes(b"\x13" * file.stat().st_size)


def _truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 8)


@pytest.mark.parametrize("damage", [_fill, _truncate, Path.unlink])
def test_damage_of_one_ranks_file_is_the_same_error_on_every_rank(
    damage: Callable[[Path], None], kit: Kit, tmp_path: Path
) -> None:
    """A program may go on from an earlier checkpoint: on every rank, or on none."""

    def save_damage_load() -> str:
        model, _ = kit.build(sharded=True)
        save(tmp_path / "b", model=model)
        if torch.distributed.get_rank() == 0:
            damage(tmp_path / "b" / "__1_0.distcp")
        torch.distributed.barrier()
        with pytest.raises(CheckpointDamaged, match="__1_0.distcp") as refusal:
            load(tmp_path / "b", model=model)
        return str(refusal.value)

    assert len(set(run_ranks(save_damage_load, 2))) == 1
