"""The data stream: complete, shuffled, and the same whatever the number of ranks."""

from pathlib import Path

import pytest
import torch

from lamella import ConfigError, DataConfig
from lamella._text import Corpus, TextFile
from lamella._tokens import (
    BatchStream,
    TokenData,
    check_tokens,
    load_tokens,
    num_sequences,
    prepare_tokens,
    sequences,
    validation_indices,
)

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


def corpus(text: str) -> Corpus:
    file = TextFile(name="a", text=text, nbytes=len(text))
    return Corpus(source="here", train=(file,), validation=(file,), num_skipped=0)


def test_the_token_file_is_made_once_and_again_for_another_text(tmp_path: Path) -> None:
    tokens, tokenizer = tmp_path / "tokens.pt", tmp_path / "model" / "tokenizer.json"
    first = prepare_tokens(corpus("some text\n" * 50), 270, tokens, tokenizer)
    written = tokens.stat().st_mtime_ns
    assert torch.equal(load_tokens(tokens).train, first.train)
    prepare_tokens(corpus("some text\n" * 50), 270, tokens, tokenizer)
    assert tokens.stat().st_mtime_ns == written
    other = prepare_tokens(corpus("other text\n" * 50), 270, tokens, tokenizer)
    assert (
        other.fingerprint
        != first.fingerprint
        == prepare_tokens(corpus("some text\n" * 50), 270, tokens, tokenizer).fingerprint
    )


def test_text_that_does_not_fill_a_sequence_is_refused() -> None:
    empty = torch.zeros(0, dtype=torch.int32)
    data = TokenData(train=TOKENS, validation=TOKENS[:4], token_nbytes=empty, fingerprint="")
    with pytest.raises(ConfigError, match="Expected at least 5 tokens to validate on, got 4. Pass more text"):
        check_tokens(data, DataConfig(sequence_length=LENGTH))
