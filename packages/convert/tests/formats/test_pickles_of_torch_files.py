"""A file of `torch.save` is foreign data: no pickle takes more memory than its length can need."""

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lamella_checkpoint import CheckpointDamaged
from lamella_convert import open_checkpoint
from lamella_convert._formats.megatron_files import plain_contents
from lamella_testing.hostile_pickles import NUMBERED, numbered

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize("how", NUMBERED)
class TestTablesOfWhatIsRemembered:
    """A few bytes cannot make Python's unpickler hold gigabytes."""

    @pytest.mark.parametrize("name", ["a.pt", "common.pt"])
    def test_an_archive_is_refused(self, tmp_path: Path, name: str, how: str) -> None:
        file = tmp_path / name
        torch.save({"step": 3}, file)
        with zipfile.ZipFile(file) as archive:
            contents = {member: archive.read(member) for member in archive.namelist()}
        with zipfile.ZipFile(file, "w") as archive:
            for member_name, content in contents.items():
                archive.writestr(member_name, numbered(content, how) if member_name.endswith("data.pkl") else content)
        read: dict[str, Callable[[], object]] = {
            "a.pt": lambda: open_checkpoint(file),
            "common.pt": lambda: plain_contents(file),
        }
        with pytest.raises(CheckpointDamaged, match="to number as many values") as info:
            read[name]()
        assert info.value.file == str(file)


def _doubled(depth: int = 40) -> list[Any]:
    node: list[Any] = ["leaf", "leaf"]
    for _ in range(depth):
        node = [node, node]
    return node


@pytest.mark.parametrize("trust", [False, True])
def test_a_checkpoint_that_never_ends_is_refused_by_name(tmp_path: Path, trust: bool) -> None:
    file = tmp_path / "bomb.pt"
    torch.save({"model": {"weight": torch.zeros(2)}, "epoch": _doubled()}, file)
    with pytest.raises(CheckpointDamaged, match="bomb.pt"):
        open_checkpoint(file, trust=trust)
