"""An export that is killed at any moment is made again by the same command, byte for byte."""

import os
import random
import signal
import sys
from multiprocessing import get_context
from pathlib import Path
from types import FrameType

import pytest
from trained_runs import Run

from lamella.cli import main


class Calls:
    """Counts the calls of Python functions in this thread, and may kill the process at one of them."""

    def __init__(self, fatal: int | None = None) -> None:
        self.count, self._fatal = 0, fatal

    def note(self, _: FrameType, event: str, __: object) -> None:
        """Count a call, as `sys.setprofile` reports it."""
        self.count += event == "call"
        if self.count == self._fatal:
            os.kill(os.getpid(), signal.SIGKILL)


def exported(run_folder: Path, folder: Path, fatal: int | None = None) -> int | None:
    """Export in a forked process, or kill it at a call; return the number of calls, None of a killed process."""
    receiving, sending = (context := get_context("fork")).Pipe(duplex=False)

    def export() -> None:
        calls = Calls(fatal)
        sys.setprofile(calls.note)
        code = main(["export", str(run_folder), str(folder)])
        sys.setprofile(None)
        assert code == 0
        sending.send(calls.count)

    process = context.Process(target=export)
    process.start()
    process.join()
    assert process.exitcode == (0 if fatal is None else -signal.SIGKILL)
    return receiving.recv() if fatal is None else None


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def check_killed_exports(run: Run, folder: Path, seeds: range) -> None:
    num_calls = exported(run.directory.root, folder / "unbroken")
    assert num_calls is not None
    for seed in seeds:
        # The progress bar's calls depend on the time: the number is not the same to the last tenth.
        exported(run.directory.root, folder / f"{seed}", fatal=random.Random(seed).randrange(1, num_calls * 9 // 10))
        exported(run.directory.root, folder / f"{seed}")
        assert files(folder / f"{seed}") == files(folder / "unbroken")


def test_exports_killed_at_drawn_moments_are_made_again(trained: Run, tmp_path: Path) -> None:
    check_killed_exports(trained, tmp_path, range(2))


@pytest.mark.slow
def test_twenty_exports_killed_at_drawn_moments_are_made_again(trained: Run, tmp_path: Path) -> None:
    check_killed_exports(trained, tmp_path, range(2, 22))
