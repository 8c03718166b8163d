"""An export that is killed at any moment is made again by the same command, byte for byte."""

import random
from pathlib import Path

import pytest
from drawn_kills import calls_in_process
from trained_runs import Run

from lamella.cli import main


def exported(run_folder: Path, folder: Path, fatal: int | None = None) -> int | None:
    """Export in a forked process, or kill it at a call; return the number of calls, None of a killed process."""

    def export() -> None:
        assert main(["export", str(run_folder), str(folder)]) == 0

    return calls_in_process(export, fatal)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def check_killed_exports(run: Run, folder: Path, seeds: range) -> None:
    num_calls = exported(run.directory.root, folder / "unbroken")
    assert num_calls is not None
    for seed in seeds:
        exported(run.directory.root, folder / f"{seed}", fatal=random.Random(seed).randint(1, num_calls))
        exported(run.directory.root, folder / f"{seed}")
        assert files(folder / f"{seed}") == files(folder / "unbroken")


def test_exports_killed_at_drawn_moments_are_made_again(trained: Run, tmp_path: Path) -> None:
    check_killed_exports(trained, tmp_path, range(2))


@pytest.mark.slow
def test_twenty_exports_killed_at_drawn_moments_are_made_again(trained: Run, tmp_path: Path) -> None:
    check_killed_exports(trained, tmp_path, range(2, 22))
