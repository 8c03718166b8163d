"""Processes that write checkpoints, forked from their ranks instead of started by exec.

For tests whose subject is the saving run. A started process imports torch in 2.5 CPU seconds beside each rank; a
forked process inherits torch, and the rank's priority: with the lowest, as a started process has, it would starve
beside the ranks of other tests. Tests of the process (start, priority, environment) start the process as users do.
"""

import faulthandler
import functools
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NoReturn
from unittest.mock import patch

import torch

from lamella_testing._ranks import quiet_fork

_START = "lamella_checkpoint._training.writer.start_process"  # a name: tests of other layers import no checkpoint
_MAIN = "lamella_checkpoint._training.async_process.main"
_POLL_S = 0.005
STANDARD_STREAMS = range(3)


@contextmanager
def forked_writers() -> Iterator[None]:
    """Fork the processes of lamella_checkpoint in the block, in this process and in forked ranks.

    A rank with CUDA in use starts the process, as users' ranks do: a fork is unsafe beside CUDA.
    """
    start = resolve_name(_START)

    @functools.wraps(start)
    def start_or_fork(descriptors: Sequence[int]) -> Any:
        return start(descriptors) if torch.cuda.is_initialized() else _fork(descriptors)  # type: ignore[no-untyped-call]

    with patch(_START, start_or_fork):
        yield


@contextmanager
def started_writers() -> Iterator[None]:
    """Start processes by exec again, in a part of a block of `forked_writers`."""
    with patch(_START, resolve_name(_START).__wrapped__):
        yield


class _ForkedProcess:
    """The part of `subprocess.Popen` used by a rank for the writing process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._exit_code: int | None = None
        self._waiting = threading.Lock()  # Of two waiting threads, the second would find no process.

    def poll(self) -> int | None:
        with self._waiting:
            if self._exit_code is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self._exit_code = os.waitstatus_to_exitcode(status) if pid else None
            return self._exit_code

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (exit_code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"the forked process {self.pid}", timeout)
            time.sleep(_POLL_S)
        return exit_code

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)


def _fork(descriptors: Sequence[int]) -> _ForkedProcess:
    with quiet_fork():
        pid = os.fork()
    if pid == 0:
        _serve(descriptors)
    return _ForkedProcess(pid)


def _serve(descriptors: Sequence[int]) -> NoReturn:
    """Become the process that `start_process` would start."""
    exit_code = 1
    try:
        gc.freeze()
        torch.set_num_threads(1)  # OpenMP's worker threads do not survive a fork.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        faulthandler.disable()  # The handler would write into the rank's file.
        os.setpgid(0, 0)
        close_all_but({*STANDARD_STREAMS, *descriptors})
        sys.argv[1:] = map(str, descriptors)
        resolve_name(_MAIN)()
        exit_code = 0
    except BaseException:  # noqa: BLE001  No error may go on in a second copy of the rank.
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)


def close_all_but(descriptors: set[int]) -> None:
    """Close the parent's files in a fork. Peers see a rank's death by the end of the rank's connections."""
    for descriptor in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if descriptor not in descriptors:
            try:
                os.close(descriptor)
            except OSError:  # the descriptor of the listing
                continue
