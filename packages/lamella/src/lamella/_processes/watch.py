"""Ranks that do not arrive: the watch judges from the beats on a board whom the ranks wait for, and how long.

Note [A blocked main thread handles no signal]
    Python runs signal handlers between bytecodes of the main thread, and a main thread inside a collective runs none.
    The watch therefore lives elsewhere: in the parent of the workers, or in a thread of each rank under torchrun.

Note [Time without a watch]
    After a suspended machine or a frozen container wakes up, the clock is far ahead and no rank has had the time to
    publish a beat. The watch counts a gap between two looks as `_LARGEST_GAP_S` at most.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from lamella._processes.placement import Rank
from lamella._processes.pulse import PERIOD_S, Beat, RunPhase, until_the_store_ends
from lamella._processes.stop import StopRequests
from lamella._record.output import log
from lamella._settings.sections import WaitLimits

_SILENCE_S: Final = 10.0  # without a beat: the process is stopped, or keeps the interpreter lock
_GRACE_S: Final = 30.0  # without progress after a stop request; torchrun kills its ranks after as long
_FIRST_LINE_S: Final = 60.0
_LARGEST_GAP_S: Final = 5.0
_UNREAD_S: Final = 2.0
_NUM_NAMED: Final = 4


class Watch:
    """Judges from beats which rank its peers wait for, and whether to wait on."""

    def __init__(self, num_ranks: int, limits: WaitLimits, now: float) -> None:
        self._limits = limits
        self._beats: list[Beat | None] = [None] * num_ranks
        self._looked_at = now
        self._clock = 0.0  # See Note [Time without a watch].
        self._beat_at = [0.0] * num_ranks
        self._progress_at = self._longest_wait = 0.0
        self._stop_at: float | None = None
        self._num_lines = 0

    def look(self, now: float, beats: Sequence[Beat | None], *, is_asked_to_stop: bool) -> list[str]:
        """Take note of the beats at the time `now`; return the lines to print, a line for each minute of waiting."""
        self._clock += min(now - self._looked_at, _LARGEST_GAP_S)
        self._looked_at = now
        before, self._beats = self._beats, list(beats)
        if is_asked_to_stop and self._stop_at is None:
            self._stop_at = self._clock
        has_progress = False
        for rank, (last_beat, beat) in enumerate(zip(before, beats, strict=True)):
            if beat is not None and (last_beat is None or beat.num_beats != last_beat.num_beats):
                self._beat_at[rank] = self._clock
                has_progress = has_progress or last_beat is None or beat.progress != last_beat.progress
        if has_progress or self._is_saving():
            if not self._is_starting():
                self._longest_wait = max(self._longest_wait, self.waited_s)
            self._progress_at, self._num_lines = self._clock, 0
        elif self.waited_s >= _FIRST_LINE_S * (self._num_lines + 1):
            self._num_lines = int(self.waited_s // _FIRST_LINE_S)
            return [f"{self.place}: {self._waiting()} since {self.waited_s:.0f} s{self._collective()}"]
        return []

    def restart(self, now: float) -> None:
        """Take note of progress of a rank at the time `now`, and so of progress of every rank a moment ago."""
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
        """Return the smallest rank with beats; None if all are silent."""
        silent = self._silent()
        return next((rank for rank in self._unfinished() if rank not in silent), None)

    def absent(self) -> list[int]:
        """Return the ranks to wait for: ranks without beats, else ranks behind in collectives."""
        if silent := self._silent():
            return silent
        places = {rank: beat.place for rank, beat in self._running().items()}
        return [rank for rank in places if places[rank] < max(places.values())]

    def timeout(self) -> str | None:
        """Return the error of a run after too long a wait, on one line; None while the run may wait on."""
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
        """True while the awaited ranks are saving: a save has a limit of its own."""
        running = self._running()
        ranks = self.absent() or running
        is_saving = [running[rank].phase == RunPhase.SAVING for rank in ranks if rank in running]
        return bool(is_saving) and all(is_saving) and not self._silent()

    def _waiting(self) -> str:
        ranks = self.absent()
        return f"waiting for {_names(ranks)}" if ranks else "no progress of any rank"

    def _collective(self) -> str:
        """Return words on the collective in which ranks wait, to follow a line; no words before the first."""
        running, silent = self._running(), self._silent()
        last = max(running.values(), key=lambda beat: beat.place, default=None)
        if last is None or not last.num_collectives:
            return ""
        if behind := [running[rank] for rank in self.absent() if rank in running and not silent]:
            joined = min(beat.num_collectives for beat in behind)
            if joined + 1 == last.num_collectives:
                return f"; missing in collective {last.collective}"
            if joined < last.num_collectives:
                return f"; joined collective {joined} last, others {last.collective}"
        # A silent rank may have gone on after its last beat: only its peers' collective is known.
        return f"; last collective entered: {last.collective}"

    def _reason(self) -> str:
        if silent := self._silent():
            return f"no sign of life from {_names(silent)}"
        ranks = self.absent()
        return f"none from {_names(ranks)}" if ranks else "no progress of any rank"


@contextmanager
def watched(
    rank: Rank, limits: WaitLimits, requests: StopRequests, end_wait: Callable[[Watch, int, bool], object]
) -> Iterator[None]:
    """Watch over all ranks from this rank, for launchers whose parent process does not.

    Args:
        rank: The watching rank, with its pulse and the board.
        limits: The limits on waiting.
        requests: The stop requests to this rank.
        end_wait: Called in the watching thread with the watch, the signal of a stop request (0 for none), and True on
            the only rank to print. Ends the process if the watch says so.

    Effects: starts a thread, which reads the board while the rank makes no progress; prints lines on one rank.
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
            log(lines if prints else [])
            end_wait(watch, signum, prints)

    thread = threading.Thread(target=until_the_store_ends, args=(judge,), name="lamella-watch", daemon=True)
    thread.start()
    yield
    is_over.set()
    thread.join()


def _names(ranks: Sequence[int]) -> str:
    first = ", ".join(map(str, ranks[:_NUM_NAMED]))
    remainder = f" and {len(ranks) - _NUM_NAMED} more" if len(ranks) > _NUM_NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {first}{remainder}"
