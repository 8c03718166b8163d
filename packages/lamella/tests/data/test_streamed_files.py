"""Files that are read as a run goes: the documents of prepared files, from any document on, and no byte before it."""

import csv
import gzip
import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lamella import ConfigError
from lamella._data.documents import EndOfText, PositionedParts
from lamella._data.records import parts
from lamella._data.streamed_files import StreamedFile, StreamedSource, from_json, stream_file, to_json
from lamella._data.streamed_tables import StreamedTable
from lamella._data.text import Corpus, collect

datasets = pytest.importorskip("datasets", reason="an extra of lamella, which a host with GPUs may lack")

RECORDS: list[dict[str, Any]] = [{"text": f"Zeile {row}: ä, \u20ac and {row}" * (1 + row % 5)} for row in range(600)]
NAMES = ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.txt", "marked.txt", "a.parquet", "a.arrow", "a.jsonl.gz", "a.csv.gz"]


def write(path: Path, records: Sequence[dict[str, Any]]) -> Path:
    """Write records in the format of the file's name."""
    if path.suffix == ".parquet":
        datasets.Dataset.from_list(list(records)).to_parquet(path, batch_size=100)
        return path
    if path.suffix == ".arrow":
        datasets.Dataset.from_list(list(records)).save_to_disk(path.parent / "saved")
        next((path.parent / "saved").glob("*.arrow")).rename(path)
        return path
    opening: Any = gzip.open if path.suffix == ".gz" else open
    with opening(path, "wt", encoding="utf-8", newline="") as file:
        if ".csv" in path.name or ".tsv" in path.name:
            writer = csv.DictWriter(file, ["text"], delimiter="\t" if ".tsv" in path.name else ",")
            writer.writeheader()
            writer.writerows(records)
        elif path.suffix == ".json":
            json.dump(list(records), file, ensure_ascii=False)
        elif path.suffix == ".txt":
            mark = "\ufeff" if path.name == "marked.txt" else ""
            file.write(mark + "".join(record["text"] + "\n" for record in records) * 20)
        else:
            file.write("".join(json.dumps(record, ensure_ascii=False) + "\n\n" for record in records))
    return path


def streamed(path: Path) -> StreamedSource:
    file = stream_file(path.name, path, is_named=True)
    assert file is not None
    return file


@pytest.mark.parametrize("name", NAMES)
def test_a_streamed_file_has_the_documents_of_a_prepared_file_from_any_document_on(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, RECORDS)
    file = streamed(path)
    documents = list(file.documents())
    expected = list(parts(collect([str(path)], 1e-9).train))
    assert [part for document in documents for part in document.parts] == expected
    assert len(documents) > 5
    for index in {0, 1, len(documents) // 2, len(documents) - 1}:
        place = json.loads(json.dumps(documents[index].after))
        rest = list(file.documents(place))
        assert rest[:1] == documents[index + 1 : index + 2]
        assert [document.parts for document in rest] == [document.parts for document in documents[index + 1 :]]


def overwrite(path: Path, start: int, stop: int) -> None:
    content = bytearray(path.read_bytes())
    content[start:stop] = b"\xff" * (stop - start)
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt"])
def test_no_byte_before_the_place_is_read(tmp_path: Path, name: str) -> None:
    file = streamed(write(tmp_path / name, RECORDS))
    documents = list(file.documents())
    middle = documents[len(documents) // 2].after
    header = 8192 if name == "a.csv" else 1  # The names of the columns are read again, with the block that they are in.
    overwrite(tmp_path / name, header, middle["nbytes"])
    assert list(file.documents(middle)) == documents[len(documents) // 2 + 1 :]
    with pytest.raises(ConfigError):  # Read from the beginning, the file is damaged.
        list(file.documents())


@pytest.mark.skipif(not hasattr(datasets.IterableDataset, "reshard"), reason="older versions read the file's beginning")
def test_no_row_group_before_the_place_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", RECORDS)
    documents = list(streamed(path).documents())
    group = importlib.import_module("pyarrow.parquet").read_metadata(path).row_group(3).column(0)
    overwrite(path, 4, group.dictionary_page_offset or group.data_page_offset)
    assert list(streamed(path).documents(documents[320].after)) == documents[321:]
    with pytest.raises(ConfigError, match="Expected to read"):
        list(streamed(path).documents())


def test_a_list_of_files_comes_back_from_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = datasets.Dataset.from_list(RECORDS).to_iterable_dataset(num_shards=3)
    monkeypatch.setattr(datasets, "load_dataset", lambda name, config, *, split, streaming: table)
    write(tmp_path / "a.jsonl", RECORDS)
    files = collect(["web=hf:ada/letters", f"low={tmp_path / 'a.jsonl'}"], 0.1, streaming=True).streamed
    assert [(file.source, file.name) for file in files] == [
        ("web", "ada/letters/0"),
        ("web", "ada/letters/1"),
        ("web", "ada/letters/2"),
        ("low", "a.jsonl"),
    ]
    restored = from_json(to_json(files))
    assert restored == list(files)
    for file, other in zip(files, restored, strict=True):
        assert list(file.documents()) == list(other.documents())
    tables = [file for file in restored if isinstance(file, StreamedTable)]
    assert len({id(file.dataset) for file in tables}) == 1  # The Hub is asked once.


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_a_data_set_of_the_hub_is_streamed_file_by_file_and_never_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    for number in range(4):
        write(repository / f"test-{number}-of-4{suffix}", RECORDS[150 * number : 150 * (number + 1)])
    load_dataset, calls = datasets.load_dataset, []

    def load(name: str, config: str | None, *, split: str, streaming: bool) -> Any:
        calls.append((name, config, split, streaming))
        return load_dataset(str(repository), split=split, streaming=streaming)

    monkeypatch.setattr(datasets, "load_dataset", load)
    files = collect(["hf:ada/letters/en:test"], 0.1, streaming=True).streamed
    documents = [document for file in files for document in file.documents()]
    assert [document.parts[0] for document in documents] == [record["text"] for record in RECORDS]
    assert calls == [("ada/letters", "en", "test", True)]
    rest = list(files[2].documents(json.loads(json.dumps(documents[310].after))))
    assert [document.parts[0] for document in rest] == [record["text"] for record in RECORDS[311:450]]


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("a.jsonl", '{"text": }\n', r"Expected JSON in line 1201 of .*a.jsonl"),
        ("a.jsonl", '{"x": 1}\n', r"got the keys 'x'.*|line 1201 of .*a.jsonl"),
        ("a.jsonl", "\udcff\n", r"Expected UTF-8 text in line 1201 of .*a.jsonl"),
        ("a.csv", '"open\n', r"Expected to read .*a.csv.*, got unexpected end of data"),
        ("a.csv", "a,b\n", r"2 fields in row 601, under 1 columns"),
        ("a.csv", '"a\nb"\n\udcff\n', r"Expected UTF-8 text in line 604 of .*a.csv', got other bytes"),
        ("a.jsonl", '{"text": "\0"}\n', r"Expected UTF-8 text in line 1201 of .*a.jsonl', got other bytes\. Convert"),
        ("a.json", "\0", r"Expected UTF-8 text in line 1 of .*a.json', got other bytes\. Convert"),
        ("a.txt", "\udcff\n", r"Expected UTF-8 text in line 12001 of .*a.txt', got other bytes\. Convert"),
        ("a.txt", "a\n\0\n", r"Expected UTF-8 text in line 12002 of .*a.txt', got other bytes\. Convert"),
    ],
)
def test_a_damaged_record_in_a_streamed_file_is_refused_by_its_number(
    tmp_path: Path, name: str, damage: str, message: str
) -> None:
    path = write(tmp_path / name, RECORDS)
    streamed_file = streamed(path)
    with path.open("ab") as file:
        file.write(damage.encode(errors="surrogateescape"))
    documents: list[PositionedParts] = []
    with pytest.raises(ConfigError, match=message) as refusal:
        documents.extend(streamed_file.documents())
    assert "\n" not in str(refusal.value)
    if name == "a.jsonl":
        assert len(documents) == 600  # extended one by one, up to the error
        with pytest.raises(ConfigError, match=message):  # Numbers are those of the file, wherever reading began.
            list(streamed_file.documents(documents[500].after))


def test_a_row_of_a_table_is_refused_by_its_number(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [*RECORDS, {"text": None}])
    documents: list[PositionedParts] = []
    with pytest.raises(
        ConfigError, match=r"in row 601 of .*a.parquet', got nothing under the columns of a document. Leave the row"
    ):
        documents.extend(streamed(path).documents())
    with pytest.raises(ConfigError, match=r"in row 601 of .*a.parquet"):
        list(streamed(path).documents(documents[500].after))


def test_a_table_without_rows_has_no_documents(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", RECORDS[:9])
    path = write_columns(tmp_path / "b.parquet", text=[])
    assert list(streamed(path).documents()) == []
    with pytest.raises(ConfigError, match="Expected text in .*b.parquet, got 1 files with no text in them"):
        collect([str(path)], 0.1)
    [file] = collect([str(tmp_path)], 1e-9).train
    assert file.name == "a.parquet"


def test_a_column_of_bytes_is_read_as_text(tmp_path: Path) -> None:
    path = write_columns(tmp_path / "a.parquet", text=["caf\u00e9".encode()] * 9)
    expected = ["caf\u00e9", EndOfText()]
    assert [part for document in streamed(path).documents() for part in document.parts] == expected * 9
    assert list(parts(collect([str(path)], 1e-9).train)) == expected * 9
    path = write_columns(path, text=[b"a", b"\xe9"])
    message = "Expected UTF-8 text in row 2 of .*a.parquet', got other bytes. Convert the column, or leave the row out."
    with pytest.raises(ConfigError, match=message):
        collect([str(path)], 0.1)
    with pytest.raises(ConfigError, match=message):
        list(streamed(path).documents())


def write_columns(path: Path, **columns: list[bytes]) -> Path:
    """Write a Parquet file whose columns are of bytes."""
    pa, parquet = (importlib.import_module(name) for name in ("pyarrow", "pyarrow.parquet"))
    parquet.write_table(pa.table({name: pa.array(column, pa.binary()) for name, column in columns.items()}), path)
    return path


def forms(corpus: Corpus) -> dict[str, str]:
    return {file.name: file.form for file in corpus.streamed}


def test_a_folder_is_searched_as_for_a_prepared_run_without_reading_its_files(tmp_path: Path) -> None:
    root = tmp_path / "folder"
    root.mkdir()
    for name in ("a.parquet", "a.jsonl", "a.csv", "a.txt", "a.json"):
        write(root / name, RECORDS)
    (root / "figures.csv").write_text("x\n1.0\n")
    (root / "settings.json").write_text('{"x": 1}')
    (root / "empty.txt").write_text("")
    (root / "picture.png").write_bytes(b"\x89PNG\0")
    datasets.Dataset.from_list([{"x": 1.0}]).to_parquet(root / "figures.parquet")
    prepared, corpus = collect([str(root)], 1e-9), collect([str(root)], 0.1, streaming=True)
    assert forms(corpus) == {file.name: file.form for file in (*prepared.train, *prepared.validation)}
    assert corpus.num_skipped == prepared.num_skipped == 2
    assert corpus.train == ()
    held_out = collect([str(root)], 0.1, validation_paths=[str(root / "a.jsonl")], streaming=True)
    assert "a.jsonl" not in forms(held_out)
    assert held_out.describe().startswith(f"streamed from 6 files, {sum(f.nbytes or 0 for f in held_out.streamed):,} b")


@pytest.mark.parametrize("num_bytes", [3, (1 << 20) - 1])
def test_a_file_in_a_folder_whose_last_byte_begins_a_character_is_skipped(tmp_path: Path, num_bytes: int) -> None:
    (tmp_path / "a.txt").write_text("Text.\n" * 9)
    (tmp_path / "b.txt").write_bytes(b"a" * num_bytes + "\u00e9".encode("latin-1"))
    prepared, corpus = collect([str(tmp_path)], 0.1), collect([str(tmp_path)], 0.1, streaming=True)
    assert prepared.num_skipped == corpus.num_skipped == 1
    assert forms(corpus) == {"a.txt": "text"}
    with pytest.raises(ConfigError, match=r"Expected UTF-8 text in '.*b.txt', got other bytes"):
        collect([str(tmp_path / "b.txt")], 0.1, streaming=True)


def test_a_character_that_two_blocks_share_is_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a" * ((1 << 20) - 1) + "\u00e9".encode())
    assert forms(collect([str(tmp_path)], 0.1, streaming=True)) == {"a.txt": "text"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"\xff\xfe\0", r"Expected UTF-8 text in '.*a.txt', got other bytes \(UTF-16\)"),
        ("a.csv", b"x,y\n1,2\n", r"as columns of '.*a.csv', got 'x', 'y'. Rename"),
        ("a.parquet", b"PAR1", "Expected to read '.*a.parquet'"),
        ("a.txt", b"", "Expected text in .*, got 1 files with no text"),
    ],
)
def test_a_named_file_that_cannot_be_streamed_is_refused_at_the_start(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        collect([str(tmp_path / name)], 0.1, streaming=True)


def test_a_table_without_documents_is_refused_by_its_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [{"prompt": "a", "response": "b"}])
    with pytest.raises(ConfigError, match="as columns of .*, got 'prompt', 'response'. Rename the columns"):
        collect([str(path)], 0.1, streaming=True)


def test_a_source_that_cannot_be_streamed_and_an_absent_library_are_one_line_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str, config: str | None, *, split: str, streaming: bool) -> Any:
        raise ValueError(f'Bad split: {split}.\nAvailable splits: ["train"]')

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(ConfigError, match=r"Expected to read 'hf:ada/letters:train\[:9\]' from the Hub .*Bad split"):
        collect(["hf:ada/letters:train[:9]"], 0.1, streaming=True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"Expected datasets to be installed for .*packages/lamella\[data\]"):
        collect([str(write(tmp_path / "a.parquet", RECORDS))], 0.1, streaming=True)
    assert isinstance(streamed(write(tmp_path / "a.jsonl", RECORDS)), StreamedFile)  # needs no library
