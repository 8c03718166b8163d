"""A directory of checkpoints by step, of which the newest are kept."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from lamella_checkpoint._base.correspondence import Correspondence
from lamella_checkpoint._base.ranks import on_device_of, on_rank_zero
from lamella_checkpoint._training.async_save import AsyncSaver, Closing, SaveHandle
from lamella_checkpoint._training.retention import Retention, clean, path_of, steps_in
from lamella_checkpoint._training.save import save


class CheckpointDirectory(Closing):
    """Checkpoints named `step_00000010`, under one root that one run at a time writes to.

    Only complete checkpoints are seen: what a killed save left has another name, and is removed by the next save.
    """

    def __init__(self, root: str | os.PathLike[str], keep: int | None = 3) -> None:
        """Use `root`, which need not exist yet.

        Args:
            root: On storage that every rank sees.
            keep: How many of the newest complete checkpoints survive a save; None keeps all.

        The first `save` creates the directory.
        """
        if keep is not None and keep < 1:
            raise ValueError(f"Expected to keep at least one checkpoint, got keep={keep!r}. None keeps all.")
        self.root = Path(os.path.realpath(root))
        self.keep = keep
        self._saver: AsyncSaver | None = None

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step lies, or would."""
        if step < 0:
            raise ValueError(f"Expected a step of 0 or more, got {step!r}.")
        return path_of(self.root, step)

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, in order.

        Effects: reads the directory on this rank alone; no collective.
        """
        return steps_in(self.root)

    def latest(self) -> Path | None:
        """The complete checkpoint of the highest step; None where there is none.

        Effects: reads the directory on this rank alone; no collective. Ranks that see different directories are told
            apart by `load`, which refuses to mix checkpoints.
        """
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

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

        The one just written stays, even where newer steps are found (of a run that went back).

        Returns:
            The checkpoint's path.

        Raises:
            CheckpointFailed: As `save`; or a save in the background failed, and nothing has begun.

        Effects: waits for a save in the background to end; collective on the default group, as `save`, with two more
            exchanges; rank 0 removes what killed saves left anywhere under the root, and older checkpoints.
        """
        path = self.path(step)
        self.wait()
        with on_device_of(model.parameters()):
            on_rank_zero("clean the checkpoint directory", lambda: clean(self.root))
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
        """`save` in the background: see `AsyncSaver.save`, whose effects and errors these are.

        Where another save is in the air it is waited for, whatever its step. `steps`, `latest` and `keep` know a
        checkpoint once it is complete; only then are older ones removed.

        Returns:
            What to ask for the outcome. Need not be kept; call `wait` before the program ends to hear of a failure.

        Effects: as `AsyncSaver.save`; the first one starts a process beside this rank, and what killed saves left under
            the root is removed in the background.
        """
        path = self.path(step)
        self._saver = self._saver or AsyncSaver()
        self._saver._retention = self._retention
        return self._saver.save(path, model=model, optimizer=optimizer, extra=extra, correspondences=correspondences)

    def wait(self) -> None:
        """Do what `AsyncSaver.wait` does, if there have been saves in the background."""
        if self._saver is not None:
            self._saver.wait()

    def close(self) -> None:
        """Do what `AsyncSaver.close` does, if there have been saves in the background."""
        saver, self._saver = self._saver, None
        if saver is not None:
            saver.close()

    @property
    def _retention(self) -> Retention:
        return Retention(root=self.root, num_kept=self.keep)
