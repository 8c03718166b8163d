"""Workers of one host, started as processes: one that dies stops the others, and none outlives its parent.

Note [Who died first]
    When a rank dies its peers' collectives fail too, a moment later, and their complaints hide the cause. Every
    worker therefore leaves its traceback in a file of its own before its sockets close, and the oldest file is the
    cause. A worker that dies without leaving one (a signal) comes first of all: exceptions are what its peers leave.

Note [Nobody stays behind]
    A worker's standard input is a pipe that only the parent can write to. However the parent ends, the pipe closes,
    and a thread in the worker sees that and leaves.

Note [Signals wait for a worker]
    A worker takes seconds to import what it needs, and a signal meanwhile would end it with a traceback of some import.
    So it starts with SIGINT and SIGTERM blocked, and lets them through once it listens. It then leaves with 128 + the
    signal when its last step is saved, as all ranks do, or with 192 + the signal at once, which stops the others too.
    The parent passes a request on once all workers train. Before, there is nothing to save, and it stops them itself.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from lamella._endings import EXIT_CODES, FAILED, Stopped
from lamella._place import STORE_VARIABLE
from lamella._stop import SIGNALS, StopRequests, listening

_ERROR_FILE_VARIABLE = "LAMELLA_ERROR_FILE"
_POLL_S = 0.05
# How long peers get to leave their own tracebacks, so that the oldest can be told.
_GRACE_S = 0.3

_AT_ONCE: Final = 192


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
        return self.process.poll() not in (None, 0) and not self.stopped_for()

    def is_training(self) -> bool:
        """Whether it has something to save when it is asked to stop, or is about to."""
        return _training_file(self.error_file).exists()

    def stopped_for(self) -> int:
        """The signal after which it has saved its last step; 0 for none."""
        return next((signum for signum in SIGNALS if self.process.returncode == 128 + signum), 0)

    def failure(self) -> BaseException:
        """What became of it, once it has died."""
        code = self.process.returncode
        for signum in SIGNALS:
            if code in (-signum, _AT_ONCE + signum):
                return Stopped(signum)
        for kind, exit_code in EXIT_CODES.items():
            if code == exit_code and self.error_file.exists():
                return kind(self.report())
        return WorkerError(self.rank, self.report())

    def died_at(self) -> int:
        """When it failed, in ns since the epoch; 0 if it left no traceback."""
        return self.error_file.stat().st_mtime_ns if self.error_file.exists() else 0

    def report(self) -> str:
        if self.error_file.exists():
            return self.error_file.read_text(encoding="utf-8")
        code = self.process.returncode
        return f"It was ended by {signal.Signals(-code).name}." if code < 0 else f"It left with exit code {code}."


def run_workers(
    command: Sequence[str],
    num_ranks: int,
    num_threads: int,
    *,
    requests: StopRequests | None = None,
    descriptors: Sequence[int] = (),
) -> None:
    """Run `command` once for each rank, with the variables torchrun sets, until all are done.

    Args:
        num_threads: Compute threads of each worker, unless OMP_NUM_THREADS says otherwise.
        requests: What this process is asked; passed on to the workers.
        descriptors: Open files that the workers inherit.

    Raises:
        ConfigError, LossNotFiniteError, StorageError: What every worker has raised.
        Stopped: The workers have been asked to stop, and have saved what there was.
        WorkerError: A worker died.

    Effects: starts processes and waits; on any exception (Ctrl-C is one) all of them are gone when it returns.
    """
    with tempfile.TemporaryDirectory(prefix="lamella-") as folder:
        workers: list[_Worker] = []
        try:
            # Appended one by one: an interruption meanwhile stops those that have started.
            for rank in range(num_ranks):
                worker = _start(command, rank, num_ranks, num_threads, Path(folder), descriptors)
                workers.append(worker)
            _wait(workers, requests or StopRequests())
        finally:
            _stop(workers)


def _start(
    command: Sequence[str], rank: int, num_ranks: int, num_threads: int, folder: Path, descriptors: Sequence[int]
) -> _Worker:
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
    with _signals_blocked():
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, start_new_session=True, pass_fds=descriptors
        )
    return _Worker(rank=rank, process=process, error_file=error_file)


@contextmanager
def _signals_blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait(workers: Sequence[_Worker], requests: StopRequests) -> None:
    is_passed_on = False
    while any(worker.process.poll() is None for worker in workers):
        if any(worker.died() for worker in workers):
            break
        if requests.signum and not is_passed_on:
            is_passed_on = True
            _pass_on(requests.signum, workers)
        time.sleep(_POLL_S)
    if any(worker.died() for worker in workers):
        time.sleep(_GRACE_S)
        raise min((worker for worker in workers if worker.died()), key=_Worker.died_at).failure()
    if signum := max(worker.stopped_for() for worker in workers):
        raise Stopped(signum)


def _pass_on(signum: int, workers: Sequence[_Worker]) -> None:
    if not all(worker.is_training() for worker in workers):
        raise Stopped(signum)
    say_stopping(signum)
    for worker in workers:
        worker.process.send_signal(signum)


def say_stopping(signum: int) -> None:
    """Tell whoever asked that the run has heard, and what it does about it."""
    with suppress(OSError):  # Ctrl-C ends the reader of a pipe as well.
        name = signal.Signals(signum).name
        print(f"lamella: {name}: finishing the step and saving it. Once more, and it stops at once.", file=sys.stderr)


def _stop(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.process.kill()
    for worker in workers:
        worker.process.wait()
        if worker.process.stdin is not None:
            worker.process.stdin.close()


def run_as_worker(work: Callable[[StopRequests], object]) -> NoReturn:
    """Do a worker's work and leave; what it raises goes into its error file, or to standard error if it has none.

    `work` is given what the worker is asked, from its `wait_from_now_on` on; before, a signal ends the worker at once.

    Effects: ends the process without running the interpreter's exit: threads of the process group that still want the
        interpreter lock then can abort it (pytorch PR 179291).
    """
    if _ERROR_FILE_VARIABLE in os.environ:
        threading.Thread(target=_leave_with_parent, daemon=True).start()
    code = FAILED
    try:
        with listening(lambda signum: os._exit(_AT_ONCE + signum), when_it_can_wait=_tell_of_training) as requests:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            work(requests)
        code = 0
    except Stopped as stopped:
        code = stopped.exit_code
    except tuple(EXIT_CODES) as error:
        code = EXIT_CODES[type(error)]
        _report(f"{error}")
    except BaseException:  # noqa: BLE001  SystemExit is a death too.
        _report(traceback.format_exc())
    finally:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _tell_of_training() -> None:
    if path := os.environ.get(_ERROR_FILE_VARIABLE):
        _training_file(Path(path)).touch()


def _training_file(error_file: Path) -> Path:
    return error_file.with_suffix(".training")


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
