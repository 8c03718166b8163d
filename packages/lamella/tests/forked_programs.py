"""`lamella` and its workers, forked from the tests' process: a program started by exec imports for 6 CPU seconds."""

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import patch

import torch

import lamella.__main__
from lamella._command import worker
from lamella._processes.launch import run_as_worker
from lamella_testing._ranks import quiet_fork

STANDARD_STREAMS = range(3)


def fork_lamella(*argv: str) -> "subprocess.Popen[str]":
    """Fork the command `lamella`, in a session of its own and with pipes for its output, and its workers."""

    def serve() -> NoReturn:
        sys.argv = ["lamella", *argv]
        with forked_workers():
            os._exit(lamella.__main__.main())

    pipe = subprocess.PIPE
    return _fork(serve, sys.argv, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


@contextmanager
def forked_workers() -> Iterator[None]:
    """Fork workers in the block; `Popen` does all but the exec: environment, session, pipe, and signals."""
    with patch("lamella._processes.launch.subprocess", SimpleNamespace(Popen=_fork_worker, PIPE=subprocess.PIPE)):
        yield


def _fork_worker(command: Sequence[str], *, env: Mapping[str, str], **options: Any) -> "subprocess.Popen[bytes]":
    def serve() -> NoReturn:
        os.environ.clear()
        os.environ.update(env)
        sys.argv = [worker.__file__, command[-1]]
        run_as_worker(worker._work)

    return _fork(serve, command, **options)


def _fork(
    serve: Callable[[], NoReturn], command: Sequence[str], *, pass_fds: Sequence[int] = (), **options: Any
) -> "subprocess.Popen[Any]":
    """Return a process of `Popen` that serves where it would become the command."""

    def serve_alone() -> NoReturn:
        gc.freeze()
        torch.set_num_threads(1)  # OpenMP's worker threads do not survive a fork.
        _close_all_but({*STANDARD_STREAMS, *pass_fds})
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


def _close_all_but(descriptors: set[int]) -> None:
    """Close the pipe at whose end the parent's `Popen` returns, and pipes of other workers."""
    for descriptor in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if descriptor not in descriptors:
            with suppress(OSError):  # the descriptor of the listing
                os.close(descriptor)
