"""Checkpoints by step: the newest are kept, only complete ones are seen."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from lamella_checkpoint import CheckpointDirectory, load
from lamella_testing import run_ranks
from lamella_testing.tiny import Kit


def value_at(path: Path) -> float:
    model = nn.Linear(1, 1)
    load(path, model=model)
    return model.weight.item()


def save_steps(checkpoints: CheckpointDirectory, *steps: int) -> None:
    for step in steps:
        model = nn.Linear(1, 1)
        nn.init.constant_(model.weight, float(step))
        checkpoints.save(step, model=model, extra={"step": step})


def test_names_sort_and_count_steps(tmp_path: Path) -> None:
    checkpoints = CheckpointDirectory(tmp_path / "runs" / "one")
    assert checkpoints.latest() is None and checkpoints.steps() == []
    save_steps(checkpoints, 10)
    assert [path.name for path in checkpoints.root.iterdir()] == ["step_00000010"]
    latest = checkpoints.latest()
    assert latest == checkpoints.path(10)
    assert value_at(latest) == 10.0


def test_steps_beyond_eight_digits_stay_in_order(tmp_path: Path) -> None:
    checkpoints = CheckpointDirectory(tmp_path)
    save_steps(checkpoints, 99_999_999, 100_000_000)
    assert checkpoints.steps() == [99_999_999, 100_000_000]


@pytest.mark.parametrize(("keep", "newest_steps"), [(1, [4]), (3, [2, 3, 4]), (None, [1, 2, 3, 4])])
def test_the_newest_are_kept(tmp_path: Path, keep: int | None, newest_steps: list[int]) -> None:
    checkpoints = CheckpointDirectory(tmp_path, keep=keep)
    save_steps(checkpoints, 1, 2, 3, 4)
    assert checkpoints.steps() == newest_steps
    assert len(list(tmp_path.iterdir())) == len(newest_steps)


def test_a_run_resumed_from_an_earlier_step_keeps_its_new_checkpoints(tmp_path: Path) -> None:
    checkpoints = CheckpointDirectory(tmp_path, keep=2)
    save_steps(checkpoints, 10, 20, 30, 5)
    assert checkpoints.steps() == [5, 20, 30]


def test_a_link_to_a_step_elsewhere_is_removed_and_the_step_is_not(tmp_path: Path) -> None:
    root, moved = tmp_path / "run", tmp_path / "moved"
    checkpoints = CheckpointDirectory(root, keep=1)
    save_steps(checkpoints, 1)
    (root / "step_00000001").rename(moved)
    (root / "step_00000001").symlink_to(moved)
    save_steps(checkpoints, 2)
    assert [path.name for path in root.iterdir()] == ["step_00000002"]
    assert any(moved.iterdir())


def test_a_step_can_be_saved_again(tmp_path: Path) -> None:
    checkpoints = CheckpointDirectory(tmp_path)
    save_steps(checkpoints, 1, 1)
    assert checkpoints.steps() == [1]


def test_only_complete_checkpoints_are_seen(tmp_path: Path) -> None:
    checkpoints = CheckpointDirectory(tmp_path)
    save_steps(checkpoints, 1)
    for name in ("step_00000002", "step_00000003.saving-01234567", "step_00000004.removed-01234567", "notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_00000003.saving-01234567" / ".metadata").touch()
    (tmp_path / "step_00000005").touch()
    assert checkpoints.steps() == [1]


@pytest.mark.parametrize("name", ["step_000000001", "step_\uff10\uff10\uff10\uff10\uff10\uff10\uff10\uff19", "step_1"])
def test_names_that_no_step_has_are_let_be(tmp_path: Path, name: str) -> None:
    checkpoints = CheckpointDirectory(tmp_path, keep=2)
    save_steps(checkpoints, 1, 2)
    checkpoints.path(1).rename(tmp_path / name)
    assert checkpoints.steps() == [2]
    save_steps(checkpoints, 3, 4)
    assert checkpoints.steps() == [3, 4] and (tmp_path / name).is_dir()


def test_leftovers_of_killed_saves_at_any_step_are_removed_by_the_next_save(tmp_path: Path) -> None:
    checkpoints = CheckpointDirectory(tmp_path)
    save_steps(checkpoints, 1)
    (tmp_path / "step_00000002.saving-01234567").mkdir()
    (tmp_path / "step_00000000.removed-01234567").mkdir()
    checkpoints.path(1).rename(tmp_path / "step_00000001.replaced-01234567")
    (tmp_path / "notes.saving-01234567").mkdir()
    save_steps(checkpoints, 3)
    assert {path.name for path in tmp_path.iterdir()} == {
        "step_00000001",
        "step_00000003",
        "notes.saving-01234567",
    }
    assert value_at(checkpoints.path(1)) == 1.0


def test_all_ranks_save_one_checkpoint(kit: Kit, tmp_path: Path) -> None:
    def save_three() -> tuple[list[int], dict[str, int]]:
        checkpoints = CheckpointDirectory(tmp_path, keep=2)
        model, optimizer = kit.build(sharded=True)
        for step in (1, 2, 3):
            checkpoints.save(step, model=model, optimizer=optimizer, extra={"step": step})
        latest = checkpoints.latest()
        assert latest is not None
        return checkpoints.steps(), load(latest, model=model, optimizer=optimizer)

    assert run_ranks(save_three, 2) == [([2, 3], {"step": 3})] * 2


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    bad_numbers: list[Any] = [0, 1.5, "7"]
    for keep in bad_numbers:
        with pytest.raises(ValueError, match=f"got keep={keep!r}"):
            CheckpointDirectory(tmp_path, keep=keep)
    bad_steps: list[Any] = [-1, 1.5, "7"]
    for step in bad_steps:
        with pytest.raises(ValueError, match=f"0 or more, got {step!r}"):
            CheckpointDirectory(tmp_path).path(step)
    step_of_numpy: Any = np.int64(7)
    assert CheckpointDirectory(tmp_path).path(step_of_numpy).name == "step_00000007"
