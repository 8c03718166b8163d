"""A directory of checkpoints by step, with the newest kept."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import SupportsIndex

import torch
from torch import nn

from lamella_checkpoint._base.ranks import exchange, num_ranks, on_device_of, on_rank_zero
from lamella_checkpoint._training.async_save import AsyncSaver, Closing
from lamella_checkpoint._training.handle import SaveHandle
from lamella_checkpoint._training.retention import Retention, clean, path_of, steps_in
from lamella_checkpoint._training.save import save
from lamella_files import Correspondence


class CheckpointDirectory(Closing):
    """Checkpoints named `step_00000010`, under a root; one run at a time may write to the root.

    Only complete checkpoints are listed: leftovers of killed saves, under other names, go with the next save.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        keep: int | None = 3,
        *,
        timeout: float | None = 600.0,
        print_line: Callable[[str], object] | None = None,
    ) -> None:
        """Use `root`; the first `save` creates the directory.

        Args:
            root: On storage visible to every rank.
            keep: Number of newest complete checkpoints kept after a save; None keeps all.
            timeout: The timeout of saves in the background, in seconds: as for `AsyncSaver`.
            print_line: Called with a line for each minute of a wait; None logs the line as a warning.
        """
        if keep is not None and not _is_whole(keep, 1):
            raise ValueError(f"Expected to keep a whole number of checkpoints, 1 or more, got {keep=}. None keeps all.")
        self.root = Path(os.path.realpath(root))
        self.keep = keep
        self._timeout, self._print_line = timeout, print_line
        self._saver: AsyncSaver | None = None

    def path(self, step: int) -> Path:
        """The path of a step's checkpoint, existing or not."""
        if not _is_whole(step, 0):
            raise ValueError(f"Expected a step as a whole number of 0 or more, got {step!r}.")
        return path_of(self.root, step)

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, in order.

        Effects: reads the directory on this rank alone; no collective.
        """
        return steps_in(self.root)

    def latest(self) -> Path | None:
        """The complete checkpoint of the highest step; None without any.

        Effects: reads the directory on this rank alone; no collective. If ranks see different directories, `load`
            refuses to mix checkpoints.
        """
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def discard_unfinished(self) -> None:
        """End the unfinished saves of killed runs: no checkpoint of theirs appears any more.

        A writing process outlives a killed rank, and may complete the rank's last checkpoint while the next run trains
        on from an earlier checkpoint. A run with records beside the checkpoints calls this before `latest`.

        Effects: restores checkpoints moved aside by interrupted saves, and removes all remaining leftovers under the
            root; on this rank alone, no collective. No run may be writing to the root.
        """
        clean(self.root)

    def save(
        self,
        step: int,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        extra: Mapping[str, object] | None = None,
        correspondences: Sequence[Correspondence] = (),
    ) -> Path:
        """`lamella_checkpoint.save` at a step, then remove all but the newest `keep` checkpoints.

        The new checkpoint stays, even beside newer steps (of a run that went back).

        Returns:
            The checkpoint's path.

        Raises:
            CheckpointFailed: The conditions of `save`; or a save in the background failed, and nothing has begun.

        Effects: waits for a save in the background to end; collective on the default group, as `save`, with two more
            exchanges; rank 0 removes leftovers of killed saves anywhere under the root, and older checkpoints.
        """
        path = self.path(step)

        def clean_root(_: object) -> list[None]:
            clean(self.root)
            return [None] * num_ranks()

        with on_device_of(model.parameters()):
            # The wait is inside the exchange: a failure raised on one rank alone would hang the peers.
            exchange("end the save in the background and clean the directory", self.wait, clean_root)
            save(path, model=model, optimizer=optimizer, extra=extra, correspondences=correspondences)
            on_rank_zero("remove older checkpoints", lambda: self._retention.apply(path))
        return path

    def save_async(
        self,
        step: int,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        extra: Mapping[str, object] | None = None,
        correspondences: Sequence[Correspondence] = (),
    ) -> SaveHandle:
        """`save` in the background: see `AsyncSaver.save` for effects and errors.

        A save in flight, of any step, is awaited first. `steps`, `latest` and `keep` count a checkpoint when complete;
        only then are older checkpoints removed.

        Returns:
            A handle for the outcome. May be dropped; call `wait` before the program ends to learn of a failure.

        Effects: as `AsyncSaver.save`; the first call starts a process beside this rank, and leftovers of killed saves
            under the root are removed in the background.
        """
        path = self.path(step)
        self._saver = self._saver or AsyncSaver(timeout=self._timeout, print_line=self._print_line)
        self._saver._retention = self._retention
        return self._saver.save(path, model=model, optimizer=optimizer, extra=extra, correspondences=correspondences)

    def wait(self) -> None:
        """`AsyncSaver.wait`, if saves in the background have been made."""
        if self._saver is not None:
            self._saver.wait()

    def close(self) -> None:
        """`AsyncSaver.close`, if saves in the background have been made."""
        saver, self._saver = self._saver, None
        if saver is not None:
            saver.close()

    @property
    def _retention(self) -> Retention:
        return Retention(root=self.root, num_kept=self.keep)


def _is_whole(number: object, least: int) -> bool:
    """Whether a number is an integer, Python's or NumPy's, of `least` or more."""
    return isinstance(number, SupportsIndex) and number.__index__() >= least
