"""A run that is killed at any moment and started again ends with the records and tensors of an unbroken one."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from drawn_kills import kill_this_process
from killed_runs import (
    NUM_RANKS,
    Unbroken,
    check_drawn_kill,
    check_drawn_kills,
    contents_of,
    in_folder,
    prepared,
    train_prepared,
    train_unbroken,
)

from lamella import Config
from lamella._record.run_directory import RunDirectory
from lamella._training.trainer import Trainer
from lamella_testing import RankFailure, run_ranks
from lamella_testing.forked_writers import started_writers
from lamella_testing.held_starts import HeldStart

NUM_KILLS = 10


@pytest.fixture(scope="module")
def unbroken(shared_config: Config) -> Unbroken:
    run = replace(shared_config.run, checkpoint_interval=2, validation_interval=3)
    return train_unbroken(replace(shared_config, optim=replace(shared_config.optim, steps=5), run=run))


@pytest.mark.parametrize(
    ("phase", "occurrences"),
    [("step", slice(0, 2)), ("save", slice(0, 1)), ("validation", slice(2, None))],
    ids=["before the first checkpoint", "in the first save", "in the last validation"],
)
def test_a_run_that_is_killed_ends_as_an_unbroken_one(
    unbroken: Unbroken, tmp_path: Path, phase: str, occurrences: slice
) -> None:
    check_drawn_kill(unbroken, tmp_path / "run", phase, occurrences, kills_preparation=phase == "validation")


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
        with starts[dist.get_rank()].holding(), started_writers(), patch.object(Trainer, "_step", killed_after_save):
            train_prepared(config, directory)

    with prepared(config) as run, pytest.raises(RankFailure, match="SIGKILL"):
        run_ranks(train_until_killed, NUM_RANKS, run.directory)
    with prepared(config) as run:
        for start in starts:
            start.release()  # All at first: each needs the parts of the others.
        for start in starts:
            start.run_to_end()
        run_ranks(train_prepared, NUM_RANKS, config, run.directory)
    assert contents_of(config) == unbroken.contents


@pytest.mark.slow
@pytest.mark.parametrize("first_seed", range(0, 50, 10))
def test_ten_kills_at_drawn_moments_leave_runs_that_end_as_an_unbroken_one(
    unbroken: Unbroken, tmp_path: Path, first_seed: int
) -> None:
    check_drawn_kills(unbroken, tmp_path, first_seed, NUM_KILLS)


@pytest.mark.slow
@pytest.mark.parametrize("first_seed", range(50, 100, 10))
def test_ten_kills_in_validations_leave_runs_that_end_as_an_unbroken_one(
    unbroken: Unbroken, tmp_path: Path, first_seed: int
) -> None:
    check_drawn_kills(unbroken, tmp_path, first_seed, NUM_KILLS, ["validation"])
