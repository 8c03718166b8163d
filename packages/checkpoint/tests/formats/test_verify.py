"""Everything that is wrong with a DCP checkpoint is told, and nothing in it runs."""

import json
import os
import pickle
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from lamella_checkpoint import CheckpointUntrusted, save, verify
from lamella_checkpoint.testing import forget_checksums
from lamella_testing import run_ranks


def dcp_save(entries, path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(entries, checkpoint_id=path)
    return path


@pytest.fixture
def own(kit, tmp_path):
    model, optimizer = kit.build(sharded=False)
    kit.train(model, optimizer)
    save(tmp_path / "own", model=model, optimizer=optimizer, extra={"step": 2})
    return tmp_path / "own"


def test_what_is_whole_is_found_to_be(own, tmp_path):
    for path in (own, dcp_save({"model": nn.Linear(2, 2).state_dict()}, tmp_path / "dcp")):
        told = []
        found = verify(path, on_progress=lambda *so_far, told=told: told.append(so_far))
        assert found and found.problems == () and found.num_bytes > 0, str(found)
        assert told[-1] == (found.num_bytes, found.num_bytes) and "whole" in str(found)
    assert verify(own).num_unverified_bytes == 0


def flip(file, position):
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)


def rewrite_metadata(path, change):
    forget_checksums(path)
    metadata = dcp.FileSystemReader(path).read_metadata()
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def test_all_that_is_wrong_is_told(kit, tmp_path):
    def save_sharded():
        save(tmp_path / "a", model=kit.build(sharded=True)[0])

    run_ranks(save_sharded, 3)
    path = tmp_path / "a"
    (path / "__1_0.distcp").unlink()
    os.truncate(path / "__2_0.distcp", 100)
    flip(path / "__0_0.distcp", 800)
    flip(path / "lamella.json", 30)
    (path / "__9_0.distcp").touch()
    found = verify(path)
    assert not found and {os.path.basename(each.file) for each in found.problems} == {
        "__0_0.distcp",
        "__1_0.distcp",
        "__2_0.distcp",
        "lamella.json",
    }
    assert found.unneeded == ("__9_0.distcp",)
    assert "damaged, 4 problems" in str(found) and json.loads(json.dumps(found.as_json()))["whole"] is False


@pytest.mark.parametrize("position", range(0, 2000, 333))
def test_any_flipped_bit_is_found(own, position):
    for name in ("__0_0.distcp", ".metadata"):
        file = own / name
        content = file.read_bytes()
        flip(file, position % len(content))
        assert [os.path.basename(each.file) for each in verify(own).problems][:1] == [name]
        file.write_bytes(content)


def test_a_flipped_bit_in_other_programs_tensors_is_found(tmp_path):
    tensor = torch.arange(1000.0)
    path = dcp_save({"model": {"x": tensor}}, tmp_path / "a")
    flip(path / "__0_0.distcp", (path / "__0_0.distcp").read_bytes().find(tensor.numpy().tobytes()) + 5)
    [problem] = verify(path).problems
    assert problem.file == str(path / "__0_0.distcp") and "with the checksum" in problem.problem


def test_holes_overlaps_and_missing_places_are_told(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    save(tmp_path / "a", model=model)

    def damage(metadata):
        metadata.state_dict_metadata["model.0.weight"].chunks.clear()
        half = ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((2, 4)))
        metadata.state_dict_metadata["model.1.weight"].chunks[:] = [half, half]
        del metadata.storage_data[MetadataIndex("model.2.bias", (0,))]

    rewrite_metadata(tmp_path / "a", damage)
    text = str(verify(tmp_path / "a"))
    assert "chunks of 0 of the 16 elements of 'model.0.weight'" in text
    assert "chunks of 'model.1.weight' overlap" in text
    assert "no place in any file for 'model.2.bias'" in text


@pytest.mark.parametrize("file", ["lamella.json", "lamella_checksums.json", ".metadata"])
def test_an_absent_file_is_a_problem(own, file):
    (own / file).unlink()
    assert any(os.path.basename(each.file) == file for each in verify(own).problems)


def test_an_edited_manifest_is_a_problem(own):
    (own / "lamella.json").write_text((own / "lamella.json").read_text() + " ")
    assert [os.path.basename(each.file) for each in verify(own).problems] == ["lamella.json"]


def test_nothing_runs(own):
    class Runs:
        def __reduce__(self):
            return (os.mkdir, ("ran",))

    rewrite_metadata(own, lambda metadata: metadata.planner_data.update(x=Runs()))
    with pytest.raises(CheckpointUntrusted, match="posix.mkdir"):
        verify(own)
    assert not os.path.exists("ran")
