"""The command `lamella` and its workers, forked from the tests' process instead of started by exec.

For tests whose subject is the run. A started program imports torch and transformers in 6 CPU seconds. Tests of the
start (arguments, environment, the interpreter's exit) start the program as users do.
"""

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import patch

import torch

from lamella_testing._ranks import quiet_fork
from lamella_testing.forked_writers import STANDARD_STREAMS, close_all_but

_MAIN = "lamella.__main__:main"  # names: tests of other layers import no recipe
_LAUNCH = "lamella._processes.launch"
_WORK = "lamella._command.worker:_work"


def fork_lamella(*argv: str) -> "subprocess.Popen[str]":
    """Fork the command `lamella`, in a session of its own and with pipes for its output, and its workers."""

    def serve() -> NoReturn:
        sys.argv = ["lamella", *argv]
        with forked_workers():
            os._exit(resolve_name(_MAIN)())

    pipe = subprocess.PIPE
    return _fork(serve, sys.argv, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


@contextmanager
def forked_workers() -> Iterator[None]:
    """Fork workers in the block; `Popen` does all but the exec: environment, session, pipe, and signals."""
    with patch(f"{_LAUNCH}.subprocess", SimpleNamespace(Popen=_fork_worker, PIPE=subprocess.PIPE)):
        yield


def _fork_worker(command: Sequence[str], *, env: Mapping[str, str], **options: Any) -> "subprocess.Popen[bytes]":
    def serve() -> NoReturn:
        os.environ.clear()
        os.environ.update(env)
        sys.argv = ["worker", command[-1]]
        work = resolve_name(_WORK)
        resolve_name(f"{_LAUNCH}:run_as_worker")(work)
        raise AssertionError("a worker ends its process")

    return _fork(serve, command, **options)


def _fork(
    serve: Callable[[], NoReturn], command: Sequence[str], *, pass_fds: Sequence[int] = (), **options: Any
) -> "subprocess.Popen[Any]":
    """Return a process of `Popen` that serves where it would become the command."""

    def serve_alone() -> NoReturn:
        gc.freeze()
        torch.set_num_threads(1)  # OpenMP's worker threads do not survive a fork.
        close_all_but({*STANDARD_STREAMS, *pass_fds})  # The first is the pipe for whose end `Popen` waits.
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        serve()

    with quiet_fork():
        return subprocess.Popen(
            command,
            pass_fds=pass_fds,
            preexec_fn=serve_alone,
            restore_signals=False,  # A program of Python ignores SIGPIPE: a closed pipe is an exception.
            **options,
        )
