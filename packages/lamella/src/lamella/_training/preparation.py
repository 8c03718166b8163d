"""The preparation of a run before any worker starts: checked, read, written."""

from dataclasses import dataclass

from lamella._record.run_directory import RunDirectory
from lamella._settings.config import Config
from lamella._training.checks import check
from lamella._training.sources import check_profile, read
from lamella._training.writing import in_steps, write


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A prepared run.

    Attributes:
        directory: The run's files.
        first_step: Steps completed by the latest checkpoint; 0 for a new run.
        is_complete: True for a run without a step to go.
        lines: Lines to print at the start: on data, model, weights and the checkpoint.
        config: The settings, with steps for epochs.
    """

    directory: RunDirectory
    first_step: int
    is_complete: bool
    lines: tuple[str, ...]
    config: Config


def prepare(config: Config) -> PreparedRun:
    """Check the settings, read the sources, then write all files the workers read.

    Args:
        config: The run's settings, placed on this machine.

    Raises:
        ConfigError: The text, the model or the run to be resumed does not fit the settings.

    Effects: writes the run's directory unless the run is complete: tokenizer, tokens, configurations; drops metrics
        after the latest checkpoint.
    """
    lines: list[str] = []
    run = check(config)
    sources = read(config, run, lines)
    config = in_steps(config, run, sources)
    done, steps = sources.first_step, config.optim.steps
    is_complete = done >= steps
    if not is_complete:
        check_profile(config, done)
        write(config, run, sources, lines)
    if is_complete:
        lines.append(f"Already complete at step {done}. Pass --steps M, above {done}, to go on.")
    elif done:
        lines.append(f"resuming: step {done} of {steps}, from {run.directory.checkpoints}")
    return PreparedRun(
        directory=run.directory, first_step=done, is_complete=is_complete, lines=tuple(lines), config=config
    )
