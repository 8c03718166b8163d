"""`SaveHandle`: a save in the background, from the call to the outcome.

Note [An interrupt at any line]
    A keyboard interrupt may be raised between any two lines of the main thread, and never in another. So the main
    thread only prepares a save, and starts a thread, which copies the state, sends the job and starts a second for the
    outcome. An interrupt before leaves nothing but a state laid out in unread memory. An interrupt
    after leaves a save in flight, as if the call had returned. `StateCopies.cancel` tells the two apart. A save that
    was not begun fails on all ranks, as the peers wait for the missing part.

Note [A program that ends]
    The thread of a save is a daemon: a program ends without a wait for the last checkpoint, which the writing
    process completes. A request to a store releases the interpreter's lock, and a thread that asks for the lock while
    the interpreter ends is ended inside C++, which aborts the process: exit code 134 after a complete run. Therefore
    the threads leave their saves in a handler of `atexit`, before the interpreter's end.
"""

import atexit
import logging
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Final

from lamella_checkpoint._base.ranks import num_ranks, rank
from lamella_checkpoint._training.async_process import Job, describe, mark_failed
from lamella_checkpoint._training.copies import StateCopies
from lamella_checkpoint._training.outcomes import Failures, Outcomes
from lamella_checkpoint._training.writer import Following, Writer, late_ranks
from lamella_files import CheckpointFailed

_PAUSE_S: Final = 1.0
_LINE_EVERY_S: Final = 60.0
_NUM_NAMED: Final = 4
_OVERRUN_S: Final = 60.0  # Past the time limit: only a silent store lets a save last longer.
_LEAVING_S: Final = 5.0  # For a request in flight: a hanging store must not hold up the program's end.
_LOGGER: Final = logging.getLogger("lamella_checkpoint")


class Limits:
    """The time limit of a saver's saves, and the output for long waits: arguments of `AsyncSaver`.

    Attributes:
        timeout: Seconds from the end of a save's copies to its outcome; infinite for no limit.
        print_line: Called with a line for each minute of a wait.
    """

    def __init__(self, timeout: float | None, print_line: Callable[[str], object] | None) -> None:
        if timeout is not None and not timeout > 0:
            raise ValueError(f"Expected a timeout above 0 s, got timeout={timeout!r}. None sets no limit.")
        self.timeout = math.inf if timeout is None else timeout
        self.print_line = print_line or _LOGGER.warning


class SaveHandle:
    """A save in the background.

    Attributes:
        path: The checkpoint's absolute path.
        stage_seconds: Duration of the call to `save`, without the wait for the previous save.
        waited_seconds: Duration of the wait for the previous save.
    """

    def __init__(self, path: Path, staged: Path, outcomes: Outcomes, limits: Limits) -> None:
        self.path = path
        self.stage_seconds = 0.0
        self.waited_seconds = 0.0
        self._staged, self._outcomes, self._limits = staged, outcomes, limits
        self._rank, self._num_ranks = rank(), num_ranks()
        self._copies: StateCopies | None = None
        self._sender: threading.Thread | None = None
        self._following: Following | None = None
        self._is_begun = False  # Stays False if the call was interrupted: Note [An interrupt at any line].
        self._result: dict[str, Failures] = {}
        self._ended = threading.Event()
        self._is_raised = False

    @property
    def done(self) -> bool:
        """Whether the save has ended: the checkpoint is complete, or `wait` raises."""
        return self._settle(timeout=0.0)

    @property
    def held_seconds(self) -> float:
        """Seconds the host has waited for the copies so far, before an optimizer's step or in `wait_staged`."""
        return self._copies.waited_seconds if self._copies is not None else 0.0

    def wait_staged(self) -> None:
        """Wait for the moment from which the state may be changed.

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
            timeout: Seconds of waiting, while the save goes on; None waits for the save's end, which
                the `timeout` of `AsyncSaver` limits.

        Raises:
            CheckpointFailed: The save failed, with the reasons by rank. Every rank raises the error, once: a save has
                one outcome on all ranks, for any later fate of the directory.
            TimeoutError: The save has not ended yet.

        Effects: no collective; blocks this thread, and prints a line after each minute (`print_line` of `AsyncSaver`).
        """
        if not self._settle(timeout):
            raise TimeoutError(
                f"Expected the checkpoint {str(self.path)!r} within {timeout} s; it is still being written."
            )
        failures = self._result["failures"]
        if failures and not self._is_raised:
            self._is_raised = True
            raise CheckpointFailed(f"save the checkpoint {str(self.path)!r} in the background", failures)
        return self.path

    def begin(self, copies: StateCopies, writer: Writer, job: Job) -> None:
        """HostCopy, write and follow the save in threads. Effects: none on the save once the call has returned."""
        _register_exit()
        self._copies = copies
        self._sender = copies.start(partial(self._go_on, writer, job))
        self._is_begun = True

    def abandon(self, error: BaseException) -> None:
        """End a save whose beginning was interrupted; a save with running threads goes on."""
        if self._copies is None or self._copies.cancel():
            self._fail(error)

    def _go_on(self, writer: Writer, job: Job, error: BaseException | None) -> None:
        """Have the copies written, in the copying thread. Raises nothing: no caller would receive the error."""
        following = Following(writer, self._outcomes, job, self._limits.timeout)
        self._following = following  # At once: a file system may not answer `send`, and the time limit holds.
        try:
            if error is not None:
                raise error
            following.send()
        except BaseException as caught:  # noqa: BLE001
            self._fail(caught)
            return
        self._follow(following)

    def _follow(self, following: Following) -> None:
        """Wait for the outcome, in a thread: Note [A program that ends]."""

        def follow() -> None:
            failures = following.run()
            if failures is not None:
                self._end(failures)
            _followers.pop(following, None)

        follower = threading.Thread(target=follow, name="lamella-checkpoint-outcome", daemon=True)
        _followers[following] = follower
        try:
            follower.start()
        except RuntimeError:  # No more threads.
            follow()

    def _fail(self, error: BaseException) -> None:
        """This rank's part will not come, and no process reads the memory."""
        failures: Failures = {self._rank: describe(error)}
        mark_failed(self._staged, self._rank, failures[self._rank])
        with suppress(RuntimeError):  # Rank 0 has ended, and with it the store.
            failures = self._outcomes.agree(self._staged.name, failures)
        self._end(failures)

    def _end(self, failures: Failures) -> None:
        self._result.setdefault("failures", failures)  # The first counts.
        self._ended.set()

    def _settle(self, timeout: float | None) -> bool:
        """Wait for the save's end; return False without an end in time."""
        if not self._is_begun and not self._ended.is_set():
            self.abandon(KeyboardInterrupt("the call that saves was interrupted"))
        if self._following is not None and self._following.is_left:  # The call comes from another handler of `atexit`.
            self._following.rejoin()
            self._follow(self._following)
        began = time.monotonic()
        until = began + (math.inf if timeout is None else timeout)
        num_lines = 0
        # In pauses: between waits the main thread runs handlers of signals on any platform.
        while not self._ended.wait(min(_PAUSE_S, max(0.0, until - time.monotonic()))):
            now = time.monotonic()
            if now >= until:
                return self._ended.is_set()
            if now >= began + (num_lines + 1) * _LINE_EVERY_S:
                num_lines += 1
                line = f"checkpoint {self.path.name}: waiting for {self._delay()} since {num_lines * _LINE_EVERY_S:g} s"
                self._limits.print_line(line)
            if self._following is not None and now > self._following.deadline + _OVERRUN_S:
                self._following.stop()
                self._end({0: f"no outcome was known within {self._limits.timeout:g} s"})
        return True

    def _delay(self) -> str:
        """Name the parts that the save waits for, as seen by this rank."""
        if self._following is None:
            return f"rank {self._rank}'s copies"
        late = sorted(late_ranks(self._staged, self._num_ranks)) if self._staged.exists() else []
        if not late:
            return "rank 0 to complete it"
        names = " and ".join(f"rank {index}'s" for index in late[:_NUM_NAMED])
        return f"{names} part" if len(late) <= _NUM_NAMED else f"{names} and {len(late) - _NUM_NAMED} more ranks' parts"


_followers: dict[Following, threading.Thread] = {}


@cache
def _register_exit() -> None:
    """Register the handler with the first save: Note [A program that ends]."""
    atexit.register(_leave_saves)


def _leave_saves() -> None:
    for following in tuple(_followers):
        following.leave()
    for follower in tuple(_followers.values()):
        with suppress(RuntimeError):  # Not started yet: the program was interrupted before.
            follower.join(_LEAVING_S)
