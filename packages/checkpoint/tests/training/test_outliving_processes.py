"""A process that writes outlives its killed run, and takes nothing from the run that follows."""

import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist
from test_async_save import DEADLINE_S, filled, in_child, until, value_at

from lamella_checkpoint import AsyncSaver, CheckpointDirectory, CheckpointFailed
from lamella_checkpoint._training import handle as _handle
from lamella_checkpoint._training.async_process import Job, part_name
from lamella_checkpoint._training.staging import Memory
from lamella_checkpoint._training.writer import Writer
from lamella_testing import run_ranks
from lamella_testing.forked_writers import started_writers
from lamella_testing.held_starts import HeldStart


def checkpoints_held(start: HeldStart, root: Path) -> CheckpointDirectory:
    """A directory whose process that writes is held."""
    checkpoints = CheckpointDirectory(root)
    with start.holding(), started_writers():
        checkpoints._saver = AsyncSaver()
    return checkpoints


@pytest.fixture
def outliving(tmp_path: Path) -> HeldStart:
    """The process of a run of one rank that was killed once its state of ones had been copied."""
    start = HeldStart(tmp_path / "outliving")

    def save_and_leave() -> None:
        sender = checkpoints_held(start, tmp_path / "runs").save_async(2, model=filled(1.0))._sender
        assert sender is not None
        sender.join()

    assert in_child(save_and_leave) == 0
    return start


def names(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "runs").iterdir()]


def test_a_save_completes_though_a_process_of_a_killed_run_clears_leftovers_meanwhile(
    tmp_path: Path, outliving: HeldStart
) -> None:
    def save() -> None:
        start = HeldStart(tmp_path / f"rank-{dist.get_rank()}")
        checkpoints = checkpoints_held(start, tmp_path / "runs")
        handle = checkpoints.save_async(2, model=filled(2.0))
        if dist.get_rank() == 0:
            until((handle._staged / part_name(1)).exists)
            outliving.run_to_end()
        start.release()
        handle.wait(timeout=DEADLINE_S)
        checkpoints.close()

    run_ranks(save, 2)
    assert value_at(CheckpointDirectory(tmp_path / "runs").path(2)) == 2.0
    assert names(tmp_path) == ["step_00000002"]


def test_a_process_of_a_killed_run_replaces_no_later_checkpoint(tmp_path: Path, outliving: HeldStart) -> None:
    with CheckpointDirectory(tmp_path / "runs") as checkpoints:
        checkpoints.save_async(2, model=filled(2.0)).wait()
    outliving.run_to_end()
    assert value_at(checkpoints.path(2)) == 2.0
    assert names(tmp_path) == ["step_00000002"]


def test_a_save_of_a_killed_run_that_is_discarded_never_completes(tmp_path: Path, outliving: HeldStart) -> None:
    checkpoints = CheckpointDirectory(tmp_path / "runs")
    assert [name.rpartition("-")[0] for name in names(tmp_path)] == ["step_00000002.saving"]
    (other := tmp_path / "runs" / "notes.saving-01234567").mkdir()
    checkpoints.discard_unfinished()
    outliving.run_to_end()
    assert checkpoints.steps() == [] and names(tmp_path) == [other.name]


def test_a_save_whose_directory_is_removed_meanwhile_fails_at_once_on_every_rank(tmp_path: Path) -> None:
    def save() -> list[int]:
        start = HeldStart(tmp_path / f"rank-{dist.get_rank()}")
        checkpoints = checkpoints_held(start, tmp_path / "runs")
        handle = checkpoints.save_async(2, model=filled(2.0))
        if dist.get_rank() == 0:
            start.release()
            until((handle._staged / part_name(0)).exists)
            shutil.rmtree(handle._staged)
        until((handle._staged / "failed-0").exists)
        start.release()  # A rank waits for its own process, which reads its memory.
        with pytest.raises(CheckpointFailed, match="rank 0: FileNotFoundError: .*one save at a time") as info:
            handle.wait(timeout=DEADLINE_S)
        checkpoints.close()
        return sorted(info.value.failures)

    assert run_ranks(save, 2) == [[0], [0]]
    assert CheckpointDirectory(tmp_path / "runs").steps() == []


def test_an_async_save_on_a_silent_file_system_fails_within_its_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = threading.Event()

    def begun(job: Job) -> Job:
        answer.wait()
        return job

    monkeypatch.setattr(_handle, "_OVERRUN_S", 0.1)
    with AsyncSaver(timeout=0.1) as saver:
        with monkeypatch.context() as silent:
            silent.setattr(Job, "begun", begun)
            handle = saver.save(tmp_path / "a", model=filled(1.0))
            with pytest.raises(CheckpointFailed, match="rank 0: no outcome was known within 0.1 s"):
                handle.wait(timeout=DEADLINE_S)
        answer.set()
    with AsyncSaver() as saver:
        saver.save(tmp_path / "a", model=filled(2.0))
    assert value_at(tmp_path / "a") == 2.0


def test_the_connection_of_a_process_is_closed_once_by_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer(Memory())
    closed = []

    def close_slowly() -> None:
        time.sleep(0.05)
        os.close(writer._connection.fileno())
        closed.append(True)

    monkeypatch.setattr(writer._connection, "_close", close_slowly)
    with ThreadPoolExecutor(2) as pool:
        codes = [pool.submit(writer.close) for _ in range(2)]
    assert [code.result() for code in codes] == [0, 0] and closed == [True]
