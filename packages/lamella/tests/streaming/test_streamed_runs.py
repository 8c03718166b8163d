"""Runs that stream their text: the same batches on any number of ranks and after any stop, and no text read twice."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import torch.distributed as dist
from trained_runs import TrainOn

from lamella import Config, ConfigError
from lamella._data.batches import TokenBatch
from lamella._data.streamed_files import StreamedFile
from lamella._data.streamed_tables import StreamedTable
from lamella._processes.placement import Rank, place
from lamella._streaming.batches import ScatteredBatches
from lamella._training.preparation import prepare
from lamella._training.trainer import Trainer
from lamella_testing import run_ranks

WORDS = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu".split()


def texts(number: int, count: int) -> list[dict[str, Any]]:
    """Return records of unequal lengths, no two of them alike."""
    return [
        {"text": " ".join([f"file {number} row {row}", *WORDS[: 1 + (row * 7 + number) % 12]])} for row in range(count)
    ]


def write_lines(path: Path, records: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.fixture
def streamed(config: Config, tmp_path: Path) -> Config:
    """Settings of a run on a folder of three Parquet files, in row groups of 50, and a file of JSON lines."""
    folder = tmp_path / "streamed"
    folder.mkdir()
    for number in range(3):
        table = datasets.Dataset.from_list(texts(number, 120 + 30 * number))
        table.to_parquet(folder / f"part-{number}.parquet", batch_size=50)
    write_lines(folder / "more.jsonl", texts(3, 140))
    validation = write_lines(tmp_path / "validation.jsonl", texts(9, 40))
    return replace(
        config,
        data=replace(
            config.data,
            paths=(str(folder),),
            validation_paths=(str(validation),),
            streaming=True,
            shuffle_buffer=32,
        ),
        run=replace(config.run, checkpoint_interval=3, validation_interval=6, log_interval=1, keep_checkpoints=9),
    )


def mixture(config: Config, tmp_path: Path) -> Config:
    """The same settings with a mixture of the folder and a file that is shorter than the run."""
    low = write_lines(tmp_path / "low.jsonl", texts(5, 60))
    paths = (f"web={config.data.paths[0]}", f"low={low}")
    return replace(config, data=replace(config.data, paths=paths, mixture=("web=0.7", "low=0.3")))


def batches(config: Config, num_ranks: int) -> dict[int, TokenBatch]:
    """Train, and return the batch of each step, the ranks' sequences one after another."""
    directory = prepare(place(config)).directory

    def on_rank() -> list[tuple[int, torch.Tensor, torch.Tensor | None, int]]:
        record = []

        class Recorded(ScatteredBatches):
            def batch(self, step: int, rank: int, num_ranks: int) -> TokenBatch:
                batch = super().batch(step, rank, num_ranks)
                record.append((step, batch.tokens, batch.positions, self.num_targets(step)))
                return batch

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("lamella._training.trainer.ScatteredBatches", Recorded)
            rank = Rank(rank=dist.get_rank(), num_ranks=num_ranks, device=torch.device("cpu"))
            Trainer(config, directory, rank).train()
        return record

    steps: dict[int, TokenBatch] = {}
    for parts in zip(*run_ranks(on_rank, num_ranks), strict=True):
        positions = [part[2] for part in parts if part[2] is not None]
        batch = TokenBatch(torch.cat([part[1] for part in parts]), torch.cat(positions) if positions else None)
        assert {part[3] for part in parts} == {int((batch.targets >= 0).sum())}
        steps[parts[0][0]] = batch
    return steps


def assert_equal(steps: dict[int, TokenBatch], expected: dict[int, TokenBatch]) -> None:
    for step, batch in steps.items():
        assert torch.equal(batch.tokens, expected[step].tokens)
        assert (batch.positions is None) == (expected[step].positions is None)
        if batch.positions is not None and expected[step].positions is not None:
            assert torch.equal(batch.positions, expected[step].positions)


def stopped_at(config: Config, step: int, root: Path) -> Config:
    """Return the settings of a copy of a run that was killed after a step."""
    shutil.copytree(str(config.run.directory), root)
    for path in (root / "checkpoints").glob("step_*"):
        if int(path.name.removeprefix("step_")) > step:
            shutil.rmtree(path)
    return replace(config, run=replace(config.run, directory=str(root)))


@pytest.mark.parametrize("packing", ["stream", "documents", "none"])
@pytest.mark.parametrize("mixes", [False, True])
def test_any_number_of_ranks_and_any_stop_has_the_batches_of_one_uninterrupted_rank(
    streamed: Config, tmp_path: Path, packing: Any, mixes: bool
) -> None:
    config = mixture(streamed, tmp_path) if mixes else streamed
    config = replace(config, data=replace(config.data, packing=packing))
    expected = batches(config, 1)
    assert sorted(expected) == list(range(6))
    every = torch.cat([batch.tokens for batch in expected.values()])
    assert len({tuple(row) for row in every.tolist()}) == len(every)  # Six steps are less than an epoch.
    on_ranks = replace(config, run=replace(config.run, directory=str(tmp_path / "on-2")))
    assert_equal(batches(on_ranks, 2), expected)
    resumed = batches(stopped_at(config, 3, tmp_path / "resumed-2"), 2)
    assert sorted(resumed) == [3, 4, 5]
    assert_equal(resumed, expected)
    resumed = batches(stopped_at(on_ranks, 3, tmp_path / "resumed-1"), 1)
    assert sorted(resumed) == [3, 4, 5]
    assert_equal(resumed, expected)


def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one_bit_for_bit(
    streamed: Config, train: TrainOn, tmp_path: Path
) -> None:
    uninterrupted = train(streamed, 2)
    resumed = train(stopped_at(streamed, 3, tmp_path / "resumed"), 2)
    assert resumed.losses == uninterrupted.losses
    assert resumed.validations == uninterrupted.validations
