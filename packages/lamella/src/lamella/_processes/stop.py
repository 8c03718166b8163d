"""Stop requests: signals to any process of a run, agreed on by all ranks.

Note [One request is heard several times]
    Ctrl-C reaches every foreground process of a terminal; a scheduler's SIGTERM reaches one process of a job, or all;
    and launchers forward signals. A signal within a second of the first is an echo, not a second request. Of a terminal
    that ends a process hears SIGHUP from the shell, and again from the kernel once the shell has ended, however late.

Note [A thread listens]
    Python runs signal handlers only when the main thread is back in the interpreter. A rank's main thread may wait
    forever in a collective for a dead rank. The C-level handler, however, writes the signal's number to the wake-up
    file descriptor at once, and a thread reads the other end of the pipe.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

from lamella._processes.endings import Stopped

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, a scheduler's request, and the end of a terminal."""

_ECHO_S: Final = 1.0


class StopRequests:
    """The stop requests to a process so far.

    Attributes:
        signum: The first signal; 0 for none.
        can_wait: True once training has begun: the first request then waits for the end and the save of a step.
    """

    def __init__(self, when_it_can_wait: Callable[[], object] = lambda: None) -> None:
        self.signum = 0
        self.can_wait = False
        self._when_it_can_wait = when_it_can_wait
        self._heard_at = 0.0

    def wait_from_now_on(self) -> None:
        """Let the first request wait for a saved step. Called when training begins."""
        self.can_wait = True
        self._when_it_can_wait()

    def hear(self, signum: int) -> bool:
        """Record a signal; return True when the process must leave at once."""
        now = time.monotonic()
        if self.signum:
            return signum != signal.SIGHUP and now - self._heard_at > _ECHO_S
        self.signum, self._heard_at = signum, now
        return not self.can_wait


@contextmanager
def interrupted() -> Iterator[StopRequests]:
    """Handle stop requests to a process that starts workers.

    Requests that cannot wait raise `Stopped` in the main thread.
    """
    requests = StopRequests()

    def handle(signum: int, _: FrameType | None) -> None:
        if requests.hear(signum):
            raise Stopped(signum)

    with _handled(handle):
        yield requests


@contextmanager
def listening(
    leave: Callable[[int], object],
    when_first_heard: Callable[[int], object] = lambda _: None,
    when_it_can_wait: Callable[[], object] = lambda: None,
) -> Iterator[StopRequests]:
    """Handle stop requests to a rank; see Note [A thread listens].

    Args:
        leave: Ends the process; called in the listening thread with a signal that cannot wait.
        when_first_heard: Called in the listening thread with the first signal, if the signal can wait.
        when_it_can_wait: Called when training begins.

    Effects: starts a thread; in the main thread, replaces the handlers of `SIGNALS` and the wake-up file descriptor
        until the block ends.
    """
    requests = StopRequests(when_it_can_wait)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)  # Required by set_wakeup_fd: a full pipe must not block the signal handler.

    def listen() -> None:
        while received := os.read(reading, 1):
            is_first = not requests.signum
            if received[0] not in SIGNALS:
                continue  # Other handled signals of the process reach the wake-up descriptor too.
            if requests.hear(received[0]):
                leave(received[0])
            elif is_first:
                when_first_heard(received[0])
        os.close(reading)

    # Signals write to the descriptor only under a Python handler, be it empty; SIGTERM's default ends the process.
    with _handled(lambda *_: None) as is_main_thread:
        before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False) if is_main_thread else -1
        threading.Thread(target=listen, daemon=True).start()
        try:
            yield requests
        finally:
            if is_main_thread:
                signal.set_wakeup_fd(before)
            os.close(writing)  # End of file ends the thread.


@contextmanager
def _handled(handle: Callable[[int, FrameType | None], None]) -> Iterator[bool]:
    """Handle `SIGNALS`, except ignored ones (background jobs of a shell, nohup). Yields False off the main thread.

    Python allows only the main thread to set handlers.
    """
    is_main_thread = threading.current_thread() is threading.main_thread()
    before = {signum: signal.getsignal(signum) for signum in SIGNALS if is_main_thread}
    replaced = {signum: handler for signum, handler in before.items() if handler not in (None, signal.SIG_IGN)}
    for signum in replaced:
        signal.signal(signum, handle)
    try:
        yield is_main_thread
    finally:
        for signum, handler in replaced.items():
            signal.signal(signum, handler)
