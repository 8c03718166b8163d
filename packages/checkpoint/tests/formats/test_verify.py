"""Every damage of a DCP checkpoint is reported, and no pickled code runs."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from lamella_checkpoint import CheckpointUntrusted, save, verify
from lamella_checkpoint._formats.dcp_read import StoredCheckpoint
from lamella_checkpoint.testing import forget_checksums, read_tensor
from lamella_testing import run_ranks
from lamella_testing.harmed_files import flip
from lamella_testing.hostile_pickles import Runs
from lamella_testing.plain_dcp import change_metadata, dcp_save
from lamella_testing.tiny import Kit


@pytest.fixture
def saved_path(kit: Kit, tmp_path: Path) -> Path:
    model, optimizer = kit.build(sharded=False)
    kit.train(model, optimizer)
    save(tmp_path / "own", model=model, optimizer=optimizer, extra={"step": 2})
    return tmp_path / "own"


def test_undamaged_dcp_checkpoints_are_verified_as_whole(saved_path: Path, tmp_path: Path) -> None:
    def check(path: Path) -> None:
        progress: list[tuple[int, int]] = []
        verification = verify(path, on_progress=lambda *so_far: progress.append(so_far))
        assert verification and verification.problems == () and verification.num_bytes > 0, str(verification)
        assert progress[-1] == (verification.num_bytes, verification.num_bytes) and "whole" in str(verification)

    for path in (saved_path, dcp_save({"model": nn.Linear(2, 2).state_dict()}, tmp_path / "dcp")):
        check(path)
    assert verify(saved_path).num_unverified_bytes == 0


def test_a_checkpoint_that_is_removed_meanwhile_is_gone_and_not_damaged(saved_path: Path) -> None:
    """Retention renames first, and removes the files then."""

    def remove_meanwhile(done: int, total: int) -> None:
        if saved_path.exists():
            saved_path.rename(saved_path.with_name("own.removed-01234567"))
            shutil.rmtree(saved_path.with_name("own.removed-01234567"))

    with pytest.raises(FileNotFoundError, match="to stay while it is read, got a removal") as info:
        verify(saved_path, on_progress=remove_meanwhile)
    assert info.value.filename == str(saved_path)


def test_a_checkpoint_that_another_replaces_meanwhile_is_neither_whole_nor_damaged(saved_path: Path) -> None:
    def replace_meanwhile(done: int, total: int) -> None:
        if done == total:
            save(saved_path, model=nn.Linear(2, 2))

    with pytest.raises(FileNotFoundError, match="got another checkpoint at its path"):
        verify(saved_path, on_progress=replace_meanwhile)


def test_a_read_of_a_removed_checkpoint_says_so(saved_path: Path) -> None:
    stored = StoredCheckpoint(saved_path)
    shutil.rmtree(saved_path)
    [name, *_] = stored.tensors
    with pytest.raises(FileNotFoundError, match="to stay while it is read, got a removal"):
        read_tensor(stored, name)


def test_all_that_is_wrong_is_told(kit: Kit, tmp_path: Path) -> None:
    def save_sharded() -> None:
        save(tmp_path / "a", model=kit.build(sharded=True)[0])

    run_ranks(save_sharded, 3)
    path = tmp_path / "a"
    (path / "__1_0.distcp").unlink()
    os.truncate(path / "__2_0.distcp", 100)
    flip(path / "__0_0.distcp", 800)
    flip(path / "lamella.json", 30)
    (path / "__9_0.distcp").touch()
    verification = verify(path)
    assert not verification and {os.path.basename(problem.file) for problem in verification.problems} == {
        "__0_0.distcp",
        "__1_0.distcp",
        "__2_0.distcp",
        "lamella.json",
    }
    assert verification.unneeded == ("__9_0.distcp",)
    assert (
        "damaged, 4 problems" in str(verification) and json.loads(json.dumps(verification.as_json()))["whole"] is False
    )


@pytest.mark.parametrize("position", range(0, 2000, 333))
def test_any_flipped_bit_is_found(saved_path: Path, position: int) -> None:
    for name in ("__0_0.distcp", ".metadata"):
        file = saved_path / name
        content = file.read_bytes()
        flip(file, position % len(content))
        assert [os.path.basename(problem.file) for problem in verify(saved_path).problems][:1] == [name]
        file.write_bytes(content)


def test_a_flipped_bit_in_other_programs_tensors_is_found(tmp_path: Path) -> None:
    tensor = torch.arange(1000.0)
    path = dcp_save({"model": {"x": tensor}}, tmp_path / "a")
    flip(path / "__0_0.distcp", (path / "__0_0.distcp").read_bytes().find(tensor.numpy().tobytes()) + 5)
    [problem] = verify(path).problems
    assert problem.file == str(path / "__0_0.distcp") and "with the checksum" in problem.problem


def test_holes_overlaps_and_missing_places_are_told(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    save(tmp_path / "a", model=model)

    def damage(metadata: Metadata) -> None:
        first, second = (metadata.state_dict_metadata[f"model.{layer}.weight"] for layer in (0, 1))
        assert isinstance(first, TensorStorageMetadata) and isinstance(second, TensorStorageMetadata)
        first.chunks.clear()
        half = ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((2, 4)))
        second.chunks[:] = [half, half]
        del metadata.storage_data[MetadataIndex("model.2.bias", (0,))]

    forget_checksums(tmp_path / "a")
    change_metadata(tmp_path / "a", damage)
    text = str(verify(tmp_path / "a"))
    assert "chunks of 0 of the 16 elements of 'model.0.weight'" in text
    assert "chunks of 'model.1.weight' overlap" in text
    assert "no place in any file for 'model.2.bias'" in text


@pytest.mark.parametrize("file", ["lamella.json", "lamella_checksums.json", ".metadata"])
def test_an_absent_file_is_a_problem(saved_path: Path, file: str) -> None:
    (saved_path / file).unlink()
    assert any(os.path.basename(problem.file) == file for problem in verify(saved_path).problems)


def test_an_edited_manifest_is_a_problem(saved_path: Path) -> None:
    (saved_path / "lamella.json").write_text((saved_path / "lamella.json").read_text() + " ")
    assert [os.path.basename(problem.file) for problem in verify(saved_path).problems] == ["lamella.json"]


def test_a_flipped_bit_in_a_types_name_is_damage_where_a_checksum_tells(saved_path: Path) -> None:
    file = saved_path / ".metadata"
    flip(file, file.read_bytes().find(b"torch.distributed.checkpoint.filesystem"))
    [problem] = verify(saved_path).problems
    assert problem.file == str(file) and "checksum" in problem.problem
    forget_checksums(saved_path)
    with pytest.raises(CheckpointUntrusted, match=r".orch\.distributed"):
        verify(saved_path)


def test_verify_runs_no_pickled_code_in_metadata(saved_path: Path) -> None:
    forget_checksums(saved_path)
    change_metadata(saved_path, lambda metadata: metadata.planner_data.update(x=Runs()))
    with pytest.raises(CheckpointUntrusted, match="posix.mkdir"):
        verify(saved_path)
    assert not os.path.exists("ran")
