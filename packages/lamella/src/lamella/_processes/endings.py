"""Early ends of a run: one-line errors, requests to stop, and their exit codes."""

import signal
from collections.abc import Mapping
from typing import Final

from lamella._settings.options import ConfigError


class LossNotFiniteError(RuntimeError):
    """The loss, the gradient or a weight is not finite. No checkpoint holds the state. Raised on every rank."""


class StorageError(RuntimeError):
    """A checkpoint or a record cannot be written. Earlier checkpoints are whole. Raised on every rank."""


class Stopped(KeyboardInterrupt):
    """Ctrl-C (SIGINT), SIGTERM or SIGHUP stopped the run. The message names the saved step.

    A `KeyboardInterrupt`: `except Exception` must not treat a stop as a failure.
    """

    def __init__(self, signum: int, text: str = "") -> None:
        super().__init__(text or f"Stopped by {signal.Signals(signum).name}.")
        self.signum = signum

    @property
    def exit_code(self) -> int:
        """128 + the signal, the shells' and schedulers' code for a process ended by a signal."""
        return 128 + self.signum


FAILED: Final = 1
EXIT_CODES: Final[Mapping[type[Exception], int]] = {ConfigError: 2, LossNotFiniteError: 3, StorageError: 4}
"""One-line errors, the same on every rank, and their exit codes."""

EXIT_CODES_IN_WORDS: Final = """\
exit codes:
  0    every step is done
  1    a rank died, and its traceback is printed; or a rank did not go on within --timeout
  2    refused: the settings, the data, the folder or a damaged checkpoint
  3    the loss, the gradient or a weight is not finite; the step is not saved
  4    a checkpoint or the metrics could not be written; earlier checkpoints are whole
  130  stopped by Ctrl-C (SIGINT), 143 by SIGTERM, 129 by the end of the terminal (SIGHUP): the step under way is
       finished and saved, and the same command goes on from there. A second signal ends the run at once"""
