"""The data stream: complete, shuffled, and the same whatever the number of ranks."""

import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lamella import ConfigError, DataConfig
from lamella._data.order import BatchStream, validation_indices
from lamella._data.packing import inputs_and_targets, num_sequences, sequences
from lamella._data.text import Corpus, collect
from lamella._data.tokenizer import train_tokenizer
from lamella._data.tokens import IGNORED, TokenData, check_tokens, load_tokens, prepare_tokens

LENGTH = 4
TOKENS = torch.arange(4 * 25 + 1, dtype=torch.int32)  # 25 sequences.


def stream(**changed: int) -> BatchStream:
    return BatchStream(
        tokens=TOKENS, sequence_length=LENGTH, batch_size=changed.get("batch_size", 8), seed=changed.get("seed", 0)
    )


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_the_ranks_batches_together_are_the_single_ranks_batch(num_ranks: int) -> None:
    for step in range(10):
        parts = [stream().batch(step, rank, num_ranks) for rank in range(num_ranks)]
        assert torch.equal(torch.cat(parts), stream().batch(step, 0, 1))


def test_a_pass_holds_every_sequence_once_and_the_next_one_another_order() -> None:
    steps = stream(batch_size=5)
    first = torch.cat([steps.batch(step, 0, 1)[:, 0] for step in range(5)])
    second = torch.cat([steps.batch(step, 0, 1)[:, 0] for step in range(5, 10)])
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(0, 100, LENGTH))
    assert first.tolist() != second.tolist()


def test_the_seed_decides_the_order() -> None:
    assert torch.equal(stream().batch(3, 0, 1), stream().batch(3, 0, 1))
    assert not torch.equal(stream().batch(3, 0, 1), stream(seed=1).batch(3, 0, 1))


def test_a_batch_may_be_larger_than_a_pass() -> None:
    assert stream(batch_size=60).batch(0, 0, 1).shape == (60, LENGTH + 1)


def test_a_sequence_holds_the_token_after_each_and_no_token_is_predicted_twice() -> None:
    every = sequences(TOKENS, torch.arange(num_sequences(TOKENS, LENGTH)), LENGTH)
    assert torch.equal(every[:, 1:], every[:, :-1] + 1)
    assert every[:, 1:].flatten().tolist() == list(range(1, 101))


def test_validation_sequences_are_spread_over_the_text_and_never_more_than_there_are() -> None:
    assert validation_indices(TOKENS, LENGTH, 5).tolist() == [0, 5, 10, 15, 20]
    assert validation_indices(TOKENS, LENGTH, 99).tolist() == list(range(25))


def corpus(folder: Path, text: str) -> Corpus:
    (folder / "a.txt").write_text(text, encoding="utf-8")
    return collect([str(folder / "a.txt")], 0.5)


def test_the_token_files_are_made_once_and_again_for_another_text(tmp_path: Path) -> None:
    tokens, model = tmp_path / "tokens", tmp_path / "model"
    some, other = "some text\n" * 50, "other text\n" * 50
    first = prepare_tokens(corpus(tmp_path, some), 270, tokens, model)
    written = (tokens / "train.bin").stat().st_mtime_ns
    assert torch.equal(load_tokens(tokens).train, first.train)
    prepare_tokens(corpus(tmp_path, some), 270, tokens, model)
    assert (tokens / "train.bin").stat().st_mtime_ns == written
    second = prepare_tokens(corpus(tmp_path, other), 270, tokens, model)
    again = prepare_tokens(corpus(tmp_path, some), 270, tokens, model)
    assert second.fingerprint != first.fingerprint == again.fingerprint
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "model", "tokens"]


def test_a_run_that_is_killed_while_tokens_are_replaced_leaves_none_that_the_next_would_trust(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some, other, tokens = "some text " * 20, "other words " * 20, tmp_path / "tokens"
    expected = prepare_tokens(corpus(tmp_path, some), 270, tokens, tmp_path / "model").train.clone()
    remove = shutil.rmtree

    def killed(folder: Path, **options: Any) -> None:
        if folder != tokens:
            return remove(folder, **options)
        next(folder.glob("*.bin")).unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        prepare_tokens(corpus(tmp_path, other), 270, tokens, tmp_path / "model")
    monkeypatch.undo()
    assert torch.equal(prepare_tokens(corpus(tmp_path, some), 270, tokens, tmp_path / "model").train, expected)


def test_tokens_are_written_batch_by_batch_and_read_where_they_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lamella._data.tokenizer._BATCH_LENGTH", 1 << 14)
    monkeypatch.setattr("lamella._data.text._PIECE_LENGTH", 1 << 12)
    monkeypatch.setattr("lamella._data.text._BLOCK_NBYTES", 1 << 14)
    text = corpus(
        tmp_path, "".join(f"{index} is a number, and {index * 7919} is one more\n" for index in range(50_000))
    )
    tokenizer = train_tokenizer(text.train, 270)
    tracemalloc.start()
    data = prepare_tokens(text, tokenizer, tmp_path / "tokens", tmp_path / "model")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    nbytes_of_tokens = (len(data.train) + len(data.validation)) * 4
    assert nbytes_of_tokens > 3_000_000
    assert peak < 1_500_000  # Python's own lists and texts; a list of all tokens alone has 8 bytes for each.
    assert "train.bin" in Path("/proc/self/maps").read_text(encoding="utf-8")


def test_a_complement_is_an_input_and_no_target() -> None:
    batch = torch.tensor([[5, ~6, ~7, 8, 9]])
    inputs, targets = inputs_and_targets(batch)
    assert inputs.tolist() == [[5, 6, 7, 8]] and targets.tolist() == [[IGNORED, IGNORED, 8, 9]]


def test_the_targets_of_a_step_are_those_of_all_ranks() -> None:
    tokens = torch.where(TOKENS % 3 == 0, ~TOKENS, TOKENS)
    masked = replace(stream(), tokens=tokens, is_masked=True)
    for step in range(6):
        parts = [masked.batch(step, rank, 4)[:, 1:] for rank in range(4)]
        assert masked.num_targets(step) == sum(int((part >= 0).sum()) for part in parts) < stream().num_targets(step)


def test_text_that_does_not_fill_a_sequence_is_refused() -> None:
    data = TokenData(
        train=TOKENS, validation=TOKENS[:4], units=torch.zeros(0).int(), unit="byte", is_masked=False, fingerprint=""
    )
    with pytest.raises(ConfigError, match="Expected at least 5 tokens to validate on, got 4. Pass more text"):
        check_tokens(data, DataConfig(sequence_length=LENGTH))
    with pytest.raises(ConfigError, match="Expected tokens of an assistant to validate on, got 9 of others alone"):
        check_tokens(replace(data, validation=~TOKENS[:9], is_masked=True), DataConfig(sequence_length=LENGTH))
