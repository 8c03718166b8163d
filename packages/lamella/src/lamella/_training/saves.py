"""A run's checkpoints: saved in the background, of finite weights only, with every failure reported.

Note [A save that failed]
    A background save fails after the call has returned, and the ranks learn of the failure at the next save. The run
    waits for the next save: a disk still full then ends the run at once, not hours of training later. Awaited saves run
    collectives and background saves do not: the ranks agree on the failure before they choose.
"""

import errno
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn

from lamella._processes.agreement import agreed_error, agreed_failure
from lamella._processes.endings import LossNotFiniteError, StorageError
from lamella._record.output import one_line
from lamella._record.run_directory import RunDirectory
from lamella._settings.sizes import size
from lamella._training.narrow_states import stored_slots, stored_states
from lamella_checkpoint import CheckpointDirectory, CheckpointFailed
from lamella_engine import find_nonfinite


class Saves:
    """Saves a model and an optimizer by step. Every rank makes the same calls."""

    def __init__(
        self,
        directory: RunDirectory,
        num_kept: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        timeout_s: float = 600.0,
        print_line: Callable[[str], object] | None = None,
    ) -> None:
        """Save to a run's directory.

        Args:
            directory: The run's.
            num_kept: Number of newest checkpoints kept.
            model: Sharded.
            optimizer: Over the model's parameters.
            timeout_s: The most seconds for a save in the background: `timeout` of `CheckpointDirectory`.
            print_line: Called on this rank with a line for each minute of a wait for a save; None logs the line.
        """
        self._directory = directory
        self._checkpoints = CheckpointDirectory(
            directory.checkpoints, keep=num_kept, timeout=timeout_s, print_line=print_line
        )
        self._model, self._optimizer = model, optimizer

    def save(self, step: int, extra: Mapping[str, object], say: Callable[[str], None], *, wait: bool) -> None:
        """Save a step in the background; wait for completion with `wait`, or when the previous save failed.

        Raises:
            LossNotFiniteError: A weight is not finite.
            StorageError: The checkpoint cannot be written, or the run's folder was moved or removed.

        Effects: collective over all ranks; waits for the previous save.
        """
        self._check_weights(step)
        if (refusal := agreed_error(self._refuse_moved_folder(step))) is not None:
            raise StorageError(refusal)
        failure = agreed_failure(self.settle())
        if failure is not None:
            say(f"{failure} Saving step {step} in its place.")
        save = self._checkpoints.save if wait or failure is not None else self._checkpoints.save_async
        try:
            save(step, model=self._model, optimizer=stored_states(self._optimizer), extra=extra)
        except (OSError, CheckpointFailed) as error:
            raise StorageError(self._cannot_save(step, reason_of(error))) from error

    def settle(self) -> str | None:
        """Wait for a background save; return the reason of a failure not reported before, the same on every rank.

        Effects: no collective.
        """
        try:
            self._checkpoints.wait()
        except CheckpointFailed as error:
            return f"A checkpoint was not saved: {reason_of(error)}."
        return None

    def close(self) -> None:
        """End the writer process. Effects: waits for a background save."""
        self._checkpoints.close()

    def last_checkpoint_line(self) -> str:
        """Return a sentence on the checkpoint to resume from."""
        steps = self._checkpoints.steps()
        return f"The last checkpoint is of step {steps[-1]}." if steps else "There is no checkpoint yet."

    def cannot_write(self, name: str, reason: str) -> str:
        """Return a line on an unwritable file, with the free space a checkpoint needs and the way to resume."""
        is_present = self._directory.config.is_file()  # written before the first step
        return self._refusal(name, reason, self._directory.root, "--run-dir", is_present=is_present)

    def _refuse_moved_folder(self, step: int) -> str | None:
        """Return a line if the run's folder is no longer at its path; None otherwise."""
        # A save begun before the move makes the path anew, and later records would go to the new folder: the run would
        # end well, in two halves.
        if self._directory.config.is_file():
            return None
        return self.cannot_write(f"the checkpoint of step {step}", f"no {self._directory.config.name} there")

    def _cannot_save(self, step: int, reason: str) -> str:
        """Return the line of `cannot_write` on a checkpoint, which may lie in a separate folder."""
        name, folder = f"the checkpoint of step {step}", self._directory.checkpoints
        if self._directory.checkpoint_folder is None:
            return self.cannot_write(name, reason)
        return self._refusal(name, reason, folder, "--checkpoints", is_present=folder.is_dir())

    def _refusal(self, name: str, reason: str, folder: Path, option: str, *, is_present: bool) -> str:
        error = f"Expected to write {name} in {str(folder)!r}, got {reason}."
        if not is_present:
            return f"{error} The folder was moved or removed during the run. Pass its new place as {option} to go on."
        way_out = "Make it writable"
        needed, free = self._nbytes(), _free_nbytes(folder)
        if os.strerror(errno.EFBIG) in reason:
            way_out = "Raise the limit on the sizes of files (`ulimit -f`)"
        elif os.strerror(errno.EDQUOT) in reason:
            way_out = f"Free {size(needed)} of the disk quota for a checkpoint"
        elif free < needed or os.strerror(errno.ENOSPC) in reason:
            # A checkpoint is more than tensors: free space of the tensors' size has turned out not to be enough.
            is_close = needed <= free < 2 * needed
            more_than = f"more than {size(free)}" if is_close else size(needed)
            way_out = f"Free {more_than} for a checkpoint (the disk has {size(free)})"
        return f"{error} {way_out}, then run the same command again. {self.last_checkpoint_line()}"

    def _check_weights(self, step: int) -> None:
        nonfinite = find_nonfinite(self._model, of="weight")
        if nonfinite:
            raise LossNotFiniteError(
                f"Expected finite weights to save, got {nonfinite[0].kind} in {nonfinite[0].name!r} after step {step}. "
                f"{self.last_checkpoint_line()} {TRY}"
            )

    def _nbytes(self) -> int:
        """Return the bytes of a checkpoint's tensors over all ranks."""
        tensors = [*self._model.parameters(), *self._model.buffers(), *stored_slots(self._optimizer)]
        return sum(tensor.numel() * tensor.itemsize for tensor in tensors if isinstance(tensor, torch.Tensor))


TRY = "Try a smaller --lr or more --warmup-steps; docs/how-to/find-a-nan.md tells how to find the parameter."


def reason_of(error: OSError | CheckpointFailed) -> str:
    """Return the reason a file was not written, in a line."""
    if isinstance(error, CheckpointFailed):
        # A writer on a full disk cannot write the reason either: a peer's reason says more.
        rank, text = min(error.failures.items(), key=lambda failure: (not failure[1].strip(), failure[0]))
        return one_line(f"{text.strip() or 'no reason, which a full disk leaves no room for'} (rank {rank})")
    where = f": {error.filename!r}" if error.filename is not None else ""
    return one_line(f"{error.strerror or error}{where}")


def _free_nbytes(folder: Path) -> int:
    """Return the free bytes of a disk; many if the disk does not say."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return sys.maxsize
