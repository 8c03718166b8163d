"""Windows of a stream: no token lost or doubled between them, the order of an epoch, and text without targets."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from lamella import Config, ConfigError
from lamella._data.encoding import Encoder
from lamella._data.streamed_files import StreamedSource
from lamella._data.text import collect
from lamella._data.tokenizer import END_OF_TEXT, read_tokenizer
from lamella._data.tokens import TokenForm, load_tokens
from lamella._settings.sections import Packing
from lamella._streaming.documents import DocumentStream
from lamella._streaming.sequences import WindowedSequences
from lamella._streaming.windows import StreamWindow, WindowReader, WindowStart
from lamella._training.preparation import prepare

LENGTH = 32
RECORDS = [{"text": f"record {row} " + "word " * (row * 7 % 23)} for row in range(500)]


@pytest.fixture
def prepared(config: Config, tmp_path: Path) -> Config:
    """Settings of a prepared run on the records alone, with another text for validation."""
    path, validation = tmp_path / "a.jsonl", tmp_path / "validation.txt"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS), encoding="utf-8")
    validation.write_text("words " * 100, encoding="utf-8")
    return replace(config, data=replace(config.data, paths=(str(path),), validation_paths=(str(validation),)))


def reader(
    config: Config, packing: Packing, num_documents: int, files: tuple[StreamedSource, ...] = ()
) -> WindowReader:
    """Return a reader of the text of a run that has been prepared, with its tokenizer."""
    tokenizer = read_tokenizer(Path(str(config.run.directory), "model"), 300)
    return WindowReader(
        documents=DocumentStream(files=files or collect(config.data.paths, 0.1, streaming=True).streamed, seed=0),
        encoder=Encoder(tokenizer=tokenizer, keeps_documents_apart=packing != "stream"),
        form=TokenForm(packing=packing, loss_on="answers", sequence_length=LENGTH, has_answers=False),
        num_documents=num_documents,
        seed=0,
    )


def epoch(windows: WindowReader) -> list[StreamWindow]:
    """Return the windows of the first epoch."""
    every = [windows.window_with_targets(WindowStart())]
    while every[-1].start.position.epoch == 0:
        every.append(windows.window_with_targets(every[-1].after))
    return every[:-1]


def rows(window: StreamWindow) -> torch.Tensor:
    """Return the sequences of a window in the order of the text."""
    return window.sequences.batch(torch.arange(len(window.order))).tokens


CASES = [("stream", 1), ("stream", 500), ("none", 7), ("none", 10_000)]
FURTHER_CASES = [("stream", 7), ("stream", 10_000), ("none", 1), ("none", 500)]


@pytest.mark.parametrize(
    ("packing", "num_documents"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in FURTHER_CASES)]
)
def test_an_epoch_of_one_file_has_the_sequences_of_the_prepared_text(
    prepared: Config, packing: Packing, num_documents: int
) -> None:
    config = replace(prepared, data=replace(prepared.data, packing=packing))
    sequences = load_tokens(prepare(config).directory.tokens).sequences("train", LENGTH)
    expected = sequences.batch(torch.arange(len(sequences))).tokens
    every = epoch(reader(config, packing, num_documents))
    assert len(every) > 100 // num_documents
    assert torch.equal(torch.cat([rows(window) for window in every]), expected)
    assert (
        sum(window.num_documents for window in every) == 500 or num_documents == 1
    )  # A document may fill no sequence.


def test_packed_windows_have_every_document_once_in_full_rows(prepared: Config) -> None:
    config = replace(prepared, data=replace(prepared.data, packing="documents"))
    prepare(config)
    every = epoch(reader(config, "documents", 100))
    assert len(every) == 5
    apart = torch.cat([rows(window) for window in epoch(reader(config, "none", 100))])
    tokens = [torch.cat([rows(window) for window in every]), apart]
    assert tokens[0][tokens[0] != -1].sort()[0].tolist() == tokens[1][tokens[1] != -1].sort()[0].tolist()
    assert int((tokens[0] != -1).sum()) > 0.9 * tokens[0].numel()


def test_sequences_are_shuffled_differently_in_successive_windows(prepared: Config) -> None:
    prepare(prepared)
    first, second = epoch(reader(prepared, "none", 250))
    assert sorted(first.order.tolist()) == sorted(second.order.tolist()) == list(range(250))
    assert list(range(250)) != first.order.tolist() != second.order.tolist()


def test_a_text_is_cut_between_windows_and_its_tokens_go_on(prepared: Config, tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("".join(f"line {number} of a book\n" for number in range(20_000)), encoding="utf-8")
    config = replace(prepared, data=replace(prepared.data, paths=(str(book),), packing="stream"))
    sequences = load_tokens(prepare(config).directory.tokens).sequences("train", LENGTH)
    every = epoch(reader(config, "stream", 16))
    assert len(every) > 3  # pieces of 65,536 characters, each of which counts as sixteen documents
    expected = sequences.batch(torch.arange(len(sequences))).tokens
    assert torch.equal(torch.cat([rows(window) for window in every]), expected)


def test_a_tokenizers_first_token_begins_each_text_and_no_piece_of_it(prepared: Config, tmp_path: Path) -> None:
    text = "".join(f"line {number} of a book\n" for number in range(12_000))
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(name + text, encoding="utf-8")
    paths = tuple(str(tmp_path / f"{name}.txt") for name in ("a", "b"))
    prepare(prepared)
    windows = reader(prepared, "stream", 16, collect(paths, 0.1, streaming=True).streamed)
    backend, end = windows.encoder.tokenizer.backend, windows.encoder.tokenizer.end
    assert backend is not None
    backend.post_processor = TemplateProcessing(single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, end)])
    every = epoch(windows)
    assert [window.start.position.begins_document for window in every] == [True, False, False, False]
    tokens = torch.cat([rows(every[0])[0, :1], *(rows(window)[:, 1:].flatten() for window in every)])
    first, *others = (tokens == end).nonzero()[:, 0].tolist()
    assert first == 0 and len(others) in (2, 3) and others[1] == others[0] + 1  # The last may fill no sequence.


def test_the_next_epoch_goes_on_with_the_tokens_that_filled_no_sequence(prepared: Config) -> None:
    prepare(prepared)
    windows = reader(prepared, "stream", 10_000)
    first = windows.window_with_targets(WindowStart())
    second = windows.window_with_targets(first.after)
    assert first.after.position.epoch == 1
    assert 0 < len(first.after.carry) <= LENGTH
    assert rows(second)[0, : len(first.after.carry)].tolist() == list(first.after.carry)


@pytest.mark.parametrize("text", ["", "ab"])
def test_text_that_fills_no_sequence_is_refused_after_an_epoch(prepared: Config, tmp_path: Path, text: str) -> None:
    prepare(prepared)
    path = tmp_path / "short.jsonl"
    path.write_text(json.dumps({"text": text}) + "\n" if text else "\n", encoding="utf-8")
    files = collect([str(path)], 0.1, streaming=True).streamed
    with pytest.raises(ConfigError, match=r"Expected a sequence of 32 tokens .*, got none in \d documents"):
        reader(prepared, "stream", 10, files).window_with_targets(WindowStart())


def test_a_sequence_longer_than_a_hundred_windows_is_filled(prepared: Config) -> None:
    prepare(prepared)
    windows = reader(prepared, "stream", 1)
    windows = replace(windows, form=windows.form._replace(sequence_length=2000))
    window = windows.window_with_targets(WindowStart())
    assert window.start.num_windows > 100
    assert window.start.num_sequences == 0


@pytest.mark.parametrize("packing", ["documents", "none"])
def test_documents_whose_answers_are_cut_off_are_in_no_window(
    prepared: Config, tmp_path: Path, packing: Packing
) -> None:
    prepare(prepared)
    path = tmp_path / "pairs.jsonl"
    pairs = [json.dumps({"prompt": "a" * length, "completion": "b"}) for length in (100, 10)]
    path.write_text("\n".join(pairs * 20) + "\n", encoding="utf-8")
    windows = epoch(reader(prepared, packing, 8, collect([str(path)], 0.1, streaming=True).streamed))
    counts = [window.after.num_sequences - window.start.num_sequences for window in windows]
    assert counts == [2 if packing == "documents" else 4] * 5
    assert all(bool((rows(window) >= 0).any(1).all()) for window in windows)


def test_long_text_without_targets_is_refused_before_its_end(prepared: Config, tmp_path: Path) -> None:
    prepare(prepared)
    path = tmp_path / "unanswered.jsonl"
    path.write_text((json.dumps({"prompt": "a" * 100, "completion": "b"}) + "\n") * 2000, encoding="utf-8")
    files = collect([str(path)], 0.1, streaming=True).streamed
    with pytest.raises(ConfigError, match="got none in 1,000 documents"):
        reader(prepared, "none", 10, files).window_with_targets(WindowStart())


def test_an_error_of_the_reader_is_raised_where_its_window_is_due_and_not_before(prepared: Config) -> None:
    prepare(prepared)
    with Path(prepared.data.paths[0]).open("a", encoding="utf-8") as file:
        file.write("{\n")
    sequences = WindowedSequences(reader(prepared, "none", 100))
    sequences.begin(None)
    for start in range(0, 500, 50):
        assert sequences.batch(start, 50).tokens.shape == (50, LENGTH + 1)
    state: Any = sequences.state()
    assert state["num_sequences"] == 400  # the last window, for its digest
    for _ in range(2):  # The stream does not seem to end where it broke.
        with pytest.raises(ConfigError, match="Expected JSON in line 501 of"):
            sequences.batch(500, 50)
