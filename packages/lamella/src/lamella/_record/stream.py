"""The stream of a run's records on rank 0, and the sinks that take them: files of the run, and trackers."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from lamella._record.metrics import Record, append
from lamella._record.output import one_line
from lamella._record.plots import plot
from lamella._record.series import metric_rows


class Sink(Protocol):
    """A place that records go to.

    Attributes:
        is_file: True for a file of the run, without which the run ends; trackers are left out after an error.
    """

    is_file: bool

    def write(self, records: Sequence[Record]) -> None:
        """Take records, in the order of their steps."""

    def flush(self) -> None:
        """Make the records so far visible: called at every checkpoint."""

    def close(self, exit_code: int) -> None:
        """Take no more records of a run that ends with an exit code: 0, 128 + the signal of a stop, or another."""


class MetricsFile:
    """The metrics file: a line a record."""

    is_file = True

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

    is_file = True

    def __init__(self, metrics: Path, path: Path) -> None:
        self._metrics, self._path = metrics, path

    def write(self, records: Sequence[Record]) -> None:
        """Nothing: the metrics file has the records."""

    def flush(self) -> None:
        """Draw the plot."""
        plot(metric_rows(self._metrics), self._path)

    def close(self, exit_code: int) -> None:
        """Nothing: the plot is drawn."""


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
            except (Exception, SystemExit) as error:  # Trackers are programs of others, and talk to servers.
                if sink.is_file:
                    raise
                self._sinks.remove(sink)
                self._print_line(dropped_line(type(sink).__name__, error))


def dropped_line(name: str, error: BaseException) -> str:
    """Return the line on a tracker that raised."""
    return f"{name}: {type(error).__name__}: {one_line(str(error))[:200]}. The run goes on without this tracker."
