"""How a run ends early: errors of one line, requests to stop, and the exit code of each."""

import signal
from collections.abc import Mapping
from typing import Final

from lamella._options import ConfigError


class LossNotFiniteError(RuntimeError):
    """The loss, the gradient or a weight is not finite. No such state has been saved. Every rank raises this error."""


class StorageError(RuntimeError):
    """A checkpoint or a record cannot be written. Earlier checkpoints are whole. Every rank raises this error."""


class Stopped(KeyboardInterrupt):
    """A run was asked to stop, by Ctrl-C (SIGINT) or SIGTERM, and has stopped. The text names the step that is saved.

    A `KeyboardInterrupt`, so that no `except Exception` takes a stop for a failure.
    """

    def __init__(self, signum: int, text: str = "") -> None:
        super().__init__(text or f"Stopped by {signal.Signals(signum).name}.")
        self.signum = signum

    @property
    def exit_code(self) -> int:
        """128 + the signal: shells and schedulers give that to a process ended by one, and tell it from a failure."""
        return 128 + self.signum


FAILED: Final = 1
EXIT_CODES: Final[Mapping[type[Exception], int]] = {ConfigError: 2, LossNotFiniteError: 3, StorageError: 4}
"""Errors of one line, the same on every rank, and their exit codes."""

EXIT_CODES_IN_WORDS: Final = """\
exit codes:
  0    every step is done
  1    a rank died; its traceback is printed
  2    refused: the settings, the data, the folder or a damaged checkpoint
  3    the loss, the gradient or a weight is not finite; nothing of that was saved
  4    a checkpoint or the metrics could not be written; earlier checkpoints are whole
  130  stopped by Ctrl-C (SIGINT), 143 by SIGTERM: the step under way is finished and saved, and the same command
       goes on from there. A second signal leaves at once"""
