"""A worker's death stops its peers at once, its cause is told from the consequences, and no process stays behind."""

import os
import re
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lamella import ParallelConfig, WorkerError
from lamella._processes.hosts import Hosts
from lamella._processes.launch import run_workers
from lamella._processes.lock import LOCK_FILE, locked
from lamella._processes.placement import STORE_VARIABLE, process_group
from lamella.cli import main
from lamella_testing import run_ranks

DEADLINE_S = 120  # A longer process hangs, on a busy machine too.

# A worker's program, with `body` and the rank. torch's start-up would take seconds.
PROGRAM = """
    import os, signal, sys, time
    from pathlib import Path
    from lamella._processes.launch import run_as_worker
    rank = int(os.environ["RANK"])
    here = Path(sys.argv[1])
    def work(requests):
        (here / f"pid-{{rank}}").write_text(str(os.getpid()))
        {body}
    run_as_worker(work)
"""


def program(tmp_path: Path, body: str) -> list[str]:
    path = tmp_path / "worker.py"
    path.write_text(textwrap.dedent(PROGRAM).format(body=body), encoding="utf-8")
    return [sys.executable, str(path), str(tmp_path)]


def pids(tmp_path: Path) -> list[int]:
    return [int(path.read_text()) for path in tmp_path.glob("pid-*") if path.read_text()]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()


def wait_until(condition: "object") -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_every_worker_knows_its_rank(tmp_path: Path) -> None:
    body = "(here / f\"out-{rank}\").write_text(f\"{os.environ['LOCAL_RANK']} of {os.environ['WORLD_SIZE']}\")"
    run_workers(program(tmp_path, body), 3, 1)
    assert [(tmp_path / f"out-{rank}").read_text() for rank in range(3)] == ["0 of 3", "1 of 3", "2 of 3"]


def test_a_workers_exception_stops_all_workers_and_is_reported_with_traceback(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # Rank 0 waits for ever; rank 2 fails because rank 1 did, as the peers of a dead rank do, but exits first.
    body = """
        if rank == 0: time.sleep(600)
        if rank == 1:
            from lamella._processes import launch
            report = launch._report
            launch._report = lambda text: (report(text), (here / "reported").touch(), time.sleep(0.2))
            raise ValueError("the cause")
        while not (here / "reported").exists(): time.sleep(0.01)
        raise RuntimeError("a consequence")
    """
    with pytest.raises(WorkerError, match="Rank 1 died") as caught:
        run_workers(program(tmp_path, textwrap.indent(textwrap.dedent(body), "    ").strip()), 3, 1)
    ended = time.monotonic()
    assert "Traceback" in str(caught.value) and "ValueError: the cause" in str(caught.value)
    assert "consequence" not in str(caught.value)
    assert "Traceback" not in capfd.readouterr().err  # The caller prints the error, once.
    assert not any(is_alive(pid) for pid in pids(tmp_path))
    died = (tmp_path / "reported").stat().st_mtime
    assert time.time() - died - (time.monotonic() - ended) < 5


def test_a_worker_that_is_killed_is_named_with_its_signal(tmp_path: Path) -> None:
    body = "os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else time.sleep(600)"
    with pytest.raises(WorkerError, match="Rank 1 died, and the others have been stopped.\nIt was ended by SIGKILL"):
        run_workers(program(tmp_path, body), 2, 1)
    assert not any(is_alive(pid) for pid in pids(tmp_path))


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("os.abort()", r"It was ended by SIGABRT: a library gave up, .* want of memory; its last words"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", r"It was ended by SIGSEGV: a library gave up"),
        ("os.kill(os.getpid(), signal.SIGKILL)", r"It was ended by SIGKILL: .* where memory runs out .*--batch-size"),
        ("os.kill(os.getpid(), signal.SIGALRM)", r"It was ended by SIGALRM\."),  # SIGHUP is ignored under nohup
        ("os.kill(os.getpid(), signal.SIGRTMIN + 6)", r"It was ended by signal \d\d\."),
        ("os._exit(127)", r"It left with exit code 127: the loader could not load a library, or had no memory"),
        ("os._exit(9)", r"It left with exit code 9 and no traceback"),
        ("raise MemoryError", r"Memory ran out, in work \(.*worker.py:\d+\)\. Give it more memory"),
    ],
)
def test_a_worker_that_dies_without_a_traceback_is_told_with_its_likely_cause_in_one_line(
    end: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(WorkerError) as death:
        run_workers(program(tmp_path, end), 1, 1)
    headline, line = str(death.value).splitlines()
    assert headline == "Rank 0 died, and the others have been stopped."
    assert re.match(words, line)


def test_memory_limits_are_named_when_a_worker_dies_out_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = resource.getrlimit

    def limited(kind: int) -> tuple[int, int]:
        return (1500 << 20, resource.RLIM_INFINITY) if kind == resource.RLIMIT_AS else before(kind)

    monkeypatch.setattr(resource, "getrlimit", limited)
    limit = "Each process is limited to 1500 MiB (`ulimit -v`) of memory: raise the limit."
    for end in ("os.abort()", 'raise RuntimeError("[enforce fail] DefaultCPUAllocator: can\'t allocate memory")'):
        with pytest.raises(WorkerError) as death:
            run_workers(program(tmp_path, end), 1, 1)
        assert str(death.value).endswith(limit)
    with pytest.raises(WorkerError) as death:
        run_workers(program(tmp_path, 'raise RuntimeError("another")'), 1, 1)
    assert limit not in str(death.value)
    # Told first: in the process of the command a library may abort too, with nobody left to say why.
    assert main(["train", "--print-config"]) == 0
    assert f"lamella: warning: {limit} Libraries that find no memory" in capsys.readouterr().err


def test_memory_that_runs_out_in_the_command_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def out_of_memory(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("lamella._command.main.to_toml", out_of_memory)
    assert main(["train", "--print-config"]) == 1
    assert re.fullmatch(
        r"lamella: error: Memory ran out, in out_of_memory \(.*\)\. Give it more .*\n", capsys.readouterr().err
    )


def test_a_worker_that_exits_early_has_died(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="SystemExit: 3"):
        run_workers(program(tmp_path, "sys.exit(3)"), 1, 1)


@pytest.fixture
def parent(start_python: Callable[..., "subprocess.Popen[str]"], tmp_path: Path) -> "subprocess.Popen[str]":
    """A parent whose two workers would take ten minutes."""
    command = program(tmp_path, "time.sleep(600)")
    started = start_python("-c", f"from lamella._processes.launch import run_workers; run_workers({command!r}, 2, 1)")
    wait_until(lambda: len(pids(tmp_path)) == 2)
    return started


def test_an_interrupted_parent_takes_its_workers_along(parent: "subprocess.Popen[str]", tmp_path: Path) -> None:
    parent.send_signal(signal.SIGINT)
    _, errors = parent.communicate(timeout=DEADLINE_S)
    assert "KeyboardInterrupt" in errors
    assert not any(is_alive(pid) for pid in pids(tmp_path))


def test_only_worker_folders_of_killed_parents_are_removed_by_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    names = ("lamella-workers-killed", "lamella-workers-running", "lamella-workers-starting", "mine")
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "error-0").touch()
    for name in names[:2]:
        (tmp_path / name / LOCK_FILE).touch()
    with locked(tmp_path / names[1]):
        for name in names:
            os.utime(tmp_path / name, (0, 0))
        run_workers(program(tmp_path, "pass"), 1, 1)
        assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == sorted(names[1:])


def test_workers_leave_when_their_parent_is_killed(parent: "subprocess.Popen[str]", tmp_path: Path) -> None:
    parent.kill()
    parent.communicate(timeout=DEADLINE_S)
    wait_until(lambda: not any(is_alive(pid) for pid in pids(tmp_path)))


def test_ranks_of_torchrun_wait_for_rank_0_longer_than_torch_does() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def on_rank() -> tuple[int, bool]:
        rank = dist.get_rank()
        dist.barrier()  # a rank that leaves while its peer joins closes the peer's connection
        dist.destroy_process_group()
        setattr(dist.distributed_c10d, "default_pg_timeout", timedelta(seconds=1))  # noqa: B010
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in variables.items()})
        os.environ.pop(STORE_VARIABLE, None)
        hosts = Hosts.joined()
        if rank == 0:
            time.sleep(2)  # Rank 0 makes the tokens.
        hosts.agree("preparation")
        with process_group(ParallelConfig(device="cpu"), hosts=hosts) as worker:
            total = torch.tensor(worker.rank)
            dist.all_reduce(total)
        return int(total), dist.is_initialized()

    assert run_ranks(on_rank, 2) == [(1, False), (1, False)]
