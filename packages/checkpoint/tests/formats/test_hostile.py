"""Hostile checkpoints: each is refused by the file's name."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lamella_checkpoint import CheckpointMismatch, OptionConflict, load, save, verify
from lamella_checkpoint.testing import assert_damaged, change_manifest, forget_checksums
from lamella_files import publish, recover, stage
from lamella_testing.harmed_files import make_deep, make_huge, make_link, make_pipe
from lamella_testing.plain_dcp import change_metadata

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


_ESCAPES = "a\n\x1b[2J\u202eb"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save(tmp_path / "a", model=nn.Linear(2, 2), extra={"step": 1})
    return tmp_path / "a"


@pytest.mark.parametrize("harm", [make_pipe, make_huge, make_link, make_deep])
@pytest.mark.parametrize("name", [".metadata", "lamella.json", "lamella_checksums.json"])
def test_pipes_links_and_huge_or_deep_files_as_checkpoint_metadata_are_refused(
    path: Path, name: str, harm: Callable[[Path], None]
) -> None:
    harm(path / name)
    assert_damaged(path / name, lambda: load(path, model=nn.Linear(2, 2)))
    assert any(problem.file == str(path / name) for problem in verify(path).problems)


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("lamella.json", {"extra": [1]}),
        ("lamella.json", {"optimizer": 5}),
        ("lamella_checksums.json", {"files": {"a": [[1, float("inf"), 3]]}}),
        ("lamella_checksums.json", {"files": [1]}),
    ],
)
def test_manifests_that_make_no_sense_are_refused(path: Path, file: str, change: dict[str, Any]) -> None:
    (path / file).write_text(json.dumps(json.loads((path / file).read_text()) | change))
    assert_damaged(path / file, lambda: load(path, model=nn.Linear(2, 2)))


@pytest.mark.parametrize("sizes", [(1 << 40, 2), (0, 1 << 62, 1 << 62)])
def test_a_tensor_shape_beyond_its_stored_bytes_is_refused(path: Path, sizes: tuple[int, ...]) -> None:
    def claim(metadata: Metadata) -> None:
        table = metadata.state_dict_metadata["model.weight"]
        assert isinstance(table, TensorStorageMetadata)
        table.size = table.chunks[0].sizes = torch.Size(sizes)
        table.chunks[0].offsets = torch.Size([0] * len(sizes))
        for index in [index for index in metadata.storage_data if index.fqn == "model.weight"]:
            place = metadata.storage_data.pop(index)
            metadata.storage_data[type(index)("model.weight", table.chunks[0].offsets)] = place

    forget_checksums(path)
    change_metadata(path, claim)
    assert_damaged(path / ".metadata", lambda: load(path, model=nn.Linear(2, 2)), "'model.weight'")
    assert not verify(path)


def test_a_running_save_is_published_whole_or_not_at_all_beside_a_second_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second job with the same path takes the directory for the leftover of a killed job."""
    target = tmp_path / "a"
    save(target, model=nn.Linear(2, 2))
    staged = stage(target)
    for name in ("x", "y"):
        (staged / name).touch()
    rmtree = shutil.rmtree

    def publish_meanwhile(path: Path, **options: Any) -> None:
        (path / "x").unlink()
        with pytest.raises(FileNotFoundError, match="one save at a time"):
            publish(staged, target)
        rmtree(path, **options)

    monkeypatch.setattr(shutil, "rmtree", publish_meanwhile)
    recover(target)
    load(target, model=nn.Linear(2, 2))
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize(
    ("stored", "live"),
    [
        (torch.complex64, torch.float32),
        (torch.complex64, torch.int64),
        (torch.float32, torch.int64),
        (torch.float32, torch.bool),
        (torch.int64, torch.bool),
    ],
)
def test_a_number_is_never_cut_to_fit(tmp_path: Path, stored: torch.dtype, live: torch.dtype) -> None:
    def model(dtype: torch.dtype) -> nn.Module:
        module = nn.Module()
        module.register_buffer("w", torch.full((2,), 3).to(dtype))
        return module

    save(tmp_path / "a", model=model(stored))
    with pytest.raises(CheckpointMismatch, match=rf"model.w: {stored} \(2,\) in the checkpoint, {live} \(2,\) here"):
        load(tmp_path / "a", model=model(live))
    differences = load(tmp_path / "a", model=model(live), strict=False).left
    assert [difference.name for difference in differences.names] == ["model.w"]
    save(tmp_path / "b", model=model(live))
    load(tmp_path / "b", model=model(stored))


def test_a_refused_load_shows_text_too(path: Path) -> None:
    change_manifest(path, optimizer={"class": _ESCAPES, "options": [_ESCAPES]})
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(CheckpointMismatch) as info:
        load(path, model=model, optimizer=optimizer, verify=False)
    assert all(line.isprintable() for line in str(info.value).split("\n"))
    assert r"a\n\x1b[2J\u202eb" in str(info.value)
    conflict = OptionConflict(_ESCAPES, 0, "a", 1 << 100_000, _ESCAPES, 2)
    assert "<int> for a" in str(conflict) and str(conflict).isprintable()
