"""The ranks of a run agree before they save: by what one rank alone knows, no rank enters a collective alone."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lamella._processes.agreement import from_first_rank
from lamella._record.run_directory import RunDirectory
from lamella._training.saves import Saves
from lamella_checkpoint import CheckpointDirectory
from lamella_testing import run_ranks


def test_a_failure_that_one_rank_alone_knows_is_made_good_by_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save() -> list[str]:
        model = nn.Linear(4, 4)
        RunDirectory(tmp_path).config.touch()  # as preparation does, before the first step
        saves = Saves(RunDirectory(tmp_path), 3, model, torch.optim.AdamW(model.parameters()))
        failure = "A checkpoint was not saved: no room." if dist.get_rank() == 1 else None
        monkeypatch.setattr(saves, "settle", lambda: failure)
        lines: list[str] = []
        saves.save(3, {"step": 3}, lines.append, wait=False)
        return lines

    assert run_ranks(save, 2) == [["A checkpoint was not saved: no room. Saving step 3 in its place."]] * 2
    assert CheckpointDirectory(RunDirectory(tmp_path).checkpoints).steps() == [3]


def test_ranks_that_see_different_checkpoints_go_on_from_that_of_the_first() -> None:
    paths = [Path("step_00000003"), None]
    assert run_ranks(lambda: from_first_rank(paths[dist.get_rank()]), 2) == [paths[0]] * 2


def test_the_time_limit_and_the_lines_of_a_run_reach_its_saves(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    lines: list[str] = []
    saves = Saves(RunDirectory(tmp_path), 3, model, optimizer, timeout_s=45.0, print_line=lines.append)
    assert (saves._checkpoints._timeout, saves._checkpoints._print_line) == (45.0, lines.append)
