"""The stream of a run's records on rank 0, and the sinks that take them: files of the run, and trackers."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Final, Protocol

from lamella._record.metrics import Record, append
from lamella._record.output import one_line
from lamella._record.plots import plot
from lamella._record.series import metric_rows

_ANSWER_S: Final = 120.0  # W&B gives its own start 90 s.
_FAILED: Final = 1


class Tracker(Protocol):
    """A place that records go to."""

    def write(self, records: Sequence[Record]) -> None:
        """Take records, in the order of their steps."""

    def flush(self) -> None:
        """Make the records so far visible: called at every checkpoint."""

    def close(self, exit_code: int) -> None:
        """Take no more records of a run that ends with an exit code: 0, 128 + the signal of a stop, or another."""


class Sink(Tracker, Protocol):
    """A file of the run, or a tracker."""

    @property
    def name(self) -> str | None:
        """The tracker's name; None for a file. Without a file the run ends, and without a tracker it goes on."""


class MetricsFile:
    """The metrics file: a line a record."""

    name = None

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, records: Sequence[Record]) -> None:
        """Append a line a record."""
        append(self._path, records)

    def flush(self) -> None:
        """Nothing: each line is in the file."""

    def close(self, exit_code: int) -> None:
        """Nothing: the file is closed after each line."""


class LossPlot:
    """The plot of the losses, drawn from the metrics file: a resumed run's earlier steps are there too."""

    name = None

    def __init__(self, metrics: Path, path: Path) -> None:
        self._metrics, self._path = metrics, path

    def write(self, records: Sequence[Record]) -> None:
        """Nothing: the metrics file has the records."""

    def flush(self) -> None:
        """Draw the plot."""
        plot(metric_rows(self._metrics), self._path)

    def close(self, exit_code: int) -> None:
        """Nothing: the plot is drawn."""


class TrackerThread:
    """A tracker that is called in a thread, in the order of the calls: its server's answers take training no time.

    An error of the tracker, or a call without an answer in time, is raised by the next method, or by `close`. The
    thread closes the tracker as failed before, or when the answer comes: MLflow shows a run without an end as running.

    Args:
        name: The tracker's name.
        start: Makes the tracker, in the thread: MLflow knows a run only in the thread that started the run.
        limit_s: Seconds for each call; for all calls that are left, once `close` is called.

    Raises:
        TimeoutError: The tracker did not start in time.
        Exception: Any other of the tracker's start.
    """

    def __init__(self, name: str, start: Callable[[], Tracker], limit_s: float = _ANSWER_S) -> None:
        self.name = name
        self._limit_s = limit_s
        self._calls: SimpleQueue[Callable[[Tracker], None] | int] = SimpleQueue()
        self._error: BaseException | None = None
        self._call_at: float | None = None
        is_started, self._is_over = threading.Event(), threading.Event()
        # A daemon: the process must end although a server does not answer.
        threading.Thread(target=self._work, args=(start, is_started), name=f"lamella-{name}", daemon=True).start()
        self._wait(is_started)

    def write(self, records: Sequence[Record]) -> None:
        """Hand records to the thread, one a call: MLflow sends a message a record."""
        for record in records:
            self._call(partial(_write, [record]))

    def flush(self) -> None:
        """Let the thread make the records so far visible."""
        self._call(lambda tracker: tracker.flush())

    def close(self, exit_code: int) -> None:
        """Close the tracker. Effects: waits for the thread, up to the limit."""
        self._call(exit_code)
        self._wait(self._is_over)

    def _work(self, start: Callable[[], Tracker], is_started: threading.Event) -> None:
        try:
            tracker = start()
            is_started.set()
            exit_code = self._served(tracker)
            self._call_at = time.monotonic()
            tracker.close(exit_code)
        except (Exception, SystemExit) as error:  # noqa: BLE001  Trackers are programs of others, and talk to servers.
            self._error = error
        is_started.set()
        self._is_over.set()

    def _served(self, tracker: Tracker) -> int:
        """Make the calls up to an exit code, and return the code."""
        try:
            while not isinstance(call := self._calls.get(), int):
                self._call_at = time.monotonic()
                call(tracker)
                self._call_at = None
        except (Exception, SystemExit):
            self._call_at = time.monotonic()
            with suppress(Exception, SystemExit):
                tracker.close(_FAILED)
            raise
        return call

    def _call(self, call: Callable[[Tracker], None] | int) -> None:
        call_at = self._call_at
        is_late = call_at is not None and time.monotonic() - call_at > self._limit_s
        self._check(is_late=is_late)
        self._calls.put(call)

    def _wait(self, event: threading.Event) -> None:
        self._check(is_late=not event.wait(self._limit_s))

    def _check(self, *, is_late: bool) -> None:
        if self._error is not None:
            raise self._error
        if is_late:
            self._calls.put(_FAILED)
            raise TimeoutError(f"Expected an answer within {self._limit_s:g} s, got none")


def _write(records: Sequence[Record], tracker: Tracker) -> None:
    tracker.write(records)


class RecordStream:
    """Hands records to sinks. A tracker that raises is left out from then on, with a line; files raise.

    Args:
        sinks: The sinks; none on ranks but the first.
        print_line: Called with the line on a tracker that raised.
    """

    def __init__(self, sinks: Iterable[Sink] = (), print_line: Callable[[str], object] = print) -> None:
        self._sinks, self._print_line = list(sinks), print_line

    def write(self, records: Sequence[Record]) -> None:
        """Hand records to every sink.

        Raises:
            OSError: A file of the run cannot be written.
        """
        self._call(lambda sink: sink.write(records))

    def flush(self) -> None:
        """Make the records so far visible in every sink.

        Raises:
            OSError: A file of the run cannot be written.
        """
        self._call(lambda sink: sink.flush())

    def close(self, exit_code: int = 0) -> None:
        """Close every sink of a run that ends with an exit code: 0, 128 + the signal of a stop, or another."""
        self._call(lambda sink: sink.close(exit_code))

    def _call(self, method: Callable[[Sink], None]) -> None:
        for sink in tuple(self._sinks):
            try:
                method(sink)
            except (Exception, SystemExit) as error:
                if sink.name is None:
                    raise
                self._sinks.remove(sink)
                self._print_line(dropped_line(sink.name, error))


def dropped_line(name: str, error: BaseException) -> str:
    """Return the line on a tracker that raised."""
    return f"{name}: {type(error).__name__}: {one_line(str(error))[:200]}. The run goes on without this tracker."
