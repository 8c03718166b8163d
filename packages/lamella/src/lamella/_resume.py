"""The checkpoint a run goes on from, and later checkpoints, which are set aside."""

import re
import secrets
from pathlib import Path
from typing import Final

from lamella._config import RunConfig
from lamella._options import ConfigError
from lamella._output import one_line
from lamella_checkpoint import CheckpointDamaged, CheckpointDirectory, CheckpointFailed

_STEP: Final = re.compile(r"step_(\d{8,})")


def wanted_checkpoint(checkpoints: CheckpointDirectory, run: RunConfig) -> Path | None:
    """The checkpoint to go on from: the newest, or the one of `--from-step`; None in a new run.

    Raises:
        ConfigError: No checkpoint is of that step, or the newest has lost its metadata.
    """
    if run.from_step is None:
        newest = max(_steps(checkpoints.root), default=None)
        if newest is not None and newest not in checkpoints.steps():
            raise damaged(
                checkpoints, checkpoints.path(newest), "Expected a whole checkpoint, got one without .metadata"
            )
        return checkpoints.latest()
    if run.from_step not in checkpoints.steps():
        got = ", ".join(map(str, checkpoints.steps())) or "none"
        raise ConfigError(
            f"Expected a checkpoint of step {run.from_step} in {str(checkpoints.root)!r} for --from-step, got {got}."
        )
    return checkpoints.path(run.from_step)


def set_aside_after(checkpoints: CheckpointDirectory, step: int) -> list[Path]:
    """Rename the checkpoints after a step, so that no run goes on from one, and return the new paths."""
    return [_set_aside(checkpoints.path(later)) for later in _steps(checkpoints.root) if later > step]


def damaged(checkpoints: CheckpointDirectory, checkpoint: Path, problem: object) -> ConfigError:
    """The refusal of a damaged checkpoint, with the option that avoids it.

    No damaged checkpoint is passed over in silence: its steps would be made twice, and nobody would know.
    """
    before = [step for step in checkpoints.steps() if step < int(checkpoint.name.removeprefix("step_"))]
    way_out = (
        f"Run the same command with --from-step {before[-1]} to go on from the checkpoint before it"
        if before
        else "There is none before it: pass another --run-dir to start anew"
    )
    return ConfigError(
        f"{one_line(str(problem)).rstrip('.')}: the checkpoint {str(checkpoint)!r} is damaged. {way_out}, "
        "or put back what it lacks."
    )


def damage_in(error: CheckpointDamaged | CheckpointFailed) -> str | None:
    """The damage, as its finder raises it and as the other ranks hear of it; None for another failure."""
    if isinstance(error, CheckpointDamaged):
        return f"{error}"
    kind = f"{CheckpointDamaged.__name__}: "
    return next((text.removeprefix(kind) for text in error.failures.values() if text.startswith(kind)), None)


def _set_aside(path: Path) -> Path:
    return path.rename(path.with_name(f"{path.name}.aside-{secrets.token_hex(4)}"))


def _steps(root: Path) -> list[int]:
    """The steps of all folders with a checkpoint's name, whole or not."""
    matches = (_STEP.fullmatch(path.name) for path in root.glob("step_*") if path.is_dir())
    return sorted(int(match[1]) for match in matches if match)
