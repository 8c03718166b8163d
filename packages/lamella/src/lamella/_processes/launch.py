"""Worker processes of one host: a dead worker stops all workers, and no worker outlives its parent.

Note [Who died first]
    When a rank dies, its peers' collectives fail a moment later, and the peers' errors hide the cause. Every worker
    therefore writes its traceback to its error file before its sockets close, and the oldest file is the cause. A
    worker without an error file (killed by a signal) ranks first: peers of a dead rank end by exceptions.

Note [Workers end with their parent]
    A worker's standard input is a pipe written only by the parent. However the parent ends, even by SIGKILL, the pipe
    closes, and a thread in the worker reads end of file and ends the worker.

Note [Signals wait for a worker]
    A worker imports for seconds, and a signal meanwhile would end the worker with the traceback of some import.
    Workers therefore start with `SIGNALS` blocked, and unblock the signals once `listening` handles them.
    A worker then exits with 128 + the signal once all ranks have saved the step in progress, or with 192 + the signal
    at once, upon which the parent stops the other workers. The parent forwards a signal once all workers train. Earlier
    there is no step to save, and the parent kills the workers.
"""

import os
import shutil
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

from lamella._processes.deaths import describe_death, describe_memory_error, with_memory_limits
from lamella._processes.endings import EXIT_CODES, FAILED, Stopped
from lamella._processes.lock import LOCK_FILE, locked
from lamella._processes.placement import BOARD_VARIABLE, STORE_VARIABLE
from lamella._processes.pulse import FileBoard
from lamella._processes.stop import SIGNALS, StopRequests, listening
from lamella._processes.watch import Watch
from lamella._record.output import log
from lamella._settings.options import ConfigError
from lamella._settings.sections import WaitLimits

_ERROR_FILE_VARIABLE = "LAMELLA_ERROR_FILE"
_POLL_S = 0.05
# Time for every dying worker to write its traceback. Without the wait, a peer's error could pass for the oldest.
_GRACE_S = 0.3

_FOLDER_PREFIX: Final = "lamella-workers-"
_STARTING_S: Final = 5.0

_AT_ONCE: Final = 192  # plus the signal: exit code of a worker that left without saving


class WorkerError(RuntimeError):
    """A worker died, and all other workers have been stopped. The message holds the traceback."""

    def __init__(self, rank: int, report: str) -> None:
        super().__init__(f"Rank {rank} died, and the others have been stopped.\n{report.rstrip()}")
        self.rank, self.report = rank, report


class WorkerTimeoutError(RuntimeError):
    """The workers made no progress within the limits, and have been stopped.

    Attributes:
        rank: The first worker that the others waited for; None where no worker was behind.
    """

    def __init__(self, text: str, rank: int | None) -> None:
        super().__init__(text)
        self.rank = rank


@dataclass(frozen=True, kw_only=True)
class _Worker:
    rank: int
    process: "subprocess.Popen[bytes]"
    error_file: Path

    def died(self) -> bool:
        return self.process.poll() not in (None, 0) and not self.stopped_for()

    def is_training(self) -> bool:
        """True once the worker has reached its training loop: a stop request can wait for the end of a step."""
        return _training_file(self.error_file).exists()

    def stopped_for(self) -> int:
        """Return the signal after which the worker saved its last step and exited; 0 for none."""
        return next((signum for signum in SIGNALS if self.process.returncode == 128 + signum), 0)

    def failure(self) -> BaseException:
        """Return the exception for a dead worker's exit code and error file."""
        code = self.process.returncode
        for signum in SIGNALS:
            if code in (-signum, _AT_ONCE + signum):
                return Stopped(signum)
        for kind, exit_code in EXIT_CODES.items():
            if code == exit_code and self.error_file.exists():
                return kind(self.report())
        return WorkerError(self.rank, self.report())

    def died_at(self) -> int:
        """Return the time of the failure in ns since the epoch; 0 without an error file, see Note [Who died first]."""
        return self.error_file.stat().st_mtime_ns if self.error_file.exists() else 0

    def report(self) -> str:
        if self.error_file.exists():
            return with_memory_limits(self.error_file.read_text(encoding="utf-8"))
        return describe_death(self.process.returncode)


def run_workers(
    command: Sequence[str],
    num_ranks: int,
    num_threads: int,
    *,
    requests: StopRequests | None = None,
    descriptors: Sequence[int] = (),
    limits: WaitLimits | None = None,
) -> None:
    """Run `command` once per rank, with the rank variables of torchrun, until all workers are done.

    Args:
        command: Program and arguments of a worker.
        num_ranks: Number of workers.
        num_threads: Compute threads of each worker; the variable OMP_NUM_THREADS takes precedence.
        requests: Signals received by this process, forwarded to the workers.
        descriptors: Open files inherited by the workers.
        limits: Limits on the time without progress of any worker, for workers that call `process_group`.

    Raises:
        ConfigError, LossNotFiniteError, StorageError: Raised by every worker.
        Stopped: A signal stopped the workers. The step in progress has been saved, unless a worker did not go on.
        WorkerError: A worker died.
        WorkerTimeoutError: No worker made progress within the limits.

    Effects: starts `num_ranks` processes and waits for them. On any exception, `KeyboardInterrupt` included, all
        workers are killed before the call ends.
    """
    with _shared_folder() as (folder, locks):
        workers: list[_Worker] = []
        try:
            # Appended one by one, not in a comprehension: an interruption must find every started worker in the list.
            for rank in range(num_ranks):
                worker = _start(command, rank, num_ranks, num_threads, folder, (*descriptors, *locks))
                workers.append(worker)
            watch = None if limits is None else Watch(num_ranks, limits, time.monotonic())
            _wait(workers, requests or StopRequests(), watch, FileBoard(_board_file(folder), num_ranks))
        finally:
            _stop(workers)


@contextmanager
def _shared_folder() -> Iterator[tuple[Path, tuple[int, ...]]]:
    """Yield a folder for the files between workers and their parent, and the descriptors of its lock.

    Effects: removes folders that killed parents left behind: nobody holds their locks.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*"):
        with suppress(OSError, ConfigError):
            # A folder that a starting run has just made is not locked yet.
            if time.time() - folder.stat().st_mtime > _STARTING_S and (folder / LOCK_FILE).exists():
                with locked(folder):
                    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_FOLDER_PREFIX) as name, locked(Path(name)) as locks:
        yield Path(name), locks


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
        BOARD_VARIABLE: _board_file(folder),
        _ERROR_FILE_VARIABLE: error_file,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", num_threads),
    }
    environment = os.environ | {name: str(value) for name, value in variables.items()}
    # A new session: Ctrl-C reaches only the parent, and the parent decides whether to forward the signal.
    with _signals_blocked():
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, start_new_session=True, pass_fds=descriptors
        )
    return _Worker(rank=rank, process=process, error_file=error_file)


def _board_file(folder: Path) -> Path:
    return folder / "board"


@contextmanager
def _signals_blocked() -> Iterator[None]:
    # A child inherits the signal mask of the thread that starts it: see Note [Signals wait for a worker].
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait(workers: Sequence[_Worker], requests: StopRequests, watch: Watch | None, board: FileBoard) -> None:
    is_passed_on = False
    while any(worker.process.poll() is None for worker in workers):
        if any(worker.died() for worker in workers):
            break
        if requests.signum and not is_passed_on:
            is_passed_on = True
            _pass_on(requests.signum, workers)
        if watch is not None:
            if lines := watch.look(time.monotonic(), board.read(), is_asked_to_stop=is_passed_on):
                log(lines)
            _end_wait(watch, requests.signum)
        time.sleep(_POLL_S)
    if any(worker.died() for worker in workers):
        time.sleep(_GRACE_S)
        raise min((worker for worker in workers if worker.died()), key=_Worker.died_at).failure()
    if signum := max(worker.stopped_for() for worker in workers):
        raise Stopped(signum)


def _end_wait(watch: Watch, signum: int) -> None:
    """Raise where the workers are not to be waited for: see Note [A blocked main thread handles no signal]."""
    if (line := watch.abandons_step()) is not None:
        log([line])
        raise Stopped(signum)
    if (error := watch.timeout()) is not None:
        raise WorkerTimeoutError(error, next(iter(watch.absent()), None))


def _pass_on(signum: int, workers: Sequence[_Worker]) -> None:
    if not all(worker.is_training() for worker in workers):
        raise Stopped(signum)
    print_stopping(signum)
    for worker in workers:
        worker.process.send_signal(signum)


def print_stopping(signum: int) -> None:
    """Print to standard error that the run saves the step in progress and stops."""
    with suppress(OSError):  # In a shell pipeline Ctrl-C also ends the reader of this process's standard error.
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
    """Run `work` in a worker and end the process; errors go to the error file, or to standard error without one.

    `work` receives the stop requests. Before `work` calls `wait_from_now_on`, a signal ends the worker at once.

    Effects: ends the process without the interpreter's exit: threads of the process group that still want the
        interpreter lock can abort the process during the exit (pytorch PR 179291).
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
    except MemoryError as error:
        _report(describe_memory_error(error))
    except BaseException:  # noqa: BLE001  SystemExit in a worker is a failure too.
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
