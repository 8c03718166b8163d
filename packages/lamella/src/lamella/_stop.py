"""Requests to stop: heard by every process of a run, and agreed on by its ranks.

Note [One request is heard several times]
    Ctrl-C reaches all processes in the foreground of a terminal; a scheduler's SIGTERM one process of a job, or all;
    and launchers pass signals on. A signal within a second of the first is an echo, not a second request.

Note [A thread listens]
    Python runs a handler once the main thread is back in the interpreter. In a rank, the main thread may wait for ever:
    in a collective, for a rank that is gone. But Python writes a signal's number to a pipe at once, and a thread reads
    the pipe.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

from lamella._endings import Stopped

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)

_ECHO_S: Final = 1.0


class StopRequests:
    """The requests to a process so far.

    Attributes:
        signum: The first signal; 0 for none.
        can_wait: Whether the first request waits until a step is done and saved. Not before there is a step to save.
    """

    def __init__(self, when_it_can_wait: Callable[[], object] = lambda: None) -> None:
        self.signum = 0
        self.can_wait = False
        self._when_it_can_wait = when_it_can_wait
        self._heard_at = 0.0

    def wait_from_now_on(self) -> None:
        """Let the first request wait: training begins."""
        self.can_wait = True
        self._when_it_can_wait()

    def hear(self, signum: int) -> bool:
        """Take note of a signal, and tell whether the process is to leave at once."""
        now = time.monotonic()
        if self.signum:
            return now - self._heard_at > _ECHO_S
        self.signum, self._heard_at = signum, now
        return not self.can_wait


@contextmanager
def interrupted() -> Iterator[StopRequests]:
    """Requests to a process that starts workers. One that cannot wait raises `Stopped` in the main thread."""
    requests = StopRequests()

    def handle(signum: int, _: FrameType | None) -> None:
        if requests.hear(signum):
            raise Stopped(signum)

    with _handled(handle):
        yield requests


@contextmanager
def listening(
    leave: Callable[[int], object],
    told: Callable[[int], object] = lambda _: None,
    when_it_can_wait: Callable[[], object] = lambda: None,
) -> Iterator[StopRequests]:
    """Requests to a rank; see Note [A thread listens].

    Args:
        leave: Ends the process for a request that cannot wait.
        told: Is called with the first signal that can.
        when_it_can_wait: Is called when training begins.
    """
    requests = StopRequests(when_it_can_wait)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def listen() -> None:
        while received := os.read(reading, 1):
            is_first = not requests.signum
            if received[0] not in SIGNALS:
                continue
            if requests.hear(received[0]):
                leave(received[0])
            elif is_first:
                told(received[0])
        os.close(reading)

    with _handled(lambda *_: None) as is_main_thread:
        before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False) if is_main_thread else -1
        threading.Thread(target=listen, daemon=True).start()
        try:
            yield requests
        finally:
            if is_main_thread:
                signal.set_wakeup_fd(before)
            os.close(writing)


@contextmanager
def _handled(handle: Callable[[int, FrameType | None], None]) -> Iterator[bool]:
    """Take the signals over; not those that are ignored, as in a shell's background. No other thread may do that."""
    is_main_thread = threading.current_thread() is threading.main_thread()
    before = {signum: signal.getsignal(signum) for signum in SIGNALS if is_main_thread}
    taken = {signum: handler for signum, handler in before.items() if handler not in (None, signal.SIG_IGN)}
    for signum in taken:
        signal.signal(signum, handle)
    try:
        yield is_main_thread
    finally:
        for signum, handler in taken.items():
            signal.signal(signum, handler)
