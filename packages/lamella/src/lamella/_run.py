"""A whole training run: prepare once, start the workers or join torchrun's, say where things are."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from lamella._config import Config, to_toml
from lamella._directory import RunDirectory
from lamella._launch import run_workers
from lamella._options import ConfigError
from lamella._place import place, process_group, under_torchrun
from lamella._prepare import Prepared, prepare
from lamella._report import ValidationRecord, read
from lamella_checkpoint import CheckpointDirectory


@dataclass(frozen=True, kw_only=True)
class Result:
    """Where a run's results are, and its first and last validation loss in nats a `unit`: a byte, or a token."""

    checkpoint: Path
    plot: Path
    metrics: Path
    first_validation: float
    last_validation: float
    unit: str = "byte"

    @property
    def ratio(self) -> float:
        """The last validation loss as a share of the first."""
        return self.last_validation / self.first_validation

    def lines(self) -> tuple[str, ...]:
        """The result in words."""
        losses = f"{self.first_validation:.4f} -> {self.last_validation:.4f} nats/{self.unit}"
        return (
            f"validation: {losses} ({self.ratio:.1%} of the first)",
            f"checkpoint: {self.checkpoint}",
            f"plot: {self.plot}",
            f"metrics: {self.metrics}",
        )


def train(config: Config) -> Result:
    """Train as configured, or go on from the run's latest checkpoint, and return where the results are.

    Under torchrun every rank calls this; otherwise the caller's process starts the workers and waits for them.

    Raises:
        ConfigError: The run cannot start as asked; raised before any worker is started.
        WorkerError: A worker died; the others have been stopped.

    Effects: prints the resolved configuration, progress and the result.
    """
    config = place(config)
    if under_torchrun():
        return _train_as_rank(config)
    prepared = _prepare_aloud(config)
    if not _is_complete(config, prepared):
        command = (sys.executable, "-P", "-m", "lamella._worker", str(prepared.directory.root))
        run_workers(command, config.parallel.ranks or 1, config.parallel.threads or 1)
    return _result(prepared.directory, aloud=True)


def _train_as_rank(config: Config) -> Result:
    from lamella._train import Trainer

    # Before there is a group: the first rank prepares alone, and the others wait for it to join.
    outcome = _attempt(config) if os.environ["RANK"] == "0" else None
    with process_group(config.parallel) as rank:
        prepared = _agreed(outcome)
        if not _is_complete(config, prepared):
            Trainer(config, prepared.directory, rank).train()
        return _result(prepared.directory, aloud=rank.is_first)


def _attempt(config: Config) -> Prepared | ConfigError:
    try:
        return _prepare_aloud(config)
    except ConfigError as error:
        return error


def _agreed(outcome: Prepared | ConfigError | None) -> Prepared:
    """The first rank's outcome, on every rank; raised if it is an error. Effects: collective."""
    outcomes = [outcome]
    dist.broadcast_object_list(outcomes)
    if not isinstance(outcomes[0], Prepared):
        raise outcomes[0] or AssertionError("the first rank prepares")
    return outcomes[0]


def _prepare_aloud(config: Config) -> Prepared:
    """Prepare; then say what will run. Nothing is printed for a run that is refused."""
    prepared = prepare(config)
    print(to_toml(config), *prepared.summary, sep="\n")
    done, steps = prepared.first_step, config.optim.steps
    if _is_complete(config, prepared):
        print(f"Already complete at step {done}. Pass --steps M, above {done}, to go on.")
    elif done:
        print(f"resuming: step {done} of {steps}, from {prepared.directory.checkpoints}")
    sys.stdout.flush()
    return prepared


def _is_complete(config: Config, prepared: Prepared) -> bool:
    return prepared.first_step >= config.optim.steps


def _result(directory: RunDirectory, *, aloud: bool) -> Result:
    validations = [record for record in read(directory.metrics) if isinstance(record, ValidationRecord)]
    checkpoint = CheckpointDirectory(directory.checkpoints).latest()
    if not validations or checkpoint is None:
        raise ConfigError(f"Expected validations and a checkpoint in {str(directory.root)!r}, got none.")
    result = Result(
        checkpoint=directory.checkpoints / checkpoint.name,
        plot=directory.plot,
        metrics=directory.metrics,
        first_validation=validations[0].nats,
        last_validation=validations[-1].nats,
        unit=validations[-1].unit,
    )
    if aloud:
        print(*result.lines(), sep="\n", flush=True)
    return result
