"""Ranks that do not arrive: a board with the progress of every rank, and the watch over the board.

Note [Progress costs a step nothing]
    A thread in every rank publishes the rank's beat twice a second: a count that stops when the process stops, the
    step, and the number of collectives that the rank has entered, which torch counts in any case. The training loop
    itself only assigns a number per step. The rank with the fewest collectives is the one that the others wait for.
    The kind of a collective is read from torch's flight recorder, once a rank stands still: reading takes long.

Note [A blocked main thread handles no signal]
    Python runs signal handlers between bytecodes of the main thread, and a main thread inside a collective runs none.
    The watch therefore lives elsewhere: in the parent of the workers, or in a thread of each rank under torchrun.

Note [Time in which nobody watched]
    After a suspended machine or a frozen container wakes up, the clock is far ahead and no rank has had the time to
    publish a beat. The watch counts a gap between two looks as `_LARGEST_GAP_S` at most.
"""

import mmap
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from lamella._processes.collectives import last_collective, num_collectives
from lamella._processes.stop import StopRequests
from lamella._record.output import say
from lamella._settings.sections import WaitLimits

if TYPE_CHECKING:
    import torch.distributed as dist  # The parent of workers needs none.
    from torch._C._distributed_c10d import Store

    from lamella._processes.placement import Rank

PERIOD_S: Final = 0.5
"""Seconds between two beats of a rank."""

_SILENCE_S: Final = 10.0  # without a beat: the process is stopped, or keeps the interpreter lock
_GRACE_S: Final = 30.0  # without progress after a stop request; torchrun kills its ranks after as long
_FIRST_LINE_S: Final = 60.0
_LARGEST_GAP_S: Final = 5.0
_UNREAD_S: Final = 2.0
_NUM_NAMED: Final = 4
_BEAT: Final = struct.Struct("<4q24s")
_MAX_KIND_LENGTH: Final = 24
_STANDSTILL_S: Final = 10.0  # without progress, before a rank looks up the collective that it waits in


class RunPhase(IntEnum):
    """Part of a rank's run. Decides which limit on waiting holds."""

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
        num_collectives: Collectives that the rank has entered.
        kind: The kind of the last collective, such as "all-gather", of a rank that stands still; else "".
    """

    num_beats: int
    phase: int
    step: int
    num_collectives: int
    kind: str = ""

    @property
    def progress(self) -> tuple[int, int, int]:
        """The fields that change with the rank's progress."""
        return self.phase, self.step, self.num_collectives

    @property
    def collective(self) -> str:
        """The last collective in words, its number and kind."""
        return f"{self.num_collectives}{f' ({self.kind})' if self.kind else ''}"

    def packed(self) -> bytes:
        """Return the beat in `_BEAT.size` bytes."""
        return _BEAT.pack(*self[:-1], self.kind.encode("ascii", "replace")[:_MAX_KIND_LENGTH])

    @classmethod
    def unpacked(cls, packed: bytes) -> "Beat":
        """Return the beat in `_BEAT.size` bytes."""
        num_beats, phase, step, count, kind = _BEAT.unpack(packed)
        return cls(num_beats, phase, step, count, kind.rstrip(b"\0").decode("ascii"))


class Board(Protocol):
    """The beats of all ranks, in a place that every watcher can read."""

    def publish(self, rank: int, beat: Beat) -> None:
        """Replace the beat of a rank."""

    def read(self) -> list[Beat | None]:
        """Return the latest beat of every rank; None for ranks without one."""


class FileBoard:
    """A board in a small file that the processes of one host map into memory."""

    def __init__(self, path: Path, num_ranks: int) -> None:
        with path.open("a+b") as file:
            file.truncate(num_ranks * _BEAT.size)
            self._memory = mmap.mmap(file.fileno(), num_ranks * _BEAT.size)

    def publish(self, rank: int, beat: Beat) -> None:
        """Replace the beat of a rank. Effects: writes 56 bytes of memory."""
        self._memory[rank * _BEAT.size : (rank + 1) * _BEAT.size] = beat.packed()

    def read(self) -> list[Beat | None]:
        """Return the latest beat of every rank; None for ranks without one."""
        beats = [Beat.unpacked(self._memory[at : at + _BEAT.size]) for at in range(0, len(self._memory), _BEAT.size)]
        return [beat if beat.num_beats else None for beat in beats]


class StoreBoard:
    """A board in the store of a launcher, for ranks on several hosts.

    Args:
        store: A connection that no other thread uses: a thread blocked in a connection blocks all its users.
        num_ranks: Number of ranks.
    """

    def __init__(self, store: "Store", num_ranks: int) -> None:
        self._store, self._num_ranks = store, num_ranks

    def publish(self, rank: int, beat: Beat) -> None:
        """Replace the beat of a rank. Effects: one message to the store."""
        self._store.set(_key(rank), beat.packed().hex())

    def read(self) -> list[Beat | None]:
        """Return the latest beat of every rank; None for ranks without one. Effects: two messages per rank."""
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
    """

    def __init__(self) -> None:
        self.group: dist.ProcessGroup | None = None
        self.phase, self.step = RunPhase.STARTING, 0
        self._num_beats = 0
        self._last_progress: tuple[int, int, int] | None = None
        self._moves_at = 0.0
        self._kind: str | None = ""

    def begin_step(self, step: int) -> None:
        """Note the step that begins; a second step ends the start-up. Effects: none outside this object."""
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
        return Beat(self._num_beats, *progress, self._kind or "")

    def _look_up(self, progress: tuple[int, int, int]) -> None:
        kind = last_collective()
        if self._last_progress == progress:
            self._kind = kind

    def progress(self) -> tuple[int, int, int]:
        """Return the fields of a beat that change with the rank's progress."""
        return self.phase, self.step, self._num_collectives()

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

        thread = threading.Thread(target=_until_the_store_ends, args=(publish,), name="lamella-pulse", daemon=True)
        thread.start()
        yield
        # Not in a `finally`: after an exception the launcher ends the process.
        is_over.set()
        thread.join()
        self.phase, self.group = RunPhase.DONE, None
        board.publish(rank, self.beat())


class Watch:
    """Judges from beats which rank the others wait for, and whether to wait on."""

    def __init__(self, num_ranks: int, limits: WaitLimits, now: float) -> None:
        self._limits = limits
        self._beats: list[Beat | None] = [None] * num_ranks
        self._looked_at = now
        self._clock = 0.0  # See Note [Time in which nobody watched].
        self._beat_at = [0.0] * num_ranks
        self._progress_at = self._longest_wait = 0.0
        self._stop_at: float | None = None
        self._num_lines = 0

    def look(self, now: float, beats: Sequence[Beat | None], *, is_asked_to_stop: bool) -> list[str]:
        """Take note of the beats at the time `now`; return the lines to print, one for each minute of waiting."""
        self._clock += min(now - self._looked_at, _LARGEST_GAP_S)
        self._looked_at = now
        before, self._beats = self._beats, list(beats)
        if is_asked_to_stop and self._stop_at is None:
            self._stop_at = self._clock
        has_progress = False
        for rank, (old, new) in enumerate(zip(before, beats, strict=True)):
            if new is not None and (old is None or new.num_beats != old.num_beats):
                self._beat_at[rank] = self._clock
                has_progress = has_progress or old is None or new.progress != old.progress
        if has_progress or self._is_saving():
            if not self._is_starting():
                self._longest_wait = max(self._longest_wait, self.waited_s)
            self._progress_at, self._num_lines = self._clock, 0
        elif self.waited_s >= _FIRST_LINE_S * (self._num_lines + 1):
            self._num_lines = int(self.waited_s // _FIRST_LINE_S)
            return [f"{self.place}: {self._waiting()} since {self.waited_s:.0f} s{self._collective()}"]
        return []

    def restart(self, now: float) -> None:
        """Take note that a rank makes progress at the time `now`, and so every rank did a moment ago."""
        self._looked_at = now
        self._progress_at, self._num_lines = self._clock, 0
        self._beat_at = [self._clock] * len(self._beats)

    @property
    def waited_s(self) -> float:
        """Seconds since a rank made progress."""
        return self._clock - self._progress_at

    @property
    def place(self) -> str:
        """The step in progress, in words."""
        step = max((beat.step for beat in self._beats if beat is not None), default=0)
        return f"step {step}" if step else "start-up"

    def first_present(self) -> int | None:
        """Return the smallest rank that sends beats; None without one."""
        silent = self._silent()
        return next((rank for rank in self._unfinished() if rank not in silent), None)

    def absent(self) -> list[int]:
        """Return the ranks that the others wait for: ranks without beats, else ranks behind in collectives."""
        if silent := self._silent():
            return silent
        progress = {rank: beat.progress[1:] for rank, beat in self._running().items()}
        return [rank for rank in progress if progress[rank] < max(progress.values())]

    def timeout(self) -> str | None:
        """Return the error of a run that has waited too long, on one line; None for a run that may wait on."""
        is_starting = self._is_starting()
        limit = self._limits.startup_s if is_starting else self._limits.step_s
        if self.waited_s < limit:
            return None
        option = "--startup-timeout" if is_starting else "--timeout"
        return (
            f"Expected every rank to go on in {self.place} within {limit:g} s ({option}), got {self._reason()}"
            f"{self._collective()}. All ranks have been stopped."
        )

    def abandons_step(self) -> str | None:
        """Return, after a stop request, a line on a step that will not end; None while the step may be waited for."""
        if self._stop_at is None:
            return None
        if self._silent():
            is_over = self.waited_s >= self._silence_s
        else:
            grace = max(_GRACE_S, 2 * self._longest_wait)  # A slow step is not a hung one.
            is_over = min(self.waited_s, self._clock - self._stop_at) >= grace
        return (
            f"{self.place}: {self._waiting()} since {self.waited_s:.0f} s; the step is not saved" if is_over else None
        )

    @property
    def _silence_s(self) -> float:
        return min(_SILENCE_S, max(3 * PERIOD_S, self._limits.step_s / 2))

    def _running(self) -> dict[int, Beat]:
        beats = enumerate(self._beats)
        return {rank: beat for rank, beat in beats if beat is not None and beat.phase != RunPhase.DONE}

    def _unfinished(self) -> list[int]:
        beats = enumerate(self._beats)
        return [rank for rank, beat in beats if beat is None or beat.phase != RunPhase.DONE]

    def _silent(self) -> list[int]:
        return [rank for rank in self._unfinished() if self._clock - self._beat_at[rank] >= self._silence_s]

    def _is_starting(self) -> bool:
        return all(beat.phase == RunPhase.STARTING for beat in self._running().values())

    def _is_saving(self) -> bool:
        """True while the ranks that the others wait for are saving, and have a limit of their own."""
        running = self._running()
        ranks = self.absent() or running
        is_saving = [running[rank].phase == RunPhase.SAVING for rank in ranks if rank in running]
        return bool(is_saving) and all(is_saving) and not self._silent()

    def _waiting(self) -> str:
        ranks = self.absent()
        return f"waiting for {_names(ranks)}" if ranks else "no progress of any rank"

    def _collective(self) -> str:
        """Return words on the collective that ranks wait in, to follow a line; no words before the first."""
        running, silent = self._running(), self._silent()
        last = max(running.values(), key=lambda beat: beat.progress[1:], default=None)
        if last is None or not last.num_collectives:
            return ""
        if behind := [running[rank] for rank in self.absent() if rank in running and not silent]:
            joined = min(beat.num_collectives for beat in behind)
            if joined + 1 == last.num_collectives:
                return f"; missing in collective {last.collective}"
            if joined < last.num_collectives:
                return f"; joined collective {joined} last, others {last.collective}"
        # A silent rank may have gone on after its last beat: only the collective of its peers is known.
        return f"; last collective entered: {last.collective}"

    def _reason(self) -> str:
        if silent := self._silent():
            return f"no sign of life from {_names(silent)}"
        ranks = self.absent()
        return f"none from {_names(ranks)}" if ranks else "no progress of any rank"


@contextmanager
def watched(
    rank: "Rank", limits: WaitLimits, requests: StopRequests, end_wait: Callable[[Watch, int, bool], object]
) -> Iterator[None]:
    """Watch over all ranks from this rank, for launchers whose parent process does not.

    Args:
        rank: This rank, with its pulse and the board.
        limits: The limits on waiting.
        requests: The stop requests to this rank.
        end_wait: Called in the watching thread with the watch, the signal of a stop request (0 for none), and True on
            the one rank that prints. Ends the process if the watch says so.

    Effects: starts a thread, which reads the board while this rank makes no progress; prints lines on one rank.
    """
    is_over, board = threading.Event(), rank.board
    assert board is not None

    def judge() -> None:
        watch = Watch(rank.num_ranks, limits, time.monotonic())
        progress, progress_at = rank.pulse.progress(), time.monotonic()
        while not is_over.wait(PERIOD_S):
            now = time.monotonic()
            if (current := rank.pulse.progress()) != progress:
                progress, progress_at = current, now
            # All ranks reading all beats send N * N messages: a rank reads only while it makes no progress itself.
            if now - progress_at < _UNREAD_S:
                watch.restart(now)
                continue
            signum = requests.signum
            lines = watch.look(now, board.read(), is_asked_to_stop=signum != 0)
            prints = watch.first_present() == rank.rank
            say(lines if prints else [])
            end_wait(watch, signum, prints)

    thread = threading.Thread(target=_until_the_store_ends, args=(judge,), name="lamella-watch", daemon=True)
    thread.start()
    yield
    is_over.set()
    thread.join()


def _until_the_store_ends(work: Callable[[], None]) -> None:
    """Call `work` in a thread whose errors of a store nobody needs: the launcher that held the store ends the ranks."""
    with suppress(RuntimeError):
        work()


def _names(ranks: Sequence[int]) -> str:
    first = ", ".join(map(str, ranks[:_NUM_NAMED]))
    remainder = f" and {len(ranks) - _NUM_NAMED} more" if len(ranks) > _NUM_NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {first}{remainder}"
