"""From documents to tokens: complete, ended, counted in bytes where that is known, and as transformers reads them."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing

from lamella._data.encoding import Encoder
from lamella._data.records import parts
from lamella._data.stream_samples import sample_stream
from lamella._data.streamed_files import stream_file
from lamella._data.text import Corpus, collect
from lamella._data.tokenizer import END_OF_TEXT, RunTokenizer, read_tokenizer, train_on_texts, train_tokenizer
from lamella._data.tokens import TokenForm, fingerprint
from lamella._settings.sections import Packing

CorpusOf = Callable[..., Corpus]


@pytest.fixture
def corpus_of(tmp_path: Path) -> CorpusOf:
    """Texts as files of a folder, all of them to train on but an empty one."""

    def corpus_of(*texts: str) -> Corpus:
        folder = tmp_path / f"texts-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        for index, text in enumerate(texts):
            (folder / f"{index}.txt").write_bytes(text.encode())
        corpus = collect([str(folder)], 1e-9)
        files = sorted((*corpus.train, *corpus.validation), key=lambda file: file.name)
        return Corpus(source="here", train=tuple(files), validation=(), num_skipped=0)

    return corpus_of


def encode(tokenizer: RunTokenizer, corpus: Corpus) -> list[int]:
    return [
        token for documents in Encoder(tokenizer=tokenizer).encode(parts(corpus.train)) for token in documents.tokens
    ]


def nbytes(tokenizer: RunTokenizer, tokens: list[int]) -> int:
    return sum(tokenizer.units()[token] for token in tokens)


def decode(tokenizer: RunTokenizer, tokens: list[int]) -> str:
    assert tokenizer.backend is not None
    return str(tokenizer.backend.decode(tokens, skip_special_tokens=True))


def test_tokens_stand_for_exactly_the_bytes_of_the_text(corpus_of: CorpusOf) -> None:
    texts = "def f(x):\n    return x\n" * 50, "na\u00efve \u2203 \U0001f600 text\n" * 20
    corpus = corpus_of(*texts)
    tokenizer = train_tokenizer(corpus.train, 300)
    tokens = encode(tokenizer, corpus)
    assert nbytes(tokenizer, tokens) == sum(file.nbytes for file in corpus.train)
    assert decode(tokenizer, tokens) == "".join(texts)


def test_every_document_ends_with_the_end_of_text(corpus_of: CorpusOf) -> None:
    corpus = corpus_of("one two\n" * 20, "three\n")
    tokenizer = train_tokenizer(corpus.train, 270)
    tokens = encode(tokenizer, corpus)
    assert tokenizer.tokenizer.convert_ids_to_tokens(tokenizer.end) == END_OF_TEXT
    assert tokens[-1] == tokenizer.end and tokens.count(tokenizer.end) == 2
    assert tokenizer.units()[tokenizer.end] == 0


def test_every_text_begins_with_the_token_that_the_tokenizer_puts_there(
    corpus_of: CorpusOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def identities() -> list[str]:
        packings: tuple[Packing, ...] = ("stream", "documents")
        forms = [TokenForm(packing, "all", sequence_length=8, has_answers=False) for packing in packings]
        return [fingerprint(corpus, replace(tokenizer), form) for form in forms]

    corpus = corpus_of("one two\n" * 20, "three\n")
    tokenizer = train_tokenizer(corpus.train, 270)
    without = encode(tokenizer, corpus)
    assert tokenizer.backend is not None and tokenizer.begin == []
    begin = tokenizer.end
    tokenizer.backend.post_processor = TemplateProcessing(
        single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, begin)]
    )
    cut = without.index(tokenizer.end) + 1
    monkeypatch.setattr("lamella._data.text_files._PIECE_LENGTH", 27)
    monkeypatch.setattr("lamella._data.encoding._BATCH_LENGTH", 100)
    tokens = encode(replace(tokenizer), corpus)
    assert tokens == [begin, *without[:cut], begin, *without[cut:]]
    assert tokenizer.prompt_tokens("three\n") == tokens[cut + 1 : -1]
    # Streams of an earlier lamella are without the token: they are made anew, and a run on them does not go on.
    stream, documents = identities()
    monkeypatch.setattr(RunTokenizer, "begin", [])
    former_stream, former_documents = identities()
    assert stream != former_stream and documents == former_documents


def test_special_tokens_are_no_bytes_of_text(corpus_of: CorpusOf) -> None:
    tokenizer = train_tokenizer(corpus_of("one two\n" * 20).train, 270)
    assert tokenizer.backend is not None
    tokenizer.backend.add_special_tokens(["<|im_end|>"])
    tokenizer.backend.add_tokens(["<think>"])
    *_, special, plain = replace(tokenizer, num_tokens=tokenizer.num_tokens + 2).units()
    assert (special, plain) == (0, len("<think>"))


def test_the_vocabulary_holds_every_byte_also_of_other_texts(corpus_of: CorpusOf) -> None:
    tokenizer = train_tokenizer(corpus_of("plain\n" * 10).train, 300)
    other = corpus_of("\u00ff\u4e2d\x01")
    assert nbytes(tokenizer, encode(tokenizer, other)) == other.train[0].nbytes


def test_limits_of_an_earlier_call_in_the_file_of_a_tokenizer_do_not_cut_the_text(
    corpus_of: CorpusOf, tmp_path: Path
) -> None:
    corpus = corpus_of("one two three\n" * 20)
    tokenizer = train_tokenizer(corpus.train, 270)
    tokens = encode(tokenizer, corpus)
    assert tokenizer.backend is not None
    tokenizer.backend.enable_truncation(16)
    tokenizer.backend.enable_padding(length=40)
    tokenizer.tokenizer.save_pretrained(tmp_path / "model")
    assert encode(read_tokenizer(tmp_path / "model", 300), corpus) == tokens


def test_a_long_text_is_encoded_in_pieces_and_nothing_is_lost(
    corpus_of: CorpusOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "some words and more words\n" * 400 + "a line that is longer than a piece, \u4e2d\u6587 \U0001f600 too " * 9
    corpus = corpus_of(text)
    tokenizer = train_tokenizer(corpus.train, 300)
    for name, value in (
        ("text_files._PIECE_LENGTH", 27),
        ("text_files._BLOCK_NBYTES", 31),
        ("encoding._BATCH_LENGTH", 100),
    ):
        monkeypatch.setattr(f"lamella._data.{name}", value)
    assert len(list(Encoder(tokenizer=tokenizer).encode(parts(corpus.train)))) > 50
    assert decode(tokenizer, encode(tokenizer, corpus)) == text


def test_a_vocabulary_is_trained_on_pieces_spread_over_a_long_text(
    corpus_of: CorpusOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lamella._data.text_files._PIECE_LENGTH", 40)
    monkeypatch.setattr("lamella._data.tokenizer.VOCABULARY_LENGTH", 4000)
    corpus = corpus_of("first words of it\n" * 1000 + "other thing at its end\n" * 1000)
    tokens = train_tokenizer(corpus.train, 300).tokenizer.get_vocab()
    assert "\u0120words" in tokens and "\u0120thing" in tokens


@pytest.mark.parametrize(
    "record",
    [
        {"text": "alpha bravo charlie"},
        {"prompt": "alpha bravo", "completion": " charlie"},
        {"instruction": "alpha", "input": "bravo", "output": "charlie"},
    ],
    ids=["text", "completion", "instruction"],
)
def test_the_vocabulary_is_of_the_words_of_every_kind_of_record(record: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(record)}\n" * 50)
    streamed_file = stream_file(path.name, path, is_named=True)
    assert streamed_file is not None
    prepared = train_tokenizer(collect([str(path)], 1e-9).train, 600)
    streamed = train_on_texts(sample_stream([streamed_file], 10_000), 600)
    for tokenizer in (prepared, streamed):
        assert {"alpha", "bravo", "charlie"} <= {name.strip("\u0120") for name in tokenizer.tokenizer.get_vocab()}
