"""Workers of one host, started as processes: one that dies stops the others, and none outlives its parent.

Note [Who died first]
    When a rank dies its peers' collectives fail too, a moment later, and their complaints hide the cause. Every
    worker therefore leaves its traceback in a file of its own before its sockets close, and the oldest file is the
    cause. A worker that dies without leaving one (a signal) comes first of all: exceptions are what its peers leave.

Note [Nobody stays behind]
    A worker's standard input is a pipe that only the parent can write to. However the parent ends, the pipe closes,
    and a thread in the worker sees that and leaves.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from lamella._place import STORE_VARIABLE

_ERROR_FILE_VARIABLE = "LAMELLA_ERROR_FILE"
_POLL_S = 0.05
# How long peers get to leave their own tracebacks, so that the oldest can be told.
_GRACE_S = 0.3


class WorkerError(RuntimeError):
    """A worker died; the others have been stopped. The text holds its traceback."""

    def __init__(self, rank: int, report: str) -> None:
        super().__init__(f"Rank {rank} died, and the others have been stopped.\n{report.rstrip()}")
        self.rank = rank


@dataclass(frozen=True, kw_only=True)
class _Worker:
    rank: int
    process: "subprocess.Popen[bytes]"
    error_file: Path

    def died(self) -> bool:
        return self.process.poll() not in (None, 0)

    def died_at(self) -> int:
        """When it failed, in ns since the epoch; 0 if it left no traceback."""
        return self.error_file.stat().st_mtime_ns if self.error_file.exists() else 0

    def report(self) -> str:
        if self.error_file.exists():
            return self.error_file.read_text(encoding="utf-8")
        code = self.process.returncode
        return f"It was ended by {signal.Signals(-code).name}." if code < 0 else f"It left with exit code {code}."


def run_workers(command: Sequence[str], num_ranks: int, num_threads: int) -> None:
    """Run `command` once for each rank, with the variables torchrun sets, until all are done.

    Args:
        num_threads: Compute threads of each worker, unless OMP_NUM_THREADS says otherwise.

    Raises:
        WorkerError: A worker died.

    Effects: starts processes and waits; on any exception (Ctrl-C is one) all of them are gone when it returns.
    """
    with tempfile.TemporaryDirectory(prefix="lamella-") as folder:
        workers: list[_Worker] = []
        try:
            # Appended one by one: an interruption meanwhile stops those that have started.
            for rank in range(num_ranks):
                workers.append(_start(command, rank, num_ranks, num_threads, Path(folder)))  # noqa: PERF401
            _wait(workers)
        finally:
            _stop(workers)


def _start(command: Sequence[str], rank: int, num_ranks: int, num_threads: int, folder: Path) -> _Worker:
    error_file = folder / f"error-{rank}"
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": num_ranks,
        "LOCAL_WORLD_SIZE": num_ranks,
        STORE_VARIABLE: f"file://{folder / 'store'}",
        _ERROR_FILE_VARIABLE: error_file,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", num_threads),
    }
    environment = os.environ | {name: str(value) for name, value in variables.items()}
    # A session of its own: Ctrl-C reaches the parent alone, which then decides.
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, start_new_session=True)
    return _Worker(rank=rank, process=process, error_file=error_file)


def _wait(workers: Sequence[_Worker]) -> None:
    while any(worker.process.poll() is None for worker in workers):
        if any(worker.died() for worker in workers):
            break
        time.sleep(_POLL_S)
    if any(worker.died() for worker in workers):
        time.sleep(_GRACE_S)
        first = min((worker for worker in workers if worker.died()), key=_Worker.died_at)
        raise WorkerError(first.rank, first.report())


def _stop(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.process.kill()
    for worker in workers:
        worker.process.wait()
        if worker.process.stdin is not None:
            worker.process.stdin.close()


def run_as_worker(work: Callable[[], object]) -> NoReturn:
    """Do a worker's work and leave; what it raises goes into its error file, or to standard error if it has none.

    Effects: ends the process without running the interpreter's exit: threads of the process group that still want the
        interpreter lock then can abort it (pytorch PR 179291).
    """
    if _ERROR_FILE_VARIABLE in os.environ:
        threading.Thread(target=_leave_with_parent, daemon=True).start()
    code = 1
    try:
        work()
        code = 0
    except BaseException:  # noqa: BLE001  SystemExit is a death too.
        _report(traceback.format_exc())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _leave_with_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


def _report(text: str) -> None:
    path = os.environ.get(_ERROR_FILE_VARIABLE)
    if path is None:
        print(text, file=sys.stderr)
    else:
        Path(path).write_text(text, encoding="utf-8")
