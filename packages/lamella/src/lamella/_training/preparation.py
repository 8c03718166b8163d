"""The preparation of a run before any worker starts: checked, read, written."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from lamella._data.text import streamed_identity
from lamella._record.run_directory import RunDirectory
from lamella._settings.config import Config
from lamella._training.checks import check
from lamella._training.sources import RunSources, check_profile, read
from lamella._training.writing import in_steps, write

_NUM_DIGITS: Final = 16


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A prepared run.

    Attributes:
        directory: The run's files.
        first_step: Steps completed by the latest checkpoint; 0 for a new run.
        is_complete: True for a run without a step to go.
        lines: Lines to print at the start: on data, model, weights and the checkpoint.
        config: The settings, with steps for epochs.
        identity: A digest of each file of the text and of the tokenizer, and the settings and the step that the data
            stream begins with, by name: the same on all hosts that prepare.
    """

    directory: RunDirectory
    first_step: int
    is_complete: bool
    lines: tuple[str, ...]
    config: Config
    identity: Mapping[str, str]


def prepare(config: Config, *, is_first: bool = True) -> PreparedRun:
    """Check the settings, read the sources, then write all files the workers read.

    Args:
        config: The run's settings, placed on this machine.
        is_first: True on the host of rank 0, to which the metrics belong, and whose rank sets checkpoints aside.

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
        write(config, run, sources, lines, is_first=is_first)
    if is_complete:
        lines.append(f"Already complete at step {done}. Pass --steps M, above {done}, to go on.")
    elif done:
        lines.append(f"resuming: step {done} of {steps}, from {run.directory.checkpoints}")
    return PreparedRun(
        directory=run.directory,
        first_step=done,
        is_complete=is_complete,
        lines=tuple(lines),
        config=config,
        identity=_identity(run.directory, sources, steps),
    )


def _identity(directory: RunDirectory, sources: RunSources, num_steps: int) -> dict[str, str]:
    names = {name: f"{setting}" for name, setting in sources.stream.items()}
    names |= {"optim.steps": f"{num_steps}", "the step to go on from": f"{sources.first_step}"}
    for file in (*sources.text.corpus.train, *sources.text.corpus.validation):
        name = f"the text {file.name!r}"
        names[name] = f"{names.get(name, '')}{file.digest[:_NUM_DIGITS]}"  # A single file is in both splits.
    if streamed := streamed_identity(sources.text.corpus.streamed):
        digest = hashlib.sha256(streamed.encode(errors="surrogateescape")).hexdigest()
        names["the list of the files to stream"] = digest[:_NUM_DIGITS]
    tokenizer = directory.model / "tokenizer.json"
    if tokenizer.is_file():
        names["the tokenizer"] = hashlib.sha256(tokenizer.read_bytes()).hexdigest()[:_NUM_DIGITS]
    return names
