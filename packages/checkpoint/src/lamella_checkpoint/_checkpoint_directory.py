"""A directory of checkpoints by step, of which the newest are kept."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from torch import nn

from lamella_checkpoint._directories import METADATA_FILE, leftovers, recover, remove
from lamella_checkpoint._ranks import on_device_of, on_rank_zero
from lamella_checkpoint._save import save

_STEP: Final = re.compile(r"step_(\d{8,})")


class CheckpointDirectory:
    """Checkpoints named `step_00000010`, under one root that one run at a time writes to.

    Only complete checkpoints are seen: what a killed save left has another name, and is removed by the next save.
    """

    def __init__(self, root: str | os.PathLike[str], keep: int | None = 3) -> None:
        """Use `root`, which need not exist yet.

        Args:
            root: On storage that every rank sees.
            keep: How many of the newest checkpoints survive a save; None keeps all.

        Effects: none; the first `save` creates the directory.
        """
        if keep is not None and keep < 1:
            raise ValueError(f"Expected to keep at least one checkpoint, got keep={keep!r}. None keeps all.")
        self.root = Path(os.path.realpath(root))
        self.keep = keep

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step lies, or would."""
        if step < 0:
            raise ValueError(f"Expected a step of 0 or more, got {step!r}.")
        return self.root / f"step_{step:08d}"

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, in order.

        Effects: reads the directory on this rank alone; no collective.
        """
        paths = self.root.iterdir() if self.root.is_dir() else []
        matches = (_STEP.fullmatch(path.name) for path in paths if (path / METADATA_FILE).is_file())
        return sorted(int(match[1]) for match in matches if match)

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
    ) -> Path:
        """`lamella_checkpoint.save` at a step, then remove all but the newest `keep` checkpoints.

        The one just written stays, even where newer steps are found (of a run that went back).

        Returns:
            The checkpoint's path.

        Effects: collective on the default group, as `save`, with two more exchanges; rank 0 removes what killed saves
            left anywhere under the root, and older checkpoints.
        """
        with on_device_of(model.parameters()):
            on_rank_zero("clean the checkpoint directory", self._clean)
            path = save(self.path(step), model=model, optimizer=optimizer, extra=extra)
            on_rank_zero("remove older checkpoints", lambda: self._retain(step))
        return path

    def _clean(self) -> None:
        for leftover in leftovers(self.root):
            if _STEP.fullmatch(leftover.target):
                recover(self.root / leftover.target)

    def _retain(self, just_saved: int) -> None:
        if self.keep is None:
            return
        for step in self.steps()[: -self.keep]:
            if step != just_saved:
                remove(self.path(step))
