"""The progress of every rank: a pulse in each rank, and the board of all published beats.

Note [Progress costs a step nothing]
    A thread in every rank publishes the rank's beat twice a second: a count that stops when the process stops, the
    step, the number of the rank's collectives, which torch counts in any case, and the batches of validation, which
    may run without collectives for longer than the limit. The training loop only assigns a number per step. The rank
    with the fewest collectives is the rank to wait for.
    The kind of a collective is read from torch's flight recorder, once a rank stands still: reading takes long.
"""

import mmap
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from lamella._processes.collectives import last_collective, num_collectives

if TYPE_CHECKING:
    import torch.distributed as dist  # The parent of workers needs none.
    from torch._C._distributed_c10d import Store

PERIOD_S: Final = 0.5
"""Seconds between two beats of a rank."""

_BEAT: Final = struct.Struct("<5q24s")
_MAX_KIND_LENGTH: Final = 24
_STANDSTILL_S: Final = 10.0  # without progress, before a rank looks up its last collective


class RunPhase(IntEnum):
    """Part of a rank's run. Decides on the limit to a wait."""

    STARTING = 0
    """Up to the end of the first step, which may compile."""
    STEPPING = 1
    SAVING = 2
    """A checkpoint is saved or waited for: there may be no collective for long, and the save has a limit of its own."""
    DONE = 3


class Beat(NamedTuple):
    """A rank's progress at one moment.

    Attributes:
        num_beats: Beats published so far.
        phase: Part of the run.
        step: The step in progress, from 1 on; 0 before the first step.
        num_collectives: Collectives of the rank so far.
        kind: The kind of a standing rank's last collective, for example "all-gather"; else "".
        num_batches: Batches of validation so far.
    """

    num_beats: int
    phase: int
    step: int
    num_collectives: int
    kind: str = ""
    num_batches: int = 0

    @property
    def progress(self) -> "Progress":
        """The fields of progress."""
        return Progress(self.phase, self.step, self.num_collectives, self.num_batches)

    @property
    def place(self) -> tuple[int, int]:
        """The step and the collective, the same on ranks that do not wait for each other."""
        return self.step, self.num_collectives

    @property
    def collective(self) -> str:
        """The last collective in words, its number and kind."""
        return f"{self.num_collectives}{f' ({self.kind})' if self.kind else ''}"

    def packed(self) -> bytes:
        """Return the beat in `_BEAT.size` bytes."""
        return _BEAT.pack(self.num_beats, *self.progress, self.kind.encode("ascii", "replace")[:_MAX_KIND_LENGTH])

    @classmethod
    def unpacked(cls, packed: bytes) -> "Beat":
        """Return the beat in `_BEAT.size` bytes."""
        num_beats, phase, step, num_collectives, num_batches, kind = _BEAT.unpack(packed)
        return cls(num_beats, phase, step, num_collectives, kind.rstrip(b"\0").decode("ascii"), num_batches)


class Progress(NamedTuple):
    """The fields of a beat that change while its rank goes on; see `Beat`."""

    phase: int
    step: int
    num_collectives: int
    num_batches: int


class Board(Protocol):
    """The beats of all ranks, readable by every watcher."""

    def publish(self, rank: int, beat: Beat) -> None:
        """Replace the beat of a rank."""

    def read(self) -> list[Beat | None]:
        """Return the latest beat of every rank; None for silent ranks."""


class FileBoard:
    """A board in a small file, mapped into memory by the processes of a host."""

    def __init__(self, path: Path, num_ranks: int) -> None:
        with path.open("a+b") as file:
            file.truncate(num_ranks * _BEAT.size)
            self._memory = mmap.mmap(file.fileno(), num_ranks * _BEAT.size)

    def publish(self, rank: int, beat: Beat) -> None:
        """Replace the beat of a rank. Effects: writes 64 bytes of memory."""
        self._memory[rank * _BEAT.size : (rank + 1) * _BEAT.size] = beat.packed()

    def read(self) -> list[Beat | None]:
        """Return the latest beat of every rank; None for silent ranks."""
        beats = [Beat.unpacked(self._memory[at : at + _BEAT.size]) for at in range(0, len(self._memory), _BEAT.size)]
        return [beat if beat.num_beats else None for beat in beats]


class StoreBoard:
    """A board in the store of a launcher, for ranks on several hosts.

    Args:
        store: A connection of this thread alone: a thread blocked in a connection blocks all its users.
        num_ranks: Number of ranks.
    """

    def __init__(self, store: "Store", num_ranks: int) -> None:
        self._store, self._num_ranks = store, num_ranks

    def publish(self, rank: int, beat: Beat) -> None:
        """Replace the beat of a rank. Effects: one message to the store."""
        self._store.set(_key(rank), beat.packed().hex())

    def read(self) -> list[Beat | None]:
        """Return the latest beat of every rank; None for silent ranks. Effects: two messages per rank."""
        return [self._beat(rank) for rank in range(self._num_ranks)]

    def _beat(self, rank: int) -> Beat | None:
        if not self._store.check([_key(rank)]):  # `get` waits for a key that is absent.
            return None
        return Beat.unpacked(bytes.fromhex(self._store.get(_key(rank)).decode()))


def _key(rank: int) -> str:
    return f"beat/{rank}"


class Pulse:
    """The progress of this process's rank; see Note [Progress costs a step nothing].

    Attributes:
        group: The process group whose collectives count; None before the group exists.
        phase: Part of the run.
        step: The step in progress, from 1 on; 0 before the first step.
        num_batches: Batches of validation so far.
    """

    def __init__(self) -> None:
        self.group: dist.ProcessGroup | None = None
        self.phase, self.step, self.num_batches = RunPhase.STARTING, 0, 0
        self._num_beats = 0
        self._last_progress: Progress | None = None
        self._moves_at = 0.0
        self._kind: str | None = ""

    def begin_step(self, step: int) -> None:
        """Note the beginning of a step; a second step ends the start-up. Effects: none outside this object."""
        if self.step:
            self.phase = RunPhase.STEPPING
        self.step = step

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Leave the limit on waiting to the save inside the block."""
        phase, self.phase = self.phase, RunPhase.SAVING
        yield
        self.phase = phase  # Not after an exception: the run ends, and waits for no limit.

    def beat(self) -> Beat:
        """Return the next beat. Effects: after seconds without progress, looks up the last collective in a thread."""
        self._num_beats += 1
        progress, now = self.progress(), time.monotonic()
        if progress != self._last_progress:
            self._last_progress, self._moves_at, self._kind = progress, now, None
        elif self._kind is None and now - self._moves_at >= _STANDSTILL_S and self.group is not None:
            self._kind = ""
            # In a thread of its own: beats go on if torch's recorder does not answer.
            threading.Thread(target=self._look_up, args=(progress,), name="lamella-collective", daemon=True).start()
        return Beat(self._num_beats, *progress[:-1], self._kind or "", progress.num_batches)

    def _look_up(self, progress: Progress) -> None:
        kind = last_collective()
        if self._last_progress == progress:
            self._kind = kind

    def progress(self) -> Progress:
        """Return the progress, as a beat carries it."""
        return Progress(self.phase, self.step, self._num_collectives(), self.num_batches)

    def _num_collectives(self) -> int:
        return 0 if self.group is None else num_collectives(self.group)

    @contextmanager
    def published(self, board: Board, rank: int) -> Iterator[None]:
        """Publish beats until the block ends. Effects: starts a thread."""
        is_over = threading.Event()

        def publish() -> None:
            board.publish(rank, self.beat())
            while not is_over.wait(PERIOD_S):
                board.publish(rank, self.beat())

        thread = threading.Thread(target=until_the_store_ends, args=(publish,), name="lamella-pulse", daemon=True)
        thread.start()
        yield
        # Not in a `finally`: after an exception the launcher ends the process.
        is_over.set()
        thread.join()
        self.phase, self.group = RunPhase.DONE, None
        board.publish(rank, self.beat())


def until_the_store_ends(work: Callable[[], None]) -> None:
    """Call `work` in a thread, without errors of the store: the launcher that held the store ends the ranks."""
    with suppress(RuntimeError):
        work()
