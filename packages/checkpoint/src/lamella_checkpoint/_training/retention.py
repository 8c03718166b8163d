"""Checkpoints by step under one root: listing, retention, and removal of killed saves' leftovers."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lamella_files import METADATA_FILE, Leftover, leftovers, remove

_STEP: Final = re.compile("step_([0-9]{8}|[1-9][0-9]{8,})")
"""The names that `path_of` makes, and no others: a step read from another name would lead to a path that is absent."""


def path_of(root: Path, step: int) -> Path:
    """The path of a step's checkpoint, existing or not."""
    return root / f"step_{step:08d}"


def steps_in(root: Path) -> list[int]:
    """The steps of the complete checkpoints, in order."""
    paths = root.iterdir() if root.is_dir() else []
    matches = (_STEP.fullmatch(path.name) for path in paths if (path / METADATA_FILE).is_file())
    return sorted(int(match[1]) for match in matches if match)


def leftovers_of_steps(root: Path) -> list[Leftover]:
    """The leftovers of saves to any step."""
    return [leftover for leftover in leftovers(root) if _STEP.fullmatch(leftover.target)]


def clean(root: Path) -> None:
    """Restore checkpoints that interrupted saves moved aside, and remove all other leftovers."""
    for leftover in leftovers_of_steps(root):
        leftover.clear()


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Keep the newest `num_kept` checkpoints under `root`; None keeps all."""

    root: Path
    num_kept: int | None

    def apply(self, newest: Path) -> None:
        """Remove the surplus, oldest first, but never `newest`. Effects: on the disk alone; called on one rank."""
        if self.num_kept is None:
            return
        for step in steps_in(self.root)[: -self.num_kept]:
            if (path := path_of(self.root, step)) != newest:
                remove(path)
