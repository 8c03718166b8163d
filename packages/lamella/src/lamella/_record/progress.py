"""The progress of a run on a terminal."""

import sys
from typing import Self

from tqdm import tqdm

from lamella._record.output import leave_output


class ProgressBar:
    """The progress bar of one rank: drawn only on a terminal; without `enabled` nothing is printed."""

    def __init__(self, first_step: int, num_steps: int, *, enabled: bool) -> None:
        self._enabled = enabled
        self._bar = tqdm(
            initial=first_step,
            total=num_steps,
            unit="step",
            disable=not (enabled and sys.stderr.isatty()),
            dynamic_ncols=True,
        )

    def advance(self) -> None:
        """Count one more completed step."""
        self._bar.update()

    def say(self, line: str) -> None:
        """Print a line above the bar. The run survives a closed pipe, as Ctrl-C ends `| tee`, and a log's full disk."""
        if not self._enabled:
            return
        try:
            self._bar.write(line)
            sys.stdout.flush()
        except OSError as error:
            leave_output(error)

    def close(self) -> None:
        """Stop updating the bar and leave its last state on the terminal."""
        self._bar.close()


class ByteBar:
    """A progress bar in bytes, on a terminal; absent elsewhere."""

    def __init__(self, label: str) -> None:
        self._bar = tqdm(
            desc=label,
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            disable=not sys.stderr.isatty(),
            dynamic_ncols=True,
            leave=False,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def to(self, done: int, total: int) -> None:
        """Move the bar to `done` of `total` bytes."""
        self._bar.total = total
        self._bar.update(done - self._bar.n)
