"""`AsyncSaver`: checkpoints written while training goes on."""

import hashlib
import os
import secrets
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

import torch
from torch import nn

from lamella_checkpoint._base.correspondence import Correspondence
from lamella_checkpoint._base.directories import staging_path
from lamella_checkpoint._base.errors import CheckpointFailed
from lamella_checkpoint._base.ranks import exchange, num_ranks, on_device_of, rank
from lamella_checkpoint._state.contents import Ranks
from lamella_checkpoint._state.shares import Tables, differing
from lamella_checkpoint._training.async_process import (
    Failures,
    Job,
    describe,
    is_published,
    is_settled,
    mark_failed,
    outcome,
    part_name,
)
from lamella_checkpoint._training.copies import Copies
from lamella_checkpoint._training.retention import Retention
from lamella_checkpoint._training.save import Part
from lamella_checkpoint._training.staging import Memory, lay_out

_PAUSE_S: Final = 0.1


class SaveHandle:
    """A save in the background.

    Attributes:
        path: The checkpoint's absolute path.
        stage_seconds: Duration of the call to `save`, without the wait for the previous save.
        waited_seconds: Duration of the wait for the previous save.
    """

    def __init__(self, saver: "AsyncSaver", path: Path, staged: Path) -> None:
        self.path = path
        self.stage_seconds = 0.0
        self.waited_seconds = 0.0
        self._saver = saver
        self._staged = staged
        self._copies: Copies | None = None
        self._sender: threading.Thread | None = None
        self._failures: Failures | None = None  # None until the save is settled.
        self._is_told = False

    @property
    def done(self) -> bool:
        """Whether the save has ended: the checkpoint is complete, or `wait` raises."""
        return self._saver._settle(self, timeout=0.0)

    @property
    def held_seconds(self) -> float:
        """Seconds the host has waited for the copies so far, before an optimizer's step or in `wait_staged`."""
        return self._copies.waited_seconds if self._copies is not None else 0.0

    def wait_staged(self) -> None:
        """Wait until the state may be changed.

        Optimizers of `torch.optim` and `load` wait by themselves. Call this before any other change of parameters or
        optimizer state: swapped or hand-written weights, an optimizer of another make, a graph that replays a whole
        step, other ways to load.

        Effects: no collective. Blocks until host tensors have been copied; on an accelerator the current stream
            waits, and the host does not.
        """
        if self._copies is not None:
            self._copies.wait()

    def wait(self, timeout: float | None = None) -> Path:
        """Return the path once the checkpoint is complete and on the disk.

        Args:
            timeout: Seconds after which to give up; None waits without limit.

        Raises:
            CheckpointFailed: The save failed, with the reasons by rank. Every rank raises the error, once.
            TimeoutError: The save has not ended yet.

        Effects: no collective; blocks this thread.
        """
        if not self._saver._settle(self, timeout):
            raise TimeoutError(
                f"Expected the checkpoint {str(self.path)!r} within {timeout} s; it is still being written."
            )
        self._tell()
        return self.path

    def _fail(self, error: BaseException) -> None:
        """This rank's part will not come."""
        self._failures = {rank(): describe(error)}
        mark_failed(self._staged, rank(), describe(error))

    def _tell(self) -> None:
        if self._failures and not self._is_told:
            self._is_told = True
            raise CheckpointFailed(f"save the checkpoint {str(self.path)!r} in the background", self._failures)


class _Session(NamedTuple):
    """The ranks' agreement, for a save or from their first save on."""

    token: str
    apart: frozenset[Ranks]


class Closing(ABC):
    """Closed at the end of a `with` block, unless the block raises: a save in flight then completes by itself."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()

    @abstractmethod
    def close(self) -> None:
        """Wait for saves in flight, and free the resources."""


class AsyncSaver(Closing):
    """Saves in the background, one at a time, through a process beside each rank.

    `save` returns at once. A thread copies this rank's part of the state to host memory while training goes on, up to
    the next optimizer step, which waits for the copies. The process writes the copies, and rank 0's process completes
    the checkpoint when all parts are written. No collective is involved: the save completes if no caller waits for it,
    and also when training ends or fails meanwhile. If any process is killed at any moment, the last complete checkpoint
    stays intact.

    The process has the highest nice value. With a free core, the nice value has no effect; if training takes all
    cores, each of up to four writing threads still gets a seventieth of a core: the checkpoint is late but certain. A
    caller that waits leaves the cores to the process.

        with AsyncSaver() as saver:
            for step in range(num_steps):
                ...
                if step % 100 == 0:
                    saver.save(f"runs/first/{step}", model=model, optimizer=optimizer, extra={"step": step})

    The host memory is as large as this rank's part, is reused from save to save, and is pinned if the state is on CUDA.
    """

    def __init__(self) -> None:
        """Effects: starts the process, which takes a few seconds and imports torch, but uses no GPU."""
        self._memory = Memory()
        self._process: _Process | None = _Process(self._memory)
        self._session: _Session | None = None
        self._tables = Tables()
        self._retention: Retention | None = None  # Set by `CheckpointDirectory`.
        self._num_saves = 0
        self._last: SaveHandle | None = None
        self._asking = threading.Lock()  # An answer arrives once; any thread may wait for it.

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        extra: Mapping[str, object] | None = None,
        correspondences: Sequence[Correspondence] = (),
    ) -> SaveHandle:
        """Begin `lamella_checkpoint.save` in the background, and return while the state is being copied.

        The checkpoint holds the state at the call. Training may go on: the next step of any optimizer of `torch.optim`,
        and `load`, wait until the state has been copied. Before any other change of parameters or optimizer state, call
        the handle's `wait_staged`. After an unguarded change this save fails: no checkpoint mixes two states. Buffers
        may change at any time.

        One save is in flight at a time: the call waits for the previous save, which has ended unless checkpoints
        come faster than the writer.

        Args:
            path: As for `save`; every rank's counts, and must be the same.
            model: As for `save`.
            optimizer: As for `save`.
            extra: As for `save`.
            correspondences: As for `save`; the same for every save.

        Returns:
            A handle for the outcome. May be dropped.

        Raises:
            CheckpointFailed: The previous save failed, on any rank: every rank raises the error here, and nothing has
                begun. Call again to save this state.
            NotImplementedError: A tensor is of a class of its own.
            OSError: Not enough host memory for the state.
            ValueError: As `save`. An error visible only across ranks is raised by the next call.

        Effects: collective on the default group the first time alone (one small exchange), later none; all ranks have
            to call equally often. Copies this rank's part to the host on a thread; on an accelerator on a separate
            stream, which waits for work already queued on the current stream. No host sync.
        """
        began = time.perf_counter()
        self.wait()
        staging = time.perf_counter()

        def collect() -> Part:
            return Part.of(model, optimizer, extra, correspondences, self._tables)

        with on_device_of(model.parameters()):
            self._session = self._session or _agree(collect)
            handle = self._begin(path, self._session, collect)
        handle.waited_seconds, handle.stage_seconds = staging - began, time.perf_counter() - staging
        return handle

    def save_part(self, path: str | os.PathLike[str], collect: Callable[[], Part]) -> SaveHandle:
        """Begin to write a checkpoint, of any form, from each rank's part: for packages with further formats.

        Every other promise is `save`'s. The ranks agree on each save, so that an error of `collect` is raised by this
        call on all ranks.

        Args:
            path: As for `save`; every rank's counts, and must be the same.
            collect: Called once on each rank. No collective.

        Returns:
            A handle for the outcome. May be dropped.

        Raises:
            CheckpointFailed: The previous save failed on any rank, or `collect` on another rank. Nothing has begun.
            NotImplementedError: As `save`.
            OSError: As `save`.

        Effects: as `save`, on the current device, with one small exchange on the default group at each call.
        """
        began = time.perf_counter()
        self.wait()
        staging = time.perf_counter()
        parts: list[Part] = []

        def collected() -> Part:
            parts.append(collect())
            return parts[0]

        handle = self._begin(path, _agree(collected), lambda: parts[0])
        handle.waited_seconds, handle.stage_seconds = staging - began, time.perf_counter() - staging
        return handle

    def wait(self) -> None:
        """Wait until no save is in flight.

        Raises:
            CheckpointFailed: The last save failed, and the failure has not been raised yet.
        """
        if self._last is not None:
            self._last.wait()

    def close(self) -> None:
        """Wait as `wait` does, then free the process and the memory. The next save allocates new ones.

        Raises:
            CheckpointFailed: As `wait`.
        """
        try:
            self.wait()
        finally:
            if self._last is not None and self._last._sender is not None:
                self._last._sender.join()  # The thread copies into the memory: unmapped meanwhile, it would crash.
            if self._process is not None:
                self._process.close()
                self._process = None
            self._memory.close()

    def _begin(self, path: str | os.PathLike[str], session: _Session, collect: Callable[[], Part]) -> SaveHandle:
        """Start the copies of this rank's part. No save is in flight."""
        self._num_saves += 1
        token = hashlib.sha256(f"{session.token} {self._num_saves}".encode()).hexdigest()[:8]
        target = Path(os.path.realpath(path))
        self._last = handle = SaveHandle(self, target, staging_path(target, token))
        try:
            part = collect()
            items, copies = lay_out(part.share.items(session.apart), self._memory)
            handle._copies = Copies(copies, part.steady)
            digests = part.share.digests.items()
            job = Job(
                target=target,
                staged=handle._staged,
                rank=rank(),
                num_ranks=num_ranks(),
                memory_nbytes=self._memory.nbytes,
                items=items,
                digests={ranks: digest for ranks, digest in digests if ranks not in session.apart},
                form=deepcopy(part.form),
                retention=self._retention,
                is_first=self._num_saves == 1,
            )
            self._process = self._process or _Process(self._memory)
            handle._sender = handle._copies.start(partial(_send_or_fail, self._process, job, handle))
        except BaseException as error:
            handle._fail(error)
            raise
        return handle

    def _settle(self, handle: SaveHandle, timeout: float | None) -> bool:
        """Learn the outcome of a save, if known within the time."""
        if handle._failures is not None:
            return True
        deadline = None if timeout is None else time.monotonic() + timeout
        if handle._sender is not None:
            handle._sender.join(_left(deadline))
            if handle._sender.is_alive():
                return False
        left = _left(deadline)
        if not self._asking.acquire(timeout=-1 if left is None else left):
            return False
        try:
            if handle._failures is None:
                handle._failures = self._answer(handle, deadline)
        finally:
            self._asking.release()
        return handle._failures is not None

    def _answer(self, handle: SaveHandle, deadline: float | None) -> Failures | None:
        """The process's answer for a save, or its substitute if the process died; None if unknown in time."""
        if self._process is not None:
            try:
                return self._process.connection.recv() if self._process.connection.poll(_left(deadline)) else None
            except (EOFError, OSError):
                exit_code = self._process.close()
                self._process = None  # The next save starts another process.
                failures = _answer_of_dead(handle, exit_code)
                if failures is not None:
                    return failures
        while not is_settled(handle.path, handle._staged):
            if _left(deadline) == 0.0:
                return None
            time.sleep(_PAUSE_S)
        return outcome(handle.path, handle._staged)


def _agree(collect: Callable[[], Part]) -> _Session:
    """Agree on all ranks, or raise on all. Effects: collective, one exchange."""

    def begin(digests: list[dict[Ranks, str]]) -> list[_Session]:
        return [_Session(secrets.token_hex(16), differing(digests))] * num_ranks()

    return exchange("begin to save in the background", lambda: collect().share.digests, begin)


class _Process:
    """A process that runs `async_process.serve`: started by exec, since a fork is unsafe beside CUDA."""

    def __init__(self, memory: Memory) -> None:
        self.connection, theirs = Pipe()
        # Note [Training comes first]: low priority before the imports. A scheduler sends SIGTERM to every process of a
        # job, and may leave training time to end in order: without SIG_IGN, the checkpoint in flight would be lost.
        code = (
            "import os, signal; os.nice(19); signal.signal(signal.SIGTERM, signal.SIG_IGN); "
            "from lamella_checkpoint._training.async_process import main; main()"
        )
        descriptors = (theirs.fileno(), memory.descriptor)
        self._popen = subprocess.Popen(
            [sys.executable, "-P", "-c", code, *map(str, descriptors)],
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            process_group=0,  # Without a session of its own, by the same note.
            env=os.environ | {
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                "CUDA_VISIBLE_DEVICES": "",  # A CUDA context would take device memory from training.
                "OMP_NUM_THREADS": "1",
            },
        )  # fmt: skip
        theirs.close()  # Kept open here, the connection would never show the process's death as end of file.

    def send(self, job: Job) -> None:
        """Send a job."""
        with suppress(BrokenPipeError, ConnectionResetError):  # A dead process shows when its answer is awaited.
            self.connection.send(job)

    def close(self) -> int:
        """Let the process finish its work and end; returns the exit code."""
        self.connection.close()
        return self._popen.wait()


def _answer_of_dead(handle: SaveHandle, exit_code: int) -> Failures | None:
    """The failures of a save whose process died; None if its part is complete, so other ranks may publish."""
    # In this order: publication moves the part, so a part absent here and from the published checkpoint never existed.
    has_part = (handle._staged / part_name(rank())).exists()
    if is_published(handle.path, handle._staged):
        return {}
    if rank() != 0 and has_part:
        return None
    text = f"the process that writes checkpoints died (exit code {exit_code})"
    mark_failed(handle._staged, rank(), text)
    return {rank(): text}


def _left(deadline: float | None) -> float | None:
    """Seconds until the deadline."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _send_or_fail(process: _Process, job: Job, handle: SaveHandle, error: BaseException | None) -> None:
    """Continue a save after its copies. Effects: raises nothing, as no caller would receive the error."""
    try:
        if error is not None:
            raise error
        process.send(job)
    except BaseException as caught:  # noqa: BLE001
        handle._fail(caught)
