"""A run that is killed at any moment and started again ends with the records and tensors of an unbroken one."""

import itertools
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from drawn_kills import CallCounts, CountedPhases, Kill, Phase, calls_in_process, draw_kill, kill_this_process

from lamella import Config
from lamella._processes.placement import Rank, place
from lamella._record.metrics import Record, StepRecord, read
from lamella._record.run_directory import RunDirectory
from lamella._training.checks import run_directory
from lamella._training.host_preparation import lock
from lamella._training.preparation import PreparedRun, prepare
from lamella._training.saves import Saves
from lamella._training.trainer import Trainer
from lamella._training.validation import Validation
from lamella_testing import RankFailure, run_ranks
from lamella_testing.held_starts import HeldStart

NUM_RANKS = 2
TIMEOUT_S = 300.0
NUM_KILLS = 10
PHASES = {
    "building": Phase(Trainer, "__init__"),
    "start": Phase(Trainer, "_restore"),
    "step": Phase(Trainer, "_step"),
    "records": Phase(Trainer, "_write"),
    "validation": Phase(Validation, "records"),
    "save": Phase(Saves, "save"),
    "end": Phase(Saves, "close"),
}


class Unbroken(NamedTuple):
    """A run without a kill.

    Attributes:
        config: The settings.
        contents: The records and the bytes of checkpoints.
        counts: The calls by phase, by rank.
        preparation: The calls of the preparation.
    """

    config: Config
    contents: tuple[list[Record], dict[str, bytes]]
    counts: list[CallCounts]
    preparation: int


def contents_of(directory: RunDirectory) -> tuple[list[Record], dict[str, bytes]]:
    """The records, without speeds; and the contents of all tensors' files in the checkpoints."""
    records = [
        replace(record, tokens_per_s=0.0, memory_nbytes=0) if isinstance(record, StepRecord) else record
        for record in read(directory.metrics)
    ]
    files = directory.checkpoints.rglob("*.distcp")
    return records, {str(file.relative_to(directory.checkpoints)): file.read_bytes() for file in files}


@contextmanager
def prepared(config: Config) -> Iterator[PreparedRun]:
    """A run that is locked in the block."""
    with ExitStack() as locks:
        lock(config, locks)
        yield prepare(place(config))


def prepare_alone(config: Config) -> None:
    with prepared(config):
        pass


def train_prepared(config: Config, directory: RunDirectory, kill: Kill | None = None) -> CallCounts:
    """Train on this rank, or begin to; return the calls by phase."""
    rank = Rank(rank=dist.get_rank(), num_ranks=NUM_RANKS, device=torch.device("cpu"))
    phases = CountedPhases(PHASES, kill if kill is not None and kill.rank == rank.rank else None)
    with phases.patched():
        Trainer(config, directory, rank).train()
    return phases.counts


def train(config: Config, kill: Kill | None = None) -> list[CallCounts]:
    """Prepare and train; return the calls by phase, by rank, and nothing for a complete run.

    Raises:
        RankFailure: A rank was killed.
    """
    with prepared(config) as run:
        if run.is_complete:
            return []
        return run_ranks(train_prepared, NUM_RANKS, config, run.directory, kill, timeout_s=TIMEOUT_S)


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


def kill_preparation(draw: random.Random, unbroken: Unbroken, config: Config) -> None:
    calls_in_process(lambda: prepare_alone(config), fatal=draw.randint(1, unbroken.preparation))


@pytest.fixture(scope="module")
def unbroken(shared_config: Config) -> Unbroken:
    run = replace(shared_config.run, checkpoint_interval=2, validation_interval=3)
    config = replace(shared_config, optim=replace(shared_config.optim, steps=5), run=run)
    num_calls = calls_in_process(lambda: prepare_alone(config))
    assert num_calls is not None
    counts = train(config)
    return Unbroken(config, contents_of(run_directory(config)), counts, num_calls)


def in_folder(folder: Path, config: Config) -> Config:
    return replace(config, run=replace(config.run, directory=str(folder)))


@pytest.mark.parametrize(
    ("phase", "occurrences"),
    [("step", slice(0, 2)), ("save", slice(0, 1)), ("validation", slice(2, None))],
    ids=["before the first checkpoint", "in the first save", "in the last validation"],
)
def test_a_run_that_is_killed_ends_as_an_unbroken_one(
    unbroken: Unbroken, tmp_path: Path, phase: str, occurrences: slice
) -> None:
    config = in_folder(tmp_path / "run", unbroken.config)
    draw = random.Random(phase)
    assert train_until(draw_kill(draw, phase, unbroken.counts, occurrences), config)
    if phase == "validation":
        kill_preparation(draw, unbroken, config)  # of the run that goes on
    train(config)
    assert contents_of(run_directory(config)) == unbroken.contents


def test_a_checkpoint_of_a_killed_run_does_not_appear_in_the_midst_of_the_next(
    unbroken: Unbroken, tmp_path: Path
) -> None:
    config = in_folder(tmp_path / "run", unbroken.config)
    starts = [HeldStart(tmp_path / f"process-{rank}") for rank in range(NUM_RANKS)]
    step = Trainer._step

    def killed_after_save(trainer: Trainer, index: int) -> Any:
        if index == 2:
            saver = trainer._saves._checkpoints._saver
            assert saver is not None and saver._saves[-1]._sender is not None
            saver._saves[-1]._sender.join()
            dist.barrier()
            kill_this_process()
        return step(trainer, index)

    def train_until_killed(directory: RunDirectory) -> None:
        with starts[dist.get_rank()].holding(), patch.object(Trainer, "_step", killed_after_save):
            train_prepared(config, directory)

    with prepared(config) as run, pytest.raises(RankFailure, match="SIGKILL"):
        run_ranks(train_until_killed, NUM_RANKS, run.directory)
    with prepared(config) as run:
        for start in starts:
            start.release()  # All at first: each needs the parts of the others.
        for start in starts:
            start.run_to_end()
        run_ranks(train_prepared, NUM_RANKS, config, run.directory)
    assert contents_of(run_directory(config)) == unbroken.contents


@pytest.mark.slow
@pytest.mark.parametrize("first_seed", range(0, 50, 10))
def test_ten_kills_at_drawn_moments_leave_runs_that_end_as_an_unbroken_one(
    unbroken: Unbroken, tmp_path: Path, first_seed: int
) -> None:
    phases = [*PHASES, "preparation"]
    seeds = itertools.count(first_seed)
    num_kills = 0
    while num_kills < NUM_KILLS:
        seed = next(seeds)
        config, draw = in_folder(tmp_path / f"{seed}", unbroken.config), random.Random(seed)
        # The second kill is at the first occurrence of its phase, which the rest of a run has too.
        for phase, occurrences in ((phases[seed % len(phases)], slice(None)), (draw.choice(phases), slice(1))):
            if phase == "preparation":
                kill_preparation(draw, unbroken, config)
                num_kills += 1
            else:
                num_kills += train_until(draw_kill(draw, phase, unbroken.counts, occurrences), config)
        train(config)
        assert contents_of(run_directory(config)) == unbroken.contents, f"seed {seed}"
