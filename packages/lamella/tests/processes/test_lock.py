"""One run at a time in a folder: the second is refused, and the lock dies with the last process of a run."""

import os
import socket
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from lamella import Config, ConfigError
from lamella._processes.lock import LOCK_FILE, locked
from lamella._training.host_preparation import lock
from lamella.cli import main

HOLD = """
import subprocess, sys, time
from pathlib import Path
from lamella._processes.lock import locked
with locked(Path(sys.argv[1])) as descriptors:
    child = subprocess.Popen([sys.executable, "-c", "input()", sys.argv[1]], stdin=sys.stdin, pass_fds=descriptors)
    print(flush=True)
    time.sleep(600)
"""


def test_a_second_run_in_a_folder_is_refused_with_the_process_of_the_first(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lamella._command.train.prepare", lambda *_: pytest.fail("the second run was prepared"))
    with locked(tmp_path / "run"):
        assert main(options) == 2
    first = f"of process {os.getpid()} on {socket.gethostname()}"
    where = str(tmp_path / "run")
    error = f"Expected no other run in {where!r}, got one {first}. Wait for its end, or pass another --run-dir."
    assert capsys.readouterr() == ("", f"lamella: error: {error}\n")


def test_a_run_that_ends_leaves_no_lock_and_no_empty_folder(tmp_path: Path) -> None:
    with locked(tmp_path / "runs" / "one"):
        assert (tmp_path / "runs" / "one" / LOCK_FILE).exists()
    assert not list(tmp_path.iterdir())
    with locked(tmp_path / "runs"):
        (tmp_path / "runs" / "metrics.jsonl").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["runs", "metrics.jsonl"]


def test_a_refused_run_leaves_nothing(options: list[str], tmp_path: Path) -> None:
    assert main([*options, "--data", "absent"]) == 2
    assert not (tmp_path / "run").exists()


def test_the_lock_of_a_run_that_was_killed_is_taken_over_once_its_workers_are_gone(
    start_python: Callable[..., "subprocess.Popen[str]"], tmp_path: Path
) -> None:
    run = start_python("-c", HOLD, f"{tmp_path}/", stdin=subprocess.PIPE)
    assert run.stdout is not None and run.stdout.read(1) == "\n"
    run.kill()
    run.wait()
    with pytest.raises(ConfigError, match=f"got one of process {run.pid} on "), locked(tmp_path):
        pass
    assert run.communicate("\n") == ("", "")  # The worker reads the line and ends, and with it the pipes.
    with locked(tmp_path):
        assert (tmp_path / LOCK_FILE).read_text().startswith(f"of process {os.getpid()} ")


def test_a_lock_file_that_may_only_be_read_locks_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock file of another user; a test as root may write to any."""
    open_file = os.open

    def open_for_reading_only(path: Path, flags: int, *mode: int) -> int:
        if Path(path).name == LOCK_FILE and flags & os.O_RDWR:
            raise PermissionError(13, "Permission denied", str(path))
        return open_file(path, flags, *mode)

    with locked(tmp_path):
        monkeypatch.setattr("os.open", open_for_reading_only)
        with pytest.raises(ConfigError, match=f"got one of process {os.getpid()} on "), locked(tmp_path):
            pass
    (tmp_path / LOCK_FILE).touch()  # of a run that was killed
    with locked(tmp_path) as descriptors:
        assert len(descriptors) == 1


def test_a_lock_that_cannot_be_opened_refuses_the_run(options: list[str], tmp_path: Path) -> None:
    (tmp_path / "run" / LOCK_FILE).mkdir(parents=True)
    assert main(options) == 2
    with pytest.raises(ConfigError, match="Expected to lock .*lock', got Is a directory. Another run may be using"):
        locked(tmp_path / "run").__enter__()


def test_a_file_system_without_locks_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with locked(tmp_path) as descriptors:
        assert descriptors == ()
    assert "cannot be locked (Function not implemented). Start no second run in it." in capsys.readouterr().err


def test_the_checkpoint_folder_of_a_run_is_locked_for_other_runs(config: Config, tmp_path: Path) -> None:
    checkpoints = str(tmp_path / "run" / "checkpoints")
    other = replace(config, run=replace(config.run, directory=str(tmp_path / "other"), checkpoints=checkpoints))
    for first, second, option in ((config, other, "--checkpoints"), (other, config, "--run-dir")):
        with ExitStack() as locks:
            lock(first, locks)
            expected = f"Expected no other run with its checkpoints in '.*/run/checkpoints', got .* another {option}"
            with pytest.raises(ConfigError, match=expected):
                lock(second, locks)
        assert not (tmp_path / "run").exists()


def test_a_run_may_keep_its_checkpoints_in_its_folder_itself(config: Config, tmp_path: Path) -> None:
    with ExitStack() as locks:
        assert len(lock(replace(config, run=replace(config.run, checkpoints=str(tmp_path / "run"))), locks)) == 2
