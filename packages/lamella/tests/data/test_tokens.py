"""The data stream: complete, shuffled, and the same whatever the number of ranks."""

import json
import resource
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lamella import ConfigError, DataConfig
from lamella._data.batches import IGNORED, DocumentRows, StreamSequences, TokenBatch
from lamella._data.order import BatchStream, shuffled, validation_indices
from lamella._data.packing import one_a_row, packed
from lamella._data.text import Corpus, collect
from lamella._data.token_checks import check_tokens
from lamella._data.tokenizer import train_tokenizer
from lamella._data.tokens import TokenData, TokenForm, load_tokens, prepare_tokens
from lamella._settings.sections import Packing

LENGTH = 4
STREAM = TokenForm(packing="stream", loss_on="answers", sequence_length=LENGTH, has_answers=False)
TOKENS = torch.arange(4 * 25 + 1, dtype=torch.int32)  # 25 sequences.


def stream(**changed: int) -> BatchStream:
    sequences = StreamSequences(tokens=TOKENS, sequence_length=LENGTH)
    return BatchStream(sequences=sequences, batch_size=changed.get("batch_size", 8), seed=changed.get("seed", 0))


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_the_ranks_batches_together_are_the_single_ranks_batch(num_ranks: int) -> None:
    for step in range(10):
        parts = [stream().batch(step, rank, num_ranks).tokens for rank in range(num_ranks)]
        assert torch.equal(torch.cat(parts), stream().batch(step, 0, 1).tokens)


def test_a_pass_holds_every_sequence_once_and_the_next_one_another_order() -> None:
    steps = stream(batch_size=5)
    first = torch.cat([steps.batch(step, 0, 1).tokens[:, 0] for step in range(5)])
    second = torch.cat([steps.batch(step, 0, 1).tokens[:, 0] for step in range(5, 10)])
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(0, 100, LENGTH))
    assert first.tolist() != second.tolist()


def test_the_seed_decides_the_order() -> None:
    assert torch.equal(stream().batch(3, 0, 1).tokens, stream().batch(3, 0, 1).tokens)
    assert not torch.equal(stream().batch(3, 0, 1).tokens, stream(seed=1).batch(3, 0, 1).tokens)


def test_a_batch_may_be_larger_than_a_pass() -> None:
    assert stream(batch_size=60).batch(0, 0, 1).tokens.shape == (60, LENGTH + 1)


def test_a_sequence_holds_the_token_after_each_and_no_token_is_predicted_twice() -> None:
    sequences = StreamSequences(tokens=TOKENS, sequence_length=LENGTH)
    every = sequences.batch(torch.arange(len(sequences))).tokens
    assert torch.equal(every[:, 1:], every[:, :-1] + 1)
    assert every[:, 1:].flatten().tolist() == list(range(1, 101))


def test_validation_indices_are_spread_evenly_and_limited_to_the_sequences() -> None:
    sequences = StreamSequences(tokens=TOKENS, sequence_length=LENGTH)
    assert validation_indices(sequences, 5).tolist() == [0, 5, 10, 15, 20]
    assert validation_indices(sequences, 99).tolist() == list(range(25))


def test_validation_sequences_have_targets() -> None:
    counts = torch.tensor([0, 3] * 12 + [0]).int()
    sequences = StreamSequences(tokens=TOKENS, sequence_length=LENGTH, target_counts=counts)
    assert validation_indices(sequences, 3).tolist() == [1, 9, 17]


@given(st.integers(1, 5000), st.integers(0, 2**32 - 1), st.integers(0, 1000))
def test_an_epoch_is_a_permutation_of_the_sequences(count: int, seed: int, epoch: int) -> None:
    assert shuffled(torch.arange(count), count, seed, epoch).sort().values.equal(torch.arange(count))


@given(st.integers(2, 10**12), st.integers(0, 99), st.data())
def test_a_place_in_the_order_depends_on_no_other_place(count: int, seed: int, data: st.DataObject) -> None:
    positions = torch.tensor(data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=9, unique=True)))
    together = shuffled(positions, count, seed, 3)
    assert together.tolist() == [int(shuffled(position[None], count, seed, 3)) for position in positions]
    assert len(set(together.tolist())) == len(positions) and 0 <= int(together.min()) <= int(together.max()) < count


def test_the_order_is_as_mixed_as_a_random_one() -> None:
    order = shuffled(torch.arange(20_000), 20_000, 0, 0)
    distances = (order.diff().abs().double() / 20_000).mean().item()
    assert distances == pytest.approx(1 / 3, abs=0.01)  # of two random numbers
    assert int((order == shuffled(torch.arange(20_000), 20_000, 0, 1)).sum()) < 10
    assert int((order == shuffled(torch.arange(20_000), 20_000, 1, 0)).sum()) < 10


LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=60)


@given(LENGTHS, st.integers(1, 30))
def test_every_document_is_in_one_row_and_no_row_is_over_full(lengths: list[int], capacity: int) -> None:
    rows = packed(torch.tensor(lengths), capacity)
    assert sorted(rows.documents.tolist()) == [index for index, length in enumerate(lengths) if length]
    bounds = zip(rows.starts[:-1].tolist(), rows.starts[1:].tolist(), strict=True)
    fills = [sum(min(lengths[document], capacity) for document in rows.documents[slice(*bound)]) for bound in bounds]
    assert all(0 < fill <= capacity for fill in fills)
    assert sum(fill <= capacity // 2 for fill in fills) <= 1  # Two such rows would have been one.


def test_the_fullest_row_that_fits_takes_a_document() -> None:
    rows = packed(torch.tensor([6, 8, 2, 4, 12]), 10)
    assert rows.documents.tolist() == [4, 1, 2, 0, 3] and rows.starts.tolist() == [0, 1, 3, 5]


def rows(*documents: list[int], length: int = 6, is_packed: bool = True) -> DocumentRows:
    """Return two rows or fewer of documents in the order in which they are passed."""
    lengths = torch.tensor([len(document) for document in documents])
    packing = packed(lengths, length) if is_packed else one_a_row(lengths)
    return DocumentRows(
        tokens=torch.tensor([token for document in documents for token in document]).int(),
        document_starts=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        documents=packing.documents,
        row_starts=packing.starts,
        target_counts=torch.zeros(len(packing.starts) - 1).int(),
        sequence_length=length,
        is_packed=is_packed,
    )


def test_positions_begin_anew_at_each_document_and_nothing_predicts_its_first_token() -> None:
    batch = rows([~1, ~2, 3], [~4, 5]).batch(torch.tensor([0]))
    assert batch.inputs.tolist() == [[1, 2, 3, 4, 5, 0]]
    assert batch.positions is not None and batch.positions.tolist() == [[0, 1, 2, 0, 1, 0]]
    assert batch.targets.tolist() == [[IGNORED, 3, IGNORED, 5, IGNORED, IGNORED]]


def test_a_longer_document_is_truncated_to_a_row() -> None:
    batch = rows([~1, 2, 3, 4, 5, 6, 7, 8]).batch(torch.tensor([0]))
    assert batch.inputs.tolist() == [[1, 2, 3, 4, 5, 6]] and batch.targets.tolist() == [[2, 3, 4, 5, 6, IGNORED]]


def test_rows_of_one_document_are_cut_after_the_last_target_of_the_microbatch() -> None:
    batch = rows([~1, 2], [~3, 4, 5], [~6, ~7, ~8, ~9], is_packed=False).batch(torch.arange(3))
    assert batch.positions is None
    first, second, third = batch.microbatches(3)
    assert first.inputs.tolist() == [[1]] and second.inputs.tolist() == [[3, 4]] and third.inputs.tolist() == [[6]]
    assert third.targets.tolist() == [[IGNORED]]
    [together] = batch.microbatches(1)
    assert together.targets.tolist() == [[2, IGNORED], [4, 5], [IGNORED, IGNORED]]


def corpus(folder: Path, text: str) -> Corpus:
    (folder / "a.txt").write_text(text, encoding="utf-8")
    return collect([str(folder / "a.txt")], 0.5)


def test_the_token_files_are_made_once_and_again_for_another_text(tmp_path: Path) -> None:
    tokens, model = tmp_path / "tokens", tmp_path / "model"
    some, other = "some text\n" * 50, "other text\n" * 50
    first = prepare_tokens(corpus(tmp_path, some), 270, STREAM, tokens, model)
    written = (tokens / "train.bin").stat().st_mtime_ns
    assert torch.equal(load_tokens(tokens).train, first.train)
    prepare_tokens(corpus(tmp_path, some), 270, STREAM, tokens, model)
    assert (tokens / "train.bin").stat().st_mtime_ns == written
    second = prepare_tokens(corpus(tmp_path, other), 270, STREAM, tokens, model)
    again = prepare_tokens(corpus(tmp_path, some), 270, STREAM, tokens, model)
    assert second.fingerprint != first.fingerprint == again.fingerprint
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "model", "tokens"]


def test_a_run_that_is_killed_while_tokens_are_replaced_leaves_none_that_the_next_would_trust(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some, other, tokens = "some text " * 20, "other words " * 20, tmp_path / "tokens"
    expected = prepare_tokens(corpus(tmp_path, some), 270, STREAM, tokens, tmp_path / "model").train.clone()
    remove = shutil.rmtree

    def killed(folder: Path, **options: Any) -> None:
        if folder != tokens:
            return remove(folder, **options)
        next(folder.glob("*.bin")).unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        prepare_tokens(corpus(tmp_path, other), 270, STREAM, tokens, tmp_path / "model")
    monkeypatch.undo()
    assert torch.equal(prepare_tokens(corpus(tmp_path, some), 270, STREAM, tokens, tmp_path / "model").train, expected)


@pytest.mark.parametrize("damaged", ["index.pt", "train.bin"])
def test_damaged_token_files_are_made_anew(tmp_path: Path, damaged: str) -> None:
    text, tokens, model = corpus(tmp_path, "some text\n" * 50), tmp_path / "tokens", tmp_path / "model"
    expected = prepare_tokens(text, 270, STREAM, tokens, model).train.clone()
    content = (tokens / damaged).read_bytes()
    for num_bytes in (0, len(content) // 8 * 4):
        (tokens / damaged).write_bytes(content[:num_bytes])
        assert torch.equal(prepare_tokens(text, 270, STREAM, tokens, model).train, expected)


@pytest.mark.parametrize(
    ("damaged", "content", "expected"),
    [
        ("train.bin", b"\0" * 8, r"Expected [\d,]+ bytes of tokens in '.*/train\.bin', got 8\. Copy the file"),
        ("train.bin", None, r"bytes of tokens in '.*/train\.bin', got no such file\."),
        ("index.pt", b"damage", r"Expected a list of token files in '.*/index\.pt', got other bytes\."),
        ("index.pt", b"", r"in '.*/index\.pt', got other bytes\."),
    ],
)
def test_damaged_token_files_are_refused_where_no_text_is_there_to_make_them_anew(
    tmp_path: Path, damaged: str, content: bytes | None, expected: str
) -> None:
    tokens = tmp_path / "tokens"
    prepare_tokens(corpus(tmp_path, "some text\n" * 50), 270, STREAM, tokens, tmp_path / "model")
    (tokens / damaged).unlink() if content is None else (tokens / damaged).write_bytes(content)
    with pytest.raises(ConfigError, match=expected):
        load_tokens(tokens)


def test_a_disk_too_full_for_the_index_is_an_error_of_the_system_and_keeps_no_half_written_tokens(
    tmp_path: Path,
) -> None:
    text = corpus(tmp_path, "some text\n" * 50)
    tokenizer = train_tokenizer(text.train, 270)
    limit, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard_limit))  # bytes of a file: enough for the tokens
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            prepare_tokens(text, tokenizer, STREAM, tmp_path / "tokens", tmp_path / "model")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard_limit))
    assert "write_bytes" in [entry.name for entry in caught.traceback]  # The tokens were written.
    assert not (tmp_path / "tokens.partial").exists()


def test_tokens_are_written_in_batches_and_memory_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamella._data.encoding._BATCH_LENGTH", 1 << 14)
    monkeypatch.setattr("lamella._data.text_files._PIECE_LENGTH", 1 << 12)
    monkeypatch.setattr("lamella._data.text_files._BLOCK_NBYTES", 1 << 14)
    text = corpus(
        tmp_path, "".join(f"{index} is a number, and {index * 7919} is one more\n" for index in range(50_000))
    )
    tokenizer = train_tokenizer(text.train, 270)
    tracemalloc.start()
    data = prepare_tokens(text, tokenizer, STREAM, tmp_path / "tokens", tmp_path / "model")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    nbytes_of_tokens = (len(data.train) + len(data.validation)) * 4
    mapped = data.sequences("train", 128)
    assert nbytes_of_tokens > 3_000_000 and len(mapped) > 3_000
    assert peak < 1_500_000  # Python's own lists and texts; a list of all tokens alone has 8 bytes for each.
    assert "train.bin" in Path("/proc/self/maps").read_text(encoding="utf-8")


def test_a_complement_is_an_input_and_no_target() -> None:
    batch = TokenBatch(torch.tensor([[5, ~6, ~7, 8, 9]]))
    assert batch.inputs.tolist() == [[5, 6, 7, 8]] and batch.targets.tolist() == [[IGNORED, IGNORED, 8, 9]]


def written(folder: Path, form: TokenForm, lines: list[str]) -> TokenData:
    """Return tokens of JSON lines, half of them held out."""
    (folder / "a.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    text = collect([str(folder / "a.jsonl")], 0.5)
    tokenizer = train_tokenizer(text.train, 260)
    return prepare_tokens(text, tokenizer, form, folder / "tokens", folder / "model")


PAIRS = [json.dumps({"prompt": "a" * (index % 7), "completion": "b" * (index % 5)}) for index in range(200)]


TEXTS = [json.dumps({"text": "a" * (index % 13)}) for index in range(200)]


@pytest.mark.parametrize("packing", ["documents", "none", "stream"])
@pytest.mark.parametrize("piece_length", [1 << 22, 17])
@pytest.mark.parametrize("lines", [PAIRS, TEXTS, [*PAIRS, *TEXTS]], ids=["pairs", "texts", "both"])
def test_the_number_of_targets_of_a_step_is_the_sum_over_all_ranks(
    tmp_path: Path, packing: Packing, piece_length: int, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lamella._data.rows._PIECE_LENGTH", piece_length)
    form = TokenForm(packing=packing, loss_on="answers", sequence_length=16, has_answers=lines is not TEXTS)
    sequences = written(tmp_path, form, lines).sequences("train", 16)
    masked = BatchStream(sequences=sequences, batch_size=8, seed=0)
    for step in range(6):
        parts = [masked.batch(step, rank, 4).targets for rank in range(4)]
        assert masked.num_targets(step) == sum(int((part != IGNORED).sum()) for part in parts) > 0


@pytest.mark.parametrize("packing", ["documents", "none"])
def test_documents_whose_answers_are_cut_off_are_left_out_and_told(tmp_path: Path, packing: Packing) -> None:
    form = TokenForm(packing=packing, loss_on="answers", sequence_length=16, has_answers=True)
    cut, kept = ({"prompt": "abcdefgh" * repeats, "completion": "b"} for repeats in (20, 1))
    data = written(tmp_path, form, [json.dumps(pair) for pair in (cut, kept, kept, cut)] * 20)
    rows = data.sequences("train", 16)
    assert isinstance(rows, DocumentRows)
    lengths = rows.document_starts.diff()
    num_cut, every = int((lengths > 16).sum()), torch.arange(len(rows))
    assert num_cut > 9 and rows.tokens_a_sequence == float(lengths[lengths <= 16].sum()) / len(rows)
    assert bool((rows.batch(every).targets >= 0).any(1).all())
    assert int((rows.batch(every).targets >= 0).sum()) == rows.num_targets(every) == 2 * (len(lengths) - num_cut)
    assert f"packing: {num_cut} documents have no answer within --sequence-length, and are left out" in data.lines(16)


def test_text_that_does_not_fill_a_sequence_is_refused(tmp_path: Path) -> None:
    data = prepare_tokens(corpus(tmp_path, "a\nb"), 257, STREAM, tmp_path / "tokens", tmp_path / "model")
    with pytest.raises(ConfigError) as caught:
        check_tokens(data, DataConfig(sequence_length=LENGTH))
    assert str(caught.value) == (
        "Expected at least 5 tokens to train on, got 3. Pass more text as --data, a smaller --validation-fraction, or "
        "a smaller --sequence-length."
    )


def test_documents_without_an_answer_are_refused(tmp_path: Path) -> None:
    form = TokenForm(packing="documents", loss_on="answers", sequence_length=3, has_answers=True)
    data = written(tmp_path, form, [json.dumps({"prompt": "long enough", "completion": "b"})] * 9)
    with pytest.raises(
        ConfigError, match="an answer to train on, got none in the first 3 tokens of 4 documents of up to 10. Pass"
    ):
        check_tokens(data, DataConfig(sequence_length=3))
