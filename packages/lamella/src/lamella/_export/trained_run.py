"""The folder of a run that has trained, and the choice of one of its checkpoints."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lamella._record.run_directory import RunDirectory
from lamella._settings.config import Config, resolve
from lamella._settings.files import read_file
from lamella._settings.options import ConfigError
from lamella_checkpoint import CheckpointDirectory


@dataclass(frozen=True, kw_only=True)
class TrainedRun:
    """A run with a checkpoint.

    Attributes:
        directory: The run's files.
        config: The settings that the run was last started with.
        checkpoint: The chosen checkpoint.
        step: The number of steps that the checkpoint has completed.
    """

    directory: RunDirectory
    config: Config
    checkpoint: Path
    step: int

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return self.directory.root.resolve().name

    def extra(self) -> Mapping[str, object]:
        """Return the checkpoint's objects: the fingerprint of the text, and the settings of the stream.

        Raises:
            CheckpointDamaged: The checkpoint's metadata cannot be read.
        """
        from lamella_convert import open_checkpoint

        return open_checkpoint(self.checkpoint).extra


def is_run(path: Path) -> bool:
    """True for the folder of a run of `lamella train`."""
    directory = RunDirectory(path)
    return directory.config.is_file() and directory.model_config.is_file()


def open_run(path: Path, step: int | None = None) -> TrainedRun:
    """Return a run with its newest whole checkpoint, or with the checkpoint of a step.

    Args:
        path: The run's folder.
        step: The number of steps of the checkpoint; None for the newest.

    Raises:
        ConfigError: The folder is no run's, has no checkpoint, or none of that step.

    Effects: reads the run's settings; a run in progress is left alone.
    """
    directory = RunDirectory(path)
    if not is_run(path):
        got = "a folder without a run's config.json and model" if path.is_dir() else "no such folder"
        raise ConfigError(
            f"Expected the folder of a run of `lamella train` (its --run-dir), got {str(path)!r}, {got}."
            f"{run_around(path)}"
        )
    config = resolve(read_file(str(directory.config)))
    directory = RunDirectory(path, config.run.checkpoints)
    checkpoints = CheckpointDirectory(directory.checkpoints)
    steps = checkpoints.steps()
    if not steps:
        raise ConfigError(
            f"Expected a checkpoint in {str(directory.checkpoints)!r}, got none. The run saves one every "
            "--checkpoint-interval steps, and at its end."
        )
    if step is not None and step not in steps:
        raise ConfigError(f"Expected --step to be one of the saved steps, {', '.join(map(str, steps))}, got {step}.")
    chosen = steps[-1] if step is None else step
    return TrainedRun(
        directory=directory,
        config=config,
        checkpoint=checkpoints.path(chosen),
        step=chosen,
    )


def run_around(path: Path) -> str:
    """Return a way out for a path inside a run's folder: a sentence that names the run's folder, else no text."""
    around = next((folder for folder in path.absolute().parents if is_run(folder)), None)
    return "" if around is None else f" The run's folder is {str(around)!r}."


def earlier_steps(run: TrainedRun) -> list[int]:
    """Return the steps of the run's checkpoints before the chosen one."""
    return [step for step in CheckpointDirectory(run.directory.checkpoints).steps() if step < run.step]
