"""Runs that stream their text: the same batches on any number of ranks and after any stop, and no text read twice."""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from streamed_texts import texts, write_folder, write_lines
from trained_runs import TrainOn

from lamella import Config, ConfigError
from lamella._data.batches import TokenBatch
from lamella._data.documents import PositionedParts
from lamella._data.tokens import load_tokens
from lamella._processes.placement import Rank, place
from lamella._streaming.batches import ScatteredBatches
from lamella._streaming.documents import DocumentStream, StreamPosition
from lamella._training.preparation import prepare
from lamella._training.trainer import Trainer
from lamella._training.training_batches import stream_reader
from lamella_checkpoint import CheckpointDirectory
from lamella_testing import run_ranks


@pytest.fixture
def streamed(config: Config, tmp_path: Path) -> Config:
    """Settings of a run on a folder of three Parquet files, in row groups of 50, and a file of JSON lines."""
    folder = write_folder(tmp_path)
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


class Counted(NamedTuple):
    """The batches of steps, a checkpoint's state after the last, and the documents that were read for them.

    Attributes:
        steps: The batch of each step, the ranks' sequences one after another.
        state: The state.
        documents: The number of documents, by file.
    """

    steps: dict[int, TokenBatch]
    state: dict[str, Any]
    documents: dict[str, int]


def read(config: Config, num_ranks: int, steps: range, state: Mapping[str, object] | None = None) -> Counted:
    """Read the batches of steps on forked ranks, as a run reads them that goes on from a state."""
    directory = prepare(config).directory

    def on_rank() -> tuple[list[tuple[TokenBatch, int]], dict[str, Any], dict[str, int]]:
        counts: dict[str, int] = {}

        def counted(self: DocumentStream, start: StreamPosition) -> Iterator[tuple[PositionedParts, StreamPosition]]:
            for document, position in documents(self, start):
                name = self.described(position)
                counts[name] = counts.get(name, 0) + 1
                yield document, position

        documents = DocumentStream._documents
        DocumentStream._documents = counted  # type: ignore[method-assign]  # of this forked process
        rank = dist.get_rank()
        packing = load_tokens(directory.tokens).packing
        batches = ScatteredBatches(
            stream_reader(config, directory, packing, 300) if rank == 0 else None,
            sequence_length=config.data.sequence_length,
            batch_size=config.optim.batch_size,
            is_packed=packing == "documents",
        )
        batches.begin(state or {})
        batches.measure(steps.start)
        parts = [(batches.batch(step, rank, num_ranks), batches.num_targets(step)) for step in steps]
        return parts, batches.state(), counts

    ranks = run_ranks(on_rank, num_ranks)
    batches: dict[int, TokenBatch] = {}
    for step, parts in zip(steps, zip(*(parts for parts, _, _ in ranks), strict=True), strict=True):
        positions = [batch.positions for batch, _ in parts if batch.positions is not None]
        tokens = torch.cat([batch.tokens for batch, _ in parts])
        batches[step] = TokenBatch(tokens, torch.cat(positions) if positions else None)
        assert {num_targets for _, num_targets in parts} == {int((batches[step].targets >= 0).sum())}
    assert all(not state and not counts for _, state, counts in ranks[1:])  # Rank 0 alone reads.
    return Counted(batches, json.loads(json.dumps(ranks[0][1])), ranks[0][2])


def assert_equal(steps: dict[int, TokenBatch], expected: dict[int, TokenBatch]) -> None:
    for step, batch in steps.items():
        torch.testing.assert_close(tuple(batch), tuple(expected[step]), rtol=0, atol=0)


def stopped_at(config: Config, step: int, root: Path) -> Config:
    """Return the settings of a copy of a run that was killed after a step."""
    shutil.copytree(str(config.run.directory), root)
    for path in (root / "checkpoints").glob("step_*"):
        if int(path.name.removeprefix("step_")) > step:
            shutil.rmtree(path)
    return replace(config, run=replace(config.run, directory=str(root)))


STEPS, RANKS = (1, 3, 4), ((1, 2), (4, 4), (2, 1))  # of a stop, and before and after
STOPS = [*zip(STEPS, RANKS, strict=True)]
FURTHER_STOPS = [stop for stop in product(STEPS, RANKS) if stop not in STOPS]


@pytest.mark.parametrize(
    "stops", [STOPS, pytest.param(FURTHER_STOPS, marks=pytest.mark.slow)], ids=["three", "further"]
)
@pytest.mark.parametrize(
    ("mixes", "packing"),
    [
        (False, "stream"),
        (True, "documents"),
        (True, "none"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((True, "stream"), (False, "documents"), (False, "none"))
        ),
    ],
)
def test_any_number_of_ranks_and_any_stop_has_the_batches_of_one_uninterrupted_rank(
    streamed: Config, tmp_path: Path, packing: Any, mixes: bool, stops: list[tuple[int, tuple[int, int]]]
) -> None:
    config = mixture(streamed, tmp_path) if mixes else streamed
    config = replace(config, data=replace(config.data, packing=packing))
    uninterrupted = read(config, 1, range(6))
    every = torch.cat([batch.tokens for batch in uninterrupted.steps.values()])
    assert every.shape == (48, 33)
    if not mixes:  # Six steps are less than an epoch.
        assert len({tuple(row) for row in every.tolist()}) == len(every)
    assert_equal(read(config, 2, range(6)).steps, uninterrupted.steps)
    for stop, (before, after) in stops:
        state = read(config, before, range(stop)).state
        assert_equal(read(config, after, range(stop, 6), state).steps, uninterrupted.steps)


def test_a_resumed_stream_reads_no_document_before_its_window(streamed: Config) -> None:
    config = replace(streamed, data=replace(streamed.data, packing="none"))
    first = read(config, 1, range(60))
    last = read(config, 1, range(60, 61), first.state)
    assert_equal(last.steps, read(config, 1, range(61)).steps)
    assert sum(first.documents.values()) >= 480
    # The window of 32 documents with the step's 8, which is the last of its window, the next, and one that is begun.
    assert sum(last.documents.values()) <= 3 * 32


def test_every_epoch_has_each_document_once_in_another_order(streamed: Config) -> None:
    config = replace(streamed, data=replace(streamed.data, packing="none"))
    num_documents = 120 + 150 + 180 + 140
    steps = read(config, 1, range(2 * num_documents // 8)).steps
    rows = [tuple(row) for batch in steps.values() for row in batch.tokens.tolist()]
    first, second = rows[:num_documents], rows[num_documents : 2 * num_documents]
    assert len({*first}) == num_documents
    assert {*first} >= {*second}
    assert first[: len(second)] != second


@pytest.mark.parametrize("packing", ["none", "stream"])
def test_windows_without_a_target_are_passed_over_and_no_other_document_is_lost_or_doubled(
    streamed: Config, tmp_path: Path, packing: Any
) -> None:
    # Six windows of 12 documents; in the first, the third and the last the prompts fill the sequences.
    fills = dict.fromkeys((*range(12), *range(24, 36), *range(60, 66)), "x!" * 60)
    records = [{"prompt": f"row {row} {fills.get(row, '')}", "completion": f"answer {row}"} for row in range(66)]
    path = write_lines(tmp_path / "a.jsonl", records)
    data = replace(streamed.data, paths=(str(path),), shuffle_buffer=12, packing=packing, loss_on="answers")
    config = replace(streamed, data=data)
    uninterrupted = read(config, 1, range(9))
    rows = [tuple(row) for batch in uninterrupted.steps.values() for row in batch.tokens.tolist()]
    if packing == "none":
        assert all(max(row[1:]) >= 0 for row in rows)
        assert len({*rows[:36]}) == 36 and sorted(rows[:36]) == sorted(rows[36:])  # two epochs
    for stop, num_ranks in ((1, 2), (4, 1), (5, 2)):  # in the first window, before the end of an epoch, and behind it
        state = read(config, num_ranks, range(stop)).state
        assert_equal(read(config, 2, range(stop, 9), state).steps, uninterrupted.steps)


def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one_and_on_other_ranks_its_batches(
    streamed: Config, train: TrainOn, tmp_path: Path
) -> None:
    uninterrupted = train(streamed, 1)
    assert not list(uninterrupted.directory.tokens.glob("train*"))
    for num_ranks in (1, 2):
        resumed = train(stopped_at(streamed, 3, tmp_path / f"resumed-{num_ranks}"), num_ranks)
        assert sorted(resumed.losses) == list(range(1, 7))
        same = resumed.losses == uninterrupted.losses
        assert same or (num_ranks == 2 and resumed.losses == pytest.approx(uninterrupted.losses, rel=1e-5))
        assert num_ranks == 2 or resumed.validations == uninterrupted.validations


def test_a_text_that_changed_at_the_place_of_the_run_is_refused(streamed: Config, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", texts(1, 90))
    config = replace(streamed, data=replace(streamed.data, paths=(str(path),)))
    state = read(config, 1, range(2)).state
    write_lines(path, [{"text": record["text"].replace("alpha", "omega")} for record in texts(1, 90)])
    with pytest.raises(Exception, match=r"Expected the text at the place at which the run goes on .* in '.*a.jsonl'"):
        read(config, 2, range(2, 3), state)


@pytest.mark.parametrize("num_steps", [6, 8])  # in the second window of 32 documents, and at its end
def test_a_line_put_before_the_place_of_the_run_is_refused_as_a_change(
    streamed: Config, tmp_path: Path, num_steps: int
) -> None:
    records = texts(1, 120)
    path = write_lines(tmp_path / "a.jsonl", records)
    config = replace(streamed, data=replace(streamed.data, paths=(str(path),), packing="none"))
    batches = read(config, 1, range(num_steps + 1))
    state = read(config, 1, range(num_steps)).state
    assert_equal(read(config, 1, range(num_steps, num_steps + 1), state).steps, {num_steps: batches.steps[num_steps]})
    write_lines(path, [{"text": "one more document"}, *records])
    with pytest.raises(Exception, match=r"Expected the text at the place .* got another in '.*a.jsonl': Expected JSON"):
        read(config, 1, range(num_steps, num_steps + 1), state)
    write_lines(path, records[:1])
    with pytest.raises(Exception, match=r"Expected the text at the place at which the run goes on to stay as it was"):
        read(config, 1, range(num_steps, num_steps + 1), state)


def test_a_damaged_record_ends_a_streamed_run_with_its_line_and_last_checkpoint(
    streamed: Config, train: TrainOn, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "a.jsonl", texts(1, 300))
    config = replace(
        streamed,
        data=replace(streamed.data, paths=(str(path),)),
        optim=replace(streamed.optim, steps=40, batch_size=32),
    )
    directory = prepare(place(config)).directory
    with path.open("a") as file:
        file.write('{"text": 1}\n')

    def on_rank() -> str:
        rank = Rank(rank=dist.get_rank(), num_ranks=2, device=torch.device("cpu"))
        with pytest.raises(ConfigError) as caught:
            Trainer(config, directory, rank).train()
        return str(caught.value)

    messages = run_ranks(on_rank, 2)
    assert len({*messages}) == 1
    assert "\n" not in messages[0]
    assert f"in line 301 of {str(path)!r}, got a number." in messages[0]
    steps = CheckpointDirectory(directory.checkpoints).steps()
    assert steps
    assert messages[0].endswith(f"The last checkpoint is of step {steps[-1]}.")
    # Repaired, the same command goes on from there.
    write_lines(path, texts(1, 301))
    resumed = train(replace(config, optim=replace(config.optim, steps=steps[-1] + 4)), 2)
    assert sorted(resumed.losses) == list(range(1, steps[-1] + 5))
