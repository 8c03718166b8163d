"""`AsyncSaver`: checkpoints written while training goes on."""

import hashlib
import os
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import torch
from torch import nn

from lamella_checkpoint._base.ranks import exchange, num_ranks, on_device_of, rank
from lamella_checkpoint._state.shares import Tables, differing
from lamella_checkpoint._training.async_process import Job
from lamella_checkpoint._training.copies import StateCopies
from lamella_checkpoint._training.handle import Limits, SaveHandle
from lamella_checkpoint._training.outcomes import Outcomes
from lamella_checkpoint._training.retention import Retention
from lamella_checkpoint._training.save import SavePart
from lamella_checkpoint._training.staging import Memory, lay_out
from lamella_checkpoint._training.writer import Writer
from lamella_files import CheckpointFailed, Correspondence, staging_path


class _Session(NamedTuple):
    """The ranks' agreement, for a save or from their first save on, until the saver is closed."""

    token: str
    apart: frozenset[str]


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

    def __init__(self, *, timeout: float | None = 600.0, print_line: Callable[[str], object] | None = None) -> None:
        """Start the process.

        Args:
            timeout: Seconds from the end of a save's copies, within which every rank has to write its part, and rank 0
                to complete the checkpoint. A save that takes longer (a disk that does not answer, a process that was
                stopped) fails on every rank, with the late ranks in the error, and its late process is killed. Raise
                the limit for large states on slow disks; None sets none. The same on every rank.
            print_line: Called with a line for each minute that a save, `wait` or `close` waits for an earlier save, in
                the waiting thread: "checkpoint step_00000040: waiting for rank 1's part since 60 s". None logs the line
                as a warning of the logger "lamella_checkpoint".

        Raises:
            ValueError: `timeout` is not above zero.

        Effects: the process takes a few seconds to start and imports torch, but uses no GPU.
        """
        self._limits = Limits(timeout, print_line)
        self._memory = Memory()
        self._process: Writer | None = Writer(self._memory)
        self._session: _Session | None = None
        self._tables = Tables()
        self._retention: Retention | None = None  # Set by `CheckpointDirectory`.
        self._num_saves = 0
        self._saves: list[SaveHandle] = []  # The last, and any whose failure has not been raised.

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

        An interrupted call (Ctrl-C) leaves its save in flight, or fails the save on every rank. If a rank has left out
        a call, close the saver on every rank: the next save agrees anew.

        Args:
            path: The checkpoint's directory, on storage that every rank sees. The same on every rank.
            model: A model that is sharded by `fully_shard`, wrapped by DDP, compiled or plain.
            optimizer: An optimizer over the model's parameters. None leaves the optimizer out.
            extra: Other resume state of this rank, of the types that `save` takes.
            correspondences: Rules from the checkpoint's form to the model's, for every save of this saver alike.

        Returns:
            A handle for the outcome. May be dropped.

        Raises:
            CheckpointFailed: The previous save failed, on any rank: every rank raises the error here, and nothing has
                begun. Call again to save this state.
            NotImplementedError: A tensor is of a class of its own.
            OSError: Not enough host memory for the state.
            ValueError: The conditions of `save`. An error visible only across ranks is raised by the next call.

        An error of this rank alone has failed the save for every rank, and the other ranks meet it in their next call
        (or `wait`): there each rank raises `CheckpointFailed`, this one too, so that all begin the same saves.

        Effects: collective on the default group the first time alone (one small exchange), later none; all ranks have
            to call equally often. Copies this rank's part to the host on a thread; on an accelerator on a separate
            stream, which waits for work already queued on the current stream. No host sync.
        """
        began = time.perf_counter()
        self._num_saves += 1  # At once: after an interrupt on some ranks, parts of two calls must not have one name.

        def collect() -> SavePart:
            return SavePart.of(model, optimizer, extra, correspondences, self._tables)

        with on_device_of(model.parameters()):
            if self._session is None:
                self._session = self._agree(collect)
            return self._begin(path, self._session, collect, began)

    def save_part(self, path: str | os.PathLike[str], collect: Callable[[], SavePart]) -> SaveHandle:
        """Begin to write a checkpoint, of any form, from each rank's part: for packages with further formats.

        Every other promise is `save`'s. The ranks agree on each save, so that an error of `collect` is raised by this
        call on all ranks.

        Args:
            path: The checkpoint's directory, on storage that every rank sees. The same on every rank.
            collect: Called once on each rank. No collective.

        Returns:
            A handle for the outcome. May be dropped.

        Raises:
            CheckpointFailed: The previous save failed on any rank, or `collect` on another rank. Nothing has begun.
            NotImplementedError: The conditions of `save`.
            OSError: The conditions of `save`.

        Effects: as `save`, on the current device, with one small exchange on the default group at each call.
        """
        began = time.perf_counter()
        self._num_saves += 1
        parts: list[SavePart] = []

        def collected() -> SavePart:
            parts.append(collect())
            return parts[0]

        return self._begin(path, self._agree(collected), lambda: parts[0], began)

    def wait(self) -> None:
        """Wait until no save is in flight.

        Raises:
            CheckpointFailed: The last save failed, and the failure has not been raised yet.
        """
        for handle in tuple(self._saves):
            handle.wait()
            with suppress(ValueError):  # Another thread waited too.
                self._saves.remove(handle)

    def close(self) -> None:
        """Wait as `wait` does, then free the process and the memory. The next save allocates new ones, and agrees anew.

        Raises:
            CheckpointFailed: The conditions of `wait`.
        """
        try:
            self.wait()
        except CheckpointFailed:
            self._free()
            raise
        self._free()  # Not after an interrupt: a save may be in flight, and completes by itself.

    def _free(self) -> None:
        self._session, self._num_saves = None, 0
        self._saves.clear()
        if self._process is not None:
            self._process.close()
            self._process = None
        self._memory.close()

    def _agree(self, collect: Callable[[], SavePart]) -> _Session:
        """Agree on all ranks, or raise on all. Effects: waits for the previous save; collective, one exchange."""

        def begin(digests: list[dict[str, str]]) -> list[_Session]:
            return [_Session(secrets.token_hex(16), differing(digests))] * num_ranks()

        def digests_after_wait() -> dict[str, str]:
            self.wait()  # Inside the exchange: a failure that one rank alone raised would leave its peers there.
            return collect().share.digests

        return exchange("begin to save in the background", digests_after_wait, begin)

    def _begin(
        self, path: str | os.PathLike[str], session: _Session, collect: Callable[[], SavePart], began: float
    ) -> SaveHandle:
        """Wait for the previous save, and start the copies of this rank's part."""
        token = hashlib.sha256(f"{session.token} {self._num_saves}".encode()).hexdigest()[:8]
        target = Path(os.path.realpath(path))
        handle = SaveHandle(target, staging_path(target, token), Outcomes(session.token), self._limits)
        try:
            self.wait()
            staging = time.perf_counter()
            self._saves.append(handle)
            self._copy(handle, session, collect())
        except BaseException as error:
            if handle not in self._saves:
                if isinstance(error, CheckpointFailed):  # The previous save's, on every rank: none has begun.
                    raise
                self._saves.append(handle)  # An interrupted wait: the other ranks begin, and have to be told.
            handle.abandon(error)
            raise
        handle.waited_seconds, handle.stage_seconds = staging - began, time.perf_counter() - staging
        return handle

    def _copy(self, handle: SaveHandle, session: _Session, part: SavePart) -> None:
        writer = self._usable_writer()
        items, copies = lay_out(part.share.items(session.apart), self._memory)
        digests = part.share.digests.items()
        job = Job(
            target=handle.path,
            staged=handle._staged,
            rank=rank(),
            num_ranks=num_ranks(),
            memory_nbytes=self._memory.nbytes,
            items=items,
            digests={key: digest for key, digest in digests if key not in session.apart},
            form=deepcopy(part.form),
            retention=self._retention,
            is_first=self._num_saves == 1,
        )
        handle.begin(StateCopies(copies, part.steady), writer, job)

    def _usable_writer(self) -> Writer:
        """The process, or another one in place of one that has died."""
        if self._process is not None and self._process.is_stuck:
            self._memory = Memory()  # A process that could not be killed may read the former.
        if self._process is None or not self._process.is_usable:
            self._process = Writer(self._memory)
        return self._process
