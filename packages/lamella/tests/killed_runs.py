"""Runs that are killed at drawn moments, started again, and compared with an unbroken run of the same settings."""

import hashlib
import itertools
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from drawn_kills import CallCounts, CountedPhases, Kill, Phase, calls_in_process, draw_kill

from lamella import Config
from lamella._data.batches import TokenBatch
from lamella._processes.placement import Rank, place
from lamella._record.metrics import Record, StepRecord, read
from lamella._record.run_directory import RunDirectory
from lamella._training.checks import run_directory
from lamella._training.host_preparation import lock
from lamella._training.preparation import PreparedRun, prepare
from lamella._training.saves import Saves
from lamella._training.trainer import Trainer
from lamella._training.validation import Validation
from lamella_convert import open_checkpoint
from lamella_testing import RankFailure, run_ranks

NUM_RANKS = 2
TIMEOUT_S = 300.0
PHASES = {
    "building": Phase(Trainer, "__init__"),
    "start": Phase(Trainer, "_restore"),
    "measurement": Phase(Trainer, "_measure"),
    "step": Phase(Trainer, "_step"),
    "records": Phase(Trainer, "_write"),
    "validation": Phase(Validation, "records"),
    "save": Phase(Saves, "save"),
    "end": Phase(Saves, "close"),
}
PREPARATION = "preparation"


class Contents(NamedTuple):
    """The contents of a run's folder.

    Attributes:
        records: The records, without speeds.
        tensors: The bytes of all tensors' files in the checkpoints, by file.
        extra: The objects in the checkpoints (step, place in streamed text), by checkpoint.
        batches: The digests of the batches that ranks trained on, by rank and step: one each, or a step's batches
            differ.
    """

    records: list[Record]
    tensors: dict[str, bytes]
    extra: dict[str, dict[str, Any]]
    batches: frozenset[str]


class Unbroken(NamedTuple):
    """A run without a kill.

    Attributes:
        config: The settings.
        contents: The contents of its folder.
        counts: The calls by phase, by rank.
        preparation: The calls of the preparation.
    """

    config: Config
    contents: Contents
    counts: list[CallCounts]
    preparation: int


def contents_of(config: Config) -> Contents:
    """Read the folder of a run."""
    directory = run_directory(config)
    checkpoints = directory.checkpoints
    return Contents(
        records=[
            replace(record, tokens_per_s=0.0, memory_nbytes=0) if isinstance(record, StepRecord) else record
            for record in read(directory.metrics)
        ],
        tensors={str(file.relative_to(checkpoints)): file.read_bytes() for file in checkpoints.rglob("*.distcp")},
        extra={path.name: dict(open_checkpoint(path).extra) for path in checkpoints.glob("step_*")},
        batches=frozenset(_batches_file(directory).read_text(encoding="ascii").splitlines()),
    )


def _batches_file(directory: RunDirectory) -> Path:
    return directory.root / "batches"


@contextmanager
def batches_noted(directory: RunDirectory) -> Iterator[None]:
    """Append the digest of each batch of this rank to a file of the run's folder, whole lines whenever it is killed."""
    file = os.open(_batches_file(directory), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    batch_of = Trainer._batch

    def noted(trainer: Trainer, step: int) -> TokenBatch:
        batch = batch_of(trainer, step)
        tensors = [tensor.numpy().tobytes() for tensor in batch if isinstance(tensor, torch.Tensor)]
        digest = hashlib.sha256(b"".join(tensors)).hexdigest()
        os.write(file, f"rank {dist.get_rank()} step {step} {digest}\n".encode())
        return batch

    with patch.object(Trainer, "_batch", noted):
        yield


@contextmanager
def prepared(config: Config) -> Iterator[PreparedRun]:
    """Give a run that is locked in the block."""
    with ExitStack() as locks:
        lock(config, locks)
        yield prepare(place(config))


def prepare_alone(config: Config) -> None:
    """Prepare a run, and let its lock go."""
    with prepared(config):
        pass


def train_prepared(
    config: Config, directory: RunDirectory, kill: Kill | None = None, counts_calls: bool = False
) -> CallCounts:
    """Train on this rank, or begin to; return the calls by phase."""
    rank = Rank(rank=dist.get_rank(), num_ranks=NUM_RANKS, device=torch.device("cpu"))
    kill = kill if kill is not None and kill.rank == rank.rank else None
    phases = CountedPhases(PHASES, kill, counts_calls=counts_calls)
    with batches_noted(directory), phases.patched():
        Trainer(config, directory, rank).train()
    return phases.counts


def train(config: Config, kill: Kill | None = None, *, counts_calls: bool = False) -> list[CallCounts]:
    """Prepare and train; return the calls by phase, by rank, if counted, and nothing for a complete run.

    Raises:
        RankFailure: A rank was killed.
    """
    with prepared(config) as run:
        if run.is_complete:
            return []
        return run_ranks(train_prepared, NUM_RANKS, config, run.directory, kill, counts_calls, timeout_s=TIMEOUT_S)


def train_until(kill: Kill, config: Config) -> bool:
    """Train until the kill; return False for a complete run."""
    try:
        is_complete = train(config, kill) == []
    except RankFailure as failure:
        if "SIGKILL" not in str(failure) and "by peer" not in str(failure):
            raise
        return True
    assert is_complete, f"the run passed {kill}"
    return False


def train_unbroken(config: Config) -> Unbroken:
    """Train without a kill, and count the calls."""
    num_calls = calls_in_process(lambda: prepare_alone(config))
    assert num_calls is not None
    counts = train(config, counts_calls=True)
    return Unbroken(config, contents_of(config), counts, num_calls)


def in_folder(folder: Path, config: Config) -> Config:
    """Return the settings of the same run in another folder."""
    return replace(config, run=replace(config.run, directory=str(folder)))


def kill_preparation(draw: random.Random, unbroken: Unbroken, config: Config) -> None:
    """Kill the preparation of a run at a drawn call."""
    calls_in_process(lambda: prepare_alone(config), fatal=draw.randint(1, unbroken.preparation))


def check_drawn_kill(
    unbroken: Unbroken, folder: Path, phase: str, occurrences: slice, *, kills_preparation: bool = False
) -> None:
    """Kill a run at a drawn moment of a phase, and the next preparation too if asked; compare the run's end."""
    config, draw = in_folder(folder, unbroken.config), random.Random(phase)
    assert train_until(draw_kill(draw, phase, unbroken.counts, occurrences), config)
    if kills_preparation:
        kill_preparation(draw, unbroken, config)
    train(config)
    assert contents_of(config) == unbroken.contents


def check_drawn_kills(
    unbroken: Unbroken, folder: Path, first_seed: int, num_kills: int, phases: Sequence[str] = (*PHASES, PREPARATION)
) -> None:
    """Kill runs twice each at drawn moments until so many kills are done, and compare each run's end.

    Args:
        unbroken: The run without a kill.
        folder: The parent of the runs' folders.
        first_seed: The first seed of the draws.
        num_kills: The number of kills.
        phases: The phases of the first kills in turn.
    """
    seeds = itertools.count(first_seed)
    while num_kills > 0:
        seed = next(seeds)
        config, draw = in_folder(folder / f"{seed}", unbroken.config), random.Random(seed)
        # The second kill is at the first occurrence of its phase, which the rest of a run has too.
        for phase, occurrences in (
            (phases[seed % len(phases)], slice(None)),
            (draw.choice((*PHASES, PREPARATION)), slice(1)),
        ):
            if phase == PREPARATION:
                kill_preparation(draw, unbroken, config)
                num_kills -= 1
            else:
                num_kills -= train_until(draw_kill(draw, phase, unbroken.counts, occurrences), config)
        train(config)
        assert contents_of(config) == unbroken.contents, f"seed {seed}"
