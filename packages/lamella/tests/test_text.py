"""From files to tokens: what is read, how it is split, and that a token's bytes are counted right."""

from pathlib import Path

import pytest

from lamella import ConfigError
from lamella._text import END_OF_TEXT, Corpus, TextFile, collect, encode, token_nbytes, train_tokenizer


def names(files: tuple[TextFile, ...]) -> list[str]:
    return [file.name for file in files]


def write(root: Path, **texts: str) -> Path:
    root.mkdir(exist_ok=True)
    for name, text in texts.items():
        (root / f"{name}.txt").write_text(text, encoding="utf-8")
    return root


def letters(count: int) -> dict[str, str]:
    return {f"file{index}": f"text of {index}\n" * (index + 1) for index in range(count)}


def test_the_default_text_is_the_standard_library_without_tests_and_installed_packages() -> None:
    corpus = collect([], 0.05)
    found = [*names(corpus.train), *names(corpus.validation)]
    assert "argparse.py" in found and "json/decoder.py" in found
    assert not any(name.startswith(("site-packages/", "test/")) for name in found)
    assert "standard library" in corpus.describe()


def test_the_split_is_by_file_and_depends_on_names_alone(tmp_path: Path) -> None:
    here = collect([str(write(tmp_path / "here", **letters(20)))], 0.2)
    there = collect([str(write(tmp_path / "there", **letters(20)))], 0.2)
    assert names(here.validation) == names(there.validation)
    assert not set(names(here.train)) & set(names(here.validation))
    assert len(here.train) + len(here.validation) == 20
    assert here.fingerprint() == there.fingerprint()


def test_at_least_the_asked_fraction_is_held_out(tmp_path: Path) -> None:
    corpus = collect([str(write(tmp_path / "text", **letters(20)))], 0.2)
    held_out, kept = (sum(file.nbytes for file in files) for files in (corpus.validation, corpus.train))
    assert 0.2 <= held_out / (held_out + kept) < 0.35


def test_a_single_file_is_cut_at_a_line(tmp_path: Path) -> None:
    text = "".join(f"line {index}\n" for index in range(100))
    corpus = collect([str(write(tmp_path / "text", only=text) / "only.txt")], 0.1)
    assert corpus.train[0].text + corpus.validation[0].text == text
    assert corpus.validation[0].text.startswith("line ")
    assert 0.1 <= corpus.validation[0].nbytes / len(text) < 0.12


def test_a_file_that_is_most_of_the_text_is_trained_on(tmp_path: Path) -> None:
    corpus = collect([str(write(tmp_path / "text", big="word " * 1000, small="word\n"))], 0.05)
    assert (names(corpus.train), names(corpus.validation)) == (["big.txt"], ["small.txt"])


def test_changed_text_changes_the_fingerprint(tmp_path: Path) -> None:
    root = write(tmp_path / "text", one="one\n", two="two\n")
    before = collect([str(root)], 0.5).fingerprint()
    write(root, two="twO\n")
    assert collect([str(root)], 0.5).fingerprint() != before


def test_binaries_and_hidden_folders_are_skipped_and_counted(tmp_path: Path) -> None:
    root = write(tmp_path / "text", one="one\n" * 9, two="two\n" * 9)
    (root / "image").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    (root / "latin").write_bytes("caf\u00e9".encode("latin-1"))
    write(root / ".git", secret="not text\n")
    corpus = collect([str(root)], 0.5)
    assert corpus.describe().startswith("2 files, 72 bytes of")
    assert corpus.describe().endswith("skipped 2 that are not text")


def test_no_path_no_text_and_binary_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'absent', which does not exist"):
        collect(["absent"], 0.1)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="Expected text in .*empty, got 0 files"):
        collect([str(tmp_path / "empty")], 0.1)
    (tmp_path / "empty" / "file").touch()
    with pytest.raises(ConfigError, match="got 1 files with no text"):
        collect([str(tmp_path / "empty")], 0.1)
    (tmp_path / "binary").write_bytes(b"\0\1")
    with pytest.raises(ConfigError, match="Expected UTF-8 text in .*binary"):
        collect([str(tmp_path / "binary")], 0.1)


def corpus_of(*texts: str) -> Corpus:
    files = tuple(TextFile(name=str(index), text=text, nbytes=len(text.encode())) for index, text in enumerate(texts))
    return Corpus(source="here", train=files, validation=(), num_skipped=0)


def test_tokens_stand_for_exactly_the_bytes_of_the_text() -> None:
    files = corpus_of("def f(x):\n    return x\n" * 50, "na\u00efve \u2203 \U0001f600 text\n" * 20).train
    tokenizer = train_tokenizer(files, 300)
    tokens = encode(tokenizer, files)
    assert token_nbytes(tokenizer)[tokens].sum() == sum(file.nbytes for file in files)
    assert tokenizer.decode(tokens.tolist(), skip_special_tokens=True) == "".join(file.text for file in files)


def test_every_document_ends_with_the_end_of_text() -> None:
    files = corpus_of("one two\n" * 20, "three\n").train
    tokenizer = train_tokenizer(files, 270)
    tokens = encode(tokenizer, files)
    end = tokenizer.token_to_id(END_OF_TEXT)
    assert tokens[-1] == end and (tokens == end).sum() == 2
    assert token_nbytes(tokenizer)[end] == 0


def test_the_vocabulary_holds_every_byte_also_of_other_texts() -> None:
    tokenizer = train_tokenizer(corpus_of("plain\n" * 10).train, 300)
    other = corpus_of("\u00ff\u4e2d\x01").train
    assert token_nbytes(tokenizer)[encode(tokenizer, other)].sum() == other[0].nbytes


def test_a_long_text_is_encoded_in_pieces_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    files = corpus_of("some words and more words\n" * 400).train
    tokenizer = train_tokenizer(files, 300)
    monkeypatch.setattr("lamella._text._PIECE_LENGTH", 27)
    assert tokenizer.decode(encode(tokenizer, files).tolist(), skip_special_tokens=True) == files[0].text
