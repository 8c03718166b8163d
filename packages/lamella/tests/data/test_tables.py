"""Tables, compressed files and data sets of the Hub hold the documents that JSON lines with the same records hold."""

import csv
import gzip
import importlib
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lamella import Config, ConfigError
from lamella._data.documents import Chat, EndOfText
from lamella._data.records import parts, survey
from lamella._data.streamed_files import documents_of
from lamella._data.text import Corpus, collect
from lamella._data.tokens import load_tokens
from lamella._training.preparation import prepare

datasets = pytest.importorskip("datasets")

TEXTS = [{"text": f'Line {number}: \u00e9t\u00e9 \u4e2d, NA, {number}\n"quoted"'} for number in range(60)]
CHATS = [
    {"messages": [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": "Yes."}], "rating": 3}
    for number in range(20)
]


def write_lines(path: Path, records: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def write_table(path: Path, records: Sequence[dict[str, Any]]) -> Path:
    """Write a table in the format of the file's name."""
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".parquet":
        datasets.Dataset.from_list(list(records)).to_parquet(path)
    elif path.suffix == ".arrow":
        datasets.Dataset.from_list(list(records)).save_to_disk(path.parent / "saved")
        next((path.parent / "saved").glob("*.arrow")).rename(path)
    else:
        opening: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
        with opening(path, "wt", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, [*records[0]], delimiter="\t" if ".tsv" in path.name else ",")
            writer.writeheader()
            writer.writerows(records)
    return path


def documents(corpus: Corpus) -> list[Any]:
    """Return the parts of all documents, without the records' positions."""
    every = [*parts([*corpus.train, *corpus.validation])]
    every += [part for document in documents_of(corpus.streamed) for part in document.parts]
    return [(part.messages, part.tools) if isinstance(part, Chat) else part for part in every]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.csv", "a.tsv", "a.csv.gz"])
def test_a_table_of_texts_holds_the_documents_of_json_lines(tmp_path: Path, name: str) -> None:
    corpus = collect([str(write_table(tmp_path / name, TEXTS))], 0.25)
    expected = collect([str(write_lines(tmp_path / "a.jsonl", TEXTS))], 0.25)
    assert documents(corpus) == documents(expected)
    assert [file.form for file in (*corpus.train, *corpus.validation)] == ["table", "table"]
    [train], [held_out] = corpus.train, corpus.validation
    assert len([*train.records()]) == train.stop == held_out.start == 45
    assert len([*held_out.records()]) == 15
    assert corpus.fingerprint() == collect([str(tmp_path / name)], 0.25).fingerprint()
    assert corpus.fingerprint() != collect([str(write_table(tmp_path / name, TEXTS[1:]))], 0.25).fingerprint()


LONG = {"text": "long " * 2000}
SHORT = [{"text": f"short {number}"} for number in range(400)]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
@pytest.mark.parametrize(
    ("records", "shares"),
    [
        ([*SHORT[:390], LONG, *SHORT[390:]], (0.005, 0.02)),  # The long record holds the place of the cut.
        ([*SHORT, *[LONG] * 20], (0.03, 0.07)),  # Few of the rows have most of the bytes.
        ([LONG, LONG], (0.4, 0.6)),
    ],
)
def test_the_cut_is_at_the_record_end_nearest_to_the_fraction_of_the_bytes(
    tmp_path: Path, suffix: str, records: list[dict[str, str]], shares: tuple[float, float]
) -> None:
    path = tmp_path / f"a{suffix}"
    if suffix == ".json":
        path.write_text(json.dumps(records), encoding="utf-8")
    else:
        (write_lines if suffix == ".jsonl" else write_table)(path, records)
    corpus = collect([str(path)], 0.05)
    texts = [part for part in documents(corpus) if isinstance(part, str)]
    assert texts == [record["text"] for record in records]
    held_out, train = (sum(file.nbytes for file in files) for files in (corpus.validation, corpus.train))
    assert shares[0] < held_out / (held_out + train) < shares[1]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_table_of_conversations_has_no_fields_of_null(tmp_path: Path, name: str) -> None:
    chats = json.loads(json.dumps(CHATS))
    chats[3]["messages"][0]["name"] = "Ada"
    chats[4]["messages"][1] |= {"content": None, "tool_calls": [{"type": "function"}]}
    corpus = collect([str(write_table(tmp_path / name, chats))], 0.25)
    assert documents(corpus) == documents(collect([str(write_lines(tmp_path / "a.jsonl", chats))], 0.25))
    assert survey(corpus.train).first_chat is not None


def chat_with_call(arguments: object, **fields: object) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    tool = {"type": "function", "function": {"name": "f", "parameters": arguments}}
    question = {"role": "user", "content": "Which?", **fields}
    return {"messages": [question, {"role": "assistant", "content": "", "tool_calls": [call]}], "tools": [tool]}


ARGUMENTS = [{"x": 0.3, "y": "s"}, {"x": "caf\u00e9", "z": [1, None]}, {"k": {"q": None}}, {}]


@pytest.mark.skipif(not hasattr(datasets, "Json"), reason="older versions have no type of JSON")
@pytest.mark.parametrize(
    "chats",
    [
        [chat_with_call(arguments) for arguments in ARGUMENTS * 5],
        # Contents of two kinds make JSON of each message.
        [chat_with_call({}), *(chat_with_call(arguments, content=[{"text": "Which?"}]) for arguments in ARGUMENTS * 5)],
    ],
    ids=["arguments", "messages"],
)
@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "hf:ada/letters"])
@pytest.mark.parametrize("streaming", [False, True])
def test_json_in_a_column_is_read_as_json_lines_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streaming: bool, name: str, chats: list[dict[str, Any]]
) -> None:
    table = datasets.Dataset.from_list(chats, on_mixed_types="use_json")
    assert "Json" in str(table.features["messages"])
    expected = documents(collect([str(write_lines(tmp_path / "a.jsonl", chats))], 0.25))
    path = str(tmp_path / name)
    if name.startswith("hf:"):
        path, rows = name, table.to_iterable_dataset() if streaming else table
        monkeypatch.setattr(datasets, "load_dataset", lambda *arguments, **options: rows)
    elif name == "a.parquet":
        table.to_parquet(path)
    else:
        table.save_to_disk(tmp_path / "saved")
        next((tmp_path / "saved").glob("*.arrow")).rename(path)
    assert documents(collect([path], 0.25, streaming=streaming)) == expected


@pytest.mark.skipif(not hasattr(datasets, "Json"), reason="older versions have no type of JSON")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('"\\ud800"', "Expected whole characters in row 7 of .*a.parquet', got half of one"),
        ('{"x": ', "Expected to read .*a.parquet', got .*value at column 7"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_damaged_json_in_a_column_is_refused_in_one_line(
    tmp_path: Path, streaming: bool, content: str, message: str
) -> None:
    pa, parquet = (importlib.import_module(name) for name in ("pyarrow", "pyarrow.parquet"))
    texts = pa.array(['"a"'] * 6 + [content], pa.string())
    parquet.write_table(pa.table({"text": pa.ExtensionArray.from_storage(pa.json_(), texts)}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=message) as refusal:
        documents(collect([str(tmp_path / "a.parquet")], 0.25, streaming=streaming))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz", "a.json.gz"])
def test_a_compressed_file_is_split_and_read_as_the_file_itself(tmp_path: Path, name: str) -> None:
    text = json.dumps(TEXTS) if ".json." in name else "".join(json.dumps(record) + "\n" for record in TEXTS)
    plain = tmp_path / name.removesuffix(".gz")
    plain.write_text(text, encoding="utf-8")
    (tmp_path / name).write_bytes(gzip.compress(text.encode()))
    compressed, expected = (collect([str(path)], 0.25) for path in (tmp_path / name, plain))
    assert documents(compressed) == documents(expected)
    for one, other in zip(
        (*compressed.train, *compressed.validation), (*expected.train, *expected.validation), strict=True
    ):
        assert (one.digest, one.nbytes, one.num_records_before()) == (
            other.digest,
            other.nbytes,
            other.num_records_before(),
        )


def test_folders_hold_tables_beside_text_and_skip_tables_without_documents(tmp_path: Path) -> None:
    root = tmp_path / "fold[e]r *"
    write_table(root / "documents.parquet", TEXTS)
    write_table(root / "figures.parquet", [{"x": 1.0}])
    write_table(root / "figures.csv", [{"x": 1.0}])
    write_lines(root / "lines.jsonl", TEXTS)
    datasets.Dataset.from_list(TEXTS).save_to_disk(root / "saved")
    corpus = collect([str(root)], 0.01)
    forms = {file.name: file.form for file in (*corpus.train, *corpus.validation)}
    assert forms == {
        "documents.parquet": "table",
        "figures.csv": "text",
        "lines.jsonl": "lines",
        "saved/data-00000-of-00001.arrow": "table",
    }
    assert corpus.num_skipped == 1


@pytest.mark.parametrize("state", [None, "{}", '{"_data_files": [{"filename": "data-00000-of-00002.arrow"}]}'])
@pytest.mark.parametrize("streaming", [False, True])
def test_results_that_datasets_caches_in_the_folder_of_a_data_set_are_left_out(
    tmp_path: Path, streaming: bool, state: str | None
) -> None:
    folder = tmp_path / "saved"
    datasets.Dataset.from_list(TEXTS).save_to_disk(folder)
    table = datasets.load_from_disk(folder)
    table.map(lambda row: {"text": row["text"].upper()}).filter(bool, input_columns="text")
    table.map(lambda row: {"text": row["text"].lower()}, num_proc=2)
    assert len([*folder.glob("cache-*.arrow")]) == 4
    assert file_names(collect([str(folder)], 0.25, streaming=streaming)) == ["data-00000-of-00001.arrow"]
    # Without a state that fits the folder, names alone tell cached results from other tables.
    (folder / "cache-of-letters.arrow").write_bytes((folder / "data-00000-of-00001.arrow").read_bytes())
    (folder / "state.json").unlink() if state is None else (folder / "state.json").write_text(state)
    expected = ["cache-of-letters.arrow", "data-00000-of-00001.arrow"]
    assert file_names(collect([str(folder)], 0.25, streaming=streaming)) == expected


@pytest.mark.parametrize("streaming", [False, True])
def test_shards_of_a_data_set_saved_earlier_are_left_out(tmp_path: Path, streaming: bool) -> None:
    folder = tmp_path / "saved"
    datasets.Dataset.from_list(TEXTS).save_to_disk(folder, num_shards=3)
    datasets.Dataset.from_list(TEXTS).save_to_disk(folder, num_shards=2)
    assert len([*folder.glob("*.arrow")]) == 5
    (folder / "more.txt").write_text("Text beside the data set.\n" * 9)
    corpus = collect([str(folder)], 0.25, streaming=streaming)
    assert file_names(corpus) == ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow", "more.txt"]


@pytest.mark.parametrize("streaming", [False, True])
def test_of_a_folder_of_several_splits_the_one_to_train_on_is_read(tmp_path: Path, streaming: bool) -> None:
    saved, validation = tmp_path / "text" / "saved", tmp_path / "validation.txt"
    splits = {name: datasets.Dataset.from_list([{"text": name}] * 9) for name in ("test", "train", "validation")}
    datasets.DatasetDict(splits).save_to_disk(saved)
    validation.write_text("other text\n" * 9)

    def texts(folder: Path) -> set[object]:
        corpus = collect([str(folder)], 0.1, validation_paths=[str(validation)], streaming=streaming)
        train = [*parts(corpus.train), *(part for document in documents_of(corpus.streamed) for part in document.parts)]
        return {part for part in train if isinstance(part, str)}

    assert texts(saved) == texts(saved.parent) == {"train"}
    assert texts(saved / "test") == {"test"}
    shutil.rmtree(saved / "train")
    expected = "Expected a split 'train' in the data set '.*/saved', got 'test', 'validation'. Name the folder of a"
    with pytest.raises(ConfigError, match=expected):
        texts(saved)


def file_names(corpus: Corpus) -> list[str]:
    return sorted({file.name for file in (*corpus.train, *corpus.validation, *corpus.streamed)})


def test_a_run_on_a_table_has_the_tokens_of_a_run_on_json_lines(config: Config, tmp_path: Path) -> None:
    def tokens(path: Path) -> torch.Tensor:
        settings = replace(config.data, paths=(str(path),))
        run = replace(config.run, directory=str(tmp_path / f"run-{path.suffix}"))
        return load_tokens(prepare(replace(config, data=settings, run=run)).directory.tokens).train

    records = TEXTS * 10
    expected = tokens(write_lines(tmp_path / "a.jsonl", records))
    assert len(expected) > 1000
    assert torch.equal(tokens(write_table(tmp_path / "a.parquet", records)), expected)


@pytest.mark.parametrize("name", ["a.parquet", "a.csv"])
def test_a_table_without_documents_is_refused_by_its_columns(tmp_path: Path, name: str) -> None:
    path = write_table(tmp_path / name, [{"prompt": "a", "response": "b"}])
    message = r"Expected 'messages', 'prompt' and 'completion', .* as columns of .*, got 'prompt', 'response'. Rename"
    with pytest.raises(ConfigError, match=message):
        collect([str(path)], 0.1)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.jsonl.gz"])
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    content = gzip.compress(b"0123456789" * 50)[:-20] if name.endswith("gz") else b"text,x\n\xff\xfe,2,3\n"
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match="Expected to read .*, got ") as refusal:
        collect([str(tmp_path / name)], 0.1)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("num_lines", [1, 5_000])
def test_a_line_of_separated_columns_in_another_encoding_is_named(tmp_path: Path, num_lines: int) -> None:
    content = "\ufefftext\n" + '"\u00e9\n"\n' * num_lines
    (tmp_path / "a.csv").write_bytes(content.encode() + "caf\u00e9\n".encode("cp1252"))
    message = f"Expected UTF-8 text in line {2 * num_lines + 2} of .*a.csv', got other bytes. Convert the file"
    with pytest.raises(ConfigError, match=message):
        collect([str(tmp_path / "a.csv")], 0.1)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("is_named", [True, False])
def test_a_column_of_documents_that_is_there_twice_is_refused(tmp_path: Path, streaming: bool, is_named: bool) -> None:
    path = tmp_path / "folder" / "a.csv"
    path.parent.mkdir()
    path.write_text("text,text,x,x\n" + "one,two,3,4\n" * 9)
    location = path if is_named else path.parent
    with pytest.raises(ConfigError, match="Expected the column 'text' of '.*a.csv' once, got it 2 times. Rename the"):
        list(documents_of(collect([str(location)], 0.1, streaming=streaming).streamed))


def test_other_columns_of_one_name_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,x,x\n" + "one,2,3\n" * 9)
    assert documents(collect([str(tmp_path / "a.csv")], 0.1)) == ["one", EndOfText()] * 9


def test_a_row_that_is_no_document_is_named_by_its_number(tmp_path: Path) -> None:
    path = write_table(tmp_path / "a.parquet", [*CHATS, {"messages": [], "rating": 1}])
    with pytest.raises(ConfigError, match="row 21 of .*a.parquet"):
        survey(collect([str(path)], 0.1).validation)


def test_without_the_library_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_table(tmp_path / "a.parquet", TEXTS)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"Expected datasets to be installed for .*packages/lamella\[data\]"):
        collect([str(path)], 0.1)


class _Hub:
    """A stand-in for the Hub: a data set under one name, with the errors of `datasets`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, str | None, str]] = []
        monkeypatch.setattr(datasets, "load_dataset", self._load)

    def _load(self, name: str, config: str | None, *, split: str) -> Any:
        self.calls.append((name, config, split))
        if split != "train":
            raise ValueError(f"Unknown split \"{split}\". Should be one of ['train'].")
        return datasets.Dataset.from_list(TEXTS)


def test_a_data_set_of_the_hub_holds_the_documents_of_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = _Hub(monkeypatch)
    corpus = collect(["hf:ada/letters"], 0.25)
    assert documents(corpus) == documents(collect([str(write_lines(tmp_path / "a.jsonl", TEXTS))], 0.25))
    assert [file.name for file in corpus.train] == ["ada/letters"]
    collect(["letters=hf:ada/letters/en:train"], 0.25)
    assert {*hub.calls} == {("ada/letters", None, "train"), ("ada/letters", "en", "train")}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hf:ada/letters:test", 'Unknown split "test". Should be one of'),
        ("hf:", "Expected hf:OWNER/NAME, hf:OWNER/NAME/CONFIG or one of them with :SPLIT, got 'hf:'"),
        ("hf:a/b/c/d", "Expected hf:OWNER/NAME"),
    ],
)
def test_malformed_hub_names_and_unknown_splits_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    _Hub(monkeypatch)
    with pytest.raises(ConfigError, match=message):
        collect([name], 0.25)


def test_offline_a_data_set_of_the_hub_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="Expected to read 'hf:ada/absent' from the Hub or its cache on this machine"):
        collect(["hf:ada/absent"], 0.25)


def test_text_alone_needs_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert collect([str(write_lines(tmp_path / "a.jsonl", TEXTS))], 0.1).num_skipped == 0
