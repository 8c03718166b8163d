"""Which files are read, how they are split, and what is refused."""

import os
from pathlib import Path

import pytest

from lamella import ConfigError
from lamella._data.tables import SourceFile
from lamella._data.text import collect


def names(files: tuple[SourceFile, ...]) -> list[str]:
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
    file_names = [*names(corpus.train), *names(corpus.validation)]
    assert "argparse.py" in file_names and "json/decoder.py" in file_names
    assert not any(name.startswith(("site-packages/", "test/")) for name in file_names)
    assert "standard library" in corpus.describe()


def test_the_split_is_by_file_and_depends_on_names_alone(tmp_path: Path) -> None:
    corpus = collect([str(write(tmp_path / "here", **letters(20)))], 0.2)
    elsewhere = collect([str(write(tmp_path / "there", **letters(20)))], 0.2)
    assert names(corpus.validation) == names(elsewhere.validation)
    assert not set(names(corpus.train)) & set(names(corpus.validation))
    assert len(corpus.train) + len(corpus.validation) == 20
    assert corpus.fingerprint() == elsewhere.fingerprint()


def test_at_least_the_asked_fraction_is_held_out(tmp_path: Path) -> None:
    corpus = collect([str(write(tmp_path / "text", **letters(20)))], 0.2)
    held_out, trained_on = (sum(file.nbytes for file in files) for files in (corpus.validation, corpus.train))
    assert 0.2 <= held_out / (held_out + trained_on) < 0.35


def test_a_single_file_is_cut_at_a_line(tmp_path: Path) -> None:
    text = "".join(f"line {index}\n" for index in range(100))
    corpus = collect([str(write(tmp_path / "text", only=text) / "only.txt")], 0.1)
    (first,), (second,) = (["".join(file.pieces()) for file in files] for files in (corpus.train, corpus.validation))
    assert first + second == text
    assert second.startswith("line ")
    assert 0.1 <= corpus.validation[0].nbytes / len(text) < 0.12


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    path = write(tmp_path / "text", only="\ufeffone\n\ufefftwo\n") / "only.txt"
    corpus = collect([str(path)], 0.4)
    assert ["".join(file.pieces()) for file in (*corpus.train, *corpus.validation)] == ["one\n", "\ufefftwo\n"]


@pytest.mark.parametrize("fraction", [0.05, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("sizes", [*([1000] * count for count in (1, 2, 3, 4, 8, 50)), [9000, 50, 20, 10], [600, 300]])
def test_the_fraction_is_held_out_of_few_files_and_of_a_file_that_is_most_of_the_text(
    tmp_path: Path, sizes: list[int], fraction: float
) -> None:
    texts = {f"file{index}": "line\n" * (size // 5) for index, size in enumerate(sizes)}
    corpus = collect([str(write(tmp_path / "text", **texts))], fraction)
    held_out, train = (sum(file.nbytes for file in files) for files in (corpus.validation, corpus.train))
    assert held_out + train == sum(map(len, texts.values()))
    share = held_out / (held_out + train)
    assert fraction <= share + 0.001 <= 2 * fraction and (1 - fraction) / 2 <= 1 - share
    assert corpus.describe().startswith(f"{len(sizes)} files, {held_out + train:,} bytes of ")
    assert corpus.describe().endswith(f"({share:.1%} held out)")
    pieces: dict[str, str] = {}
    for file in (*corpus.train, *corpus.validation):
        pieces[file.name] = pieces.get(file.name, "") + "".join(file.pieces())
    assert pieces == {f"{name}.txt": text for name, text in texts.items()}
    assert corpus.fingerprint() == collect([str(tmp_path / "text")], fraction).fingerprint()


def test_the_end_of_the_largest_file_is_held_out_where_no_whole_file_fits(tmp_path: Path) -> None:
    root = write(tmp_path / "text", a="word\n" * 100, b="word\n" * 200, c="word\n" * 2)
    corpus = collect([str(root)], 0.1)
    assert (names(corpus.train), names(corpus.validation)) == (["a.txt", "b.txt"], ["b.txt", "c.txt"])
    assert sum(file.nbytes for file in corpus.validation) == pytest.approx(0.1 * 1510, abs=5)


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
    with pytest.raises(ConfigError, match=r"'a/\*\.jsonl', which does not exist\. Leave out the quotes, for the sh"):
        collect(["a/*.jsonl"], 0.1)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="Expected text in .*empty, got 0 files"):
        collect([str(tmp_path / "empty")], 0.1)
    (tmp_path / "empty" / "file").touch()
    with pytest.raises(ConfigError, match="got 1 files with no text"):
        collect([str(tmp_path / "empty")], 0.1)
    path = write(tmp_path / "text", only="text\n" * 9) / "only.txt"
    with pytest.raises(ConfigError, match=r"apart from the files that other names or .* hold, got 0 files\."):
        collect([f"one={path}", f"two={path}"], 0.1)
    (tmp_path / "binary").write_bytes(b"\0\1")
    with pytest.raises(ConfigError, match="Expected UTF-8 text in .*binary"):
        collect([str(tmp_path / "binary")], 0.1)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            "caf\u00e9".encode("latin-1"),
            "Expected UTF-8 text in line 1 of .*file', got other bytes. Convert the file, or leave it",
        ),
        ("ä\n".encode() * 700_000 + b"NUL\0\n", "Expected UTF-8 text in line 700001 of .*file', got other bytes"),
        ("text".encode("utf-16"), r"got other bytes \(UTF-16\)"),
        (b"\x1f\x8b\x08\0", r"got other bytes \(gzip; a file whose name ends in .gz is decompressed\)"),
    ],
)
def test_text_in_another_encoding_is_refused_with_the_likely_encoding(
    tmp_path: Path, content: bytes, expected: str
) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ConfigError, match=expected):
        collect([str(tmp_path / "file")], 0.1)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="Expected a text file or a folder as --data, got .*pipe', which is neither."):
        collect([str(tmp_path / "pipe")], 0.1)


def test_a_folder_that_cannot_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write(tmp_path / "text", **letters(2))
    write(root / "locked", **letters(1))
    scan = os.scandir

    def scandir(path: str) -> object:
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr("os.scandir", scandir)
    with pytest.raises(ConfigError, match="Expected to read .*locked', got Permission denied."):
        collect([str(root)], 0.1)


def test_a_file_that_two_paths_lead_to_is_read_once(tmp_path: Path) -> None:
    root = write(tmp_path / "text", **letters(4))
    corpus = collect([str(root / "file0.txt"), str(root), str(root)], 0.3)
    assert sorted([*names(corpus.train), *names(corpus.validation)]) == [f"file{index}.txt" for index in range(4)]


def test_the_runs_own_folder_is_no_text(tmp_path: Path) -> None:
    root = write(tmp_path / "text", **letters(2))
    write(root / "runs", metrics="step\n")
    corpus = collect([str(root)], 0.3, without=root / "runs")
    assert sorted([*names(corpus.train), *names(corpus.validation)]) == ["file0.txt", "file1.txt"]


def test_a_text_file_changed_during_reading_is_refused(tmp_path: Path) -> None:
    root = write(tmp_path / "text", **letters(2))
    corpus = collect([str(root)], 0.3)
    (file,) = (candidate for candidate in (*corpus.train, *corpus.validation) if candidate.name == "file0.txt")
    write(root, file0="text of 9\n")
    with pytest.raises(ConfigError, match="Expected .*file0.txt' to stay as it was while it is read"):
        list(file.pieces())


def test_a_text_of_one_long_line_is_split_between_characters(tmp_path: Path) -> None:
    corpus = collect([str(write(tmp_path / "text", only="\u4e2d\U0001f600" * 100) / "only.txt")], 0.1)
    pieces = [piece for files in (corpus.train, corpus.validation) for file in files for piece in file.pieces()]
    assert "".join(pieces) == "\u4e2d\U0001f600" * 100 and len(pieces) == 2


@pytest.mark.parametrize("text", ["line\n" * 100 + "x" * 20_000, "x" * 20_000 + "\nline", "line\n" + "x" * 20_000])
def test_the_fraction_of_a_text_with_a_long_line_is_held_out(tmp_path: Path, text: str) -> None:
    corpus = collect([str(write(tmp_path / "text", only=text) / "only.txt")], 0.1)
    (first,), (second,) = (["".join(file.pieces()) for file in files] for files in (corpus.train, corpus.validation))
    assert first + second == text
    assert len(second) == pytest.approx(0.1 * len(text), abs=1)


def test_the_held_out_part_is_not_blank(tmp_path: Path) -> None:
    text = "".join(f"line {index}\n" for index in range(5)) + "\n\n"
    corpus = collect([str(write(tmp_path / "text", only=text) / "only.txt")], 0.15)
    assert ["".join(file.pieces()) for file in corpus.validation] == ["line 4\n\n\n"]
