"""A run's checkpoints: saved in the background on the way, of finite weights only, and never lost without a word.

Note [A save that failed]
    A save in the background fails after its call, and the ranks hear of the failure at the next save. The run waits for
    that one: a disk that is still full ends the run there and then, and not hours later.
"""

import errno
import os
import shutil
from collections.abc import Callable, Mapping

import torch
from torch import nn

from lamella._directory import RunDirectory
from lamella._endings import LossNotFiniteError, StorageError
from lamella._output import one_line
from lamella_checkpoint import CheckpointDirectory, CheckpointFailed
from lamella_engine import find_nonfinite

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Saves:
    """Saves one model and optimizer by step, as every rank calls it."""

    def __init__(
        self, directory: RunDirectory, num_kept: int, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        self._directory = directory
        self._checkpoints = CheckpointDirectory(directory.checkpoints, keep=num_kept)
        self._model, self._optimizer = model, optimizer

    def save(self, step: int, extra: Mapping[str, object], say: Callable[[str], None], *, wait: bool) -> None:
        """Save a step: in the background, unless the run has to wait for it or the save before failed.

        Raises:
            LossNotFiniteError: A weight is not finite.
            StorageError: The checkpoint cannot be written.

        Effects: collective; waits for the save before.
        """
        self._check_weights(step)
        failure = self.settle()
        if failure is not None:
            say(f"{failure} Saving step {step} in its place.")
        save = self._checkpoints.save if wait or failure is not None else self._checkpoints.save_async
        try:
            save(step, model=self._model, optimizer=self._optimizer, extra=extra)
        except (OSError, CheckpointFailed) as error:
            raise StorageError(self.cannot_write(f"the checkpoint of step {step}", reason_of(error))) from error

    def settle(self) -> str | None:
        """Wait for a save in the background, and return the reason if it failed and no rank has been told.

        Effects: no collective. Every rank gets the same.
        """
        try:
            self._checkpoints.wait()
        except CheckpointFailed as error:
            return f"A checkpoint was not saved: {reason_of(error)}."
        return None

    def close(self) -> None:
        """Give back the process that writes. Effects: waits for a save in the background."""
        self._checkpoints.close()

    def told_of_last(self) -> str:
        """The checkpoint to go on from, as a sentence."""
        steps = self._checkpoints.steps()
        return f"The last checkpoint is of step {steps[-1]}." if steps else "There is no checkpoint yet."

    def cannot_write(self, what: str, reason: str) -> str:
        """One line on a file that cannot be written: the room that a checkpoint takes, and how the run goes on."""
        free = _told_nbytes(shutil.disk_usage(self._directory.root).free)
        way_out = "Make it writable"
        if any(os.strerror(code) in reason for code in _FULL):
            way_out = f"Free {_told_nbytes(self._nbytes())} for a checkpoint (the disk has {free})"
        return (
            f"Expected to write {what} in {str(self._directory.root)!r}, got {reason}. {way_out}, then run the same "
            f"command again. {self.told_of_last()}"
        )

    def _check_weights(self, step: int) -> None:
        found = find_nonfinite(self._model, of="weight")
        if found:
            raise LossNotFiniteError(
                f"Expected finite weights to save, got {found[0].kind} in {found[0].name!r} after step {step}. "
                f"{self.told_of_last()} {TRY}"
            )

    def _nbytes(self) -> int:
        """Of a checkpoint's tensors, over all ranks."""
        slots = (value for state in self._optimizer.state.values() for value in state.values())
        tensors = [*self._model.parameters(), *self._model.buffers(), *slots]
        return sum(tensor.numel() * tensor.itemsize for tensor in tensors if isinstance(tensor, torch.Tensor))


TRY = "Try a smaller --lr or more --warmup-steps; docs/how-to/find-a-nan.md tells how to find the parameter."


def reason_of(error: OSError | CheckpointFailed) -> str:
    """Why a file was not written, on one line."""
    if isinstance(error, CheckpointFailed):
        rank, text = min(error.failures.items())
        return one_line(f"{text} (rank {rank})")
    where = f": {error.filename!r}" if error.filename is not None else ""
    return one_line(f"{error.strerror or error}{where}")


def _told_nbytes(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**29 else f"{nbytes / 2**20:.1f} MiB"
