"""Tables of documents, a row each: Parquet, Arrow and data sets of the Hugging Face Hub, by `datasets`, and CSV.

A row becomes the JSON text of its documents' columns: a table and a file of JSON lines with the same records hold the
same documents.
"""

import csv
import glob
import hashlib
import importlib.util
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import Any, Final, Literal

from lamella._data.json_files import COLUMN_SETS, COLUMN_SETS_IN_WORDS, COLUMNS, Form
from lamella._data.separated import is_separated, separated_columns, separated_rows
from lamella._data.text_files import READ_ERRORS, TextFile, changed, nearest_end
from lamella._settings.options import ConfigError, in_short, shown
from lamella._settings.parsing import parse_json

HUB: Final = "hf:"
"""The beginning of the name of a data set of the Hub."""

_HUB_NAME: Final = re.compile(r"hf:([\w.-]+(?:/[\w.-]+)?)(?:/([\w.-]+))?(?::(.+))?")
_BUILDERS: Final[Mapping[str, Literal["parquet", "arrow"]]] = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
_NUM_NAMED: Final = 8
BATCH_SIZE: Final = 256
"""Rows that are read together: row by row, a data set takes several times as long."""

_JSON_TYPE: Final = "arrow.json"
"""The name of Arrow's type of texts that hold JSON, `Json` of `datasets`."""

_LOGGERS: Final = ("datasets", "huggingface_hub")


@dataclass(frozen=True, kw_only=True)
class TableFile:
    """Rows of a table.

    Attributes:
        name: Path relative to the searched folder, or the data set's name: independent of the machine.
        path: The file, or the data set's name with `hf:`.
        start: First row of the range.
        stop: Row after the last.
        nbytes: Bytes of the rows as JSON.
        digest: SHA-256 of those bytes, in hexadecimal digits.
        source: The name of the table's source or validation set; empty without names.
        form: How documents lie in the file: one a row.
    """

    name: str
    path: Path | str
    start: int = 0
    stop: int
    nbytes: int
    digest: str
    source: str = ""
    form: Form = "table"

    def num_records_before(self) -> int:
        """Return the number of rows before the range."""
        return self.start

    def records(self) -> Iterator[str]:
        """Yield the JSON texts of the documents.

        Raises:
            ConfigError: The table has changed since its digest was computed, or cannot be read.
        """
        digest = hashlib.sha256()
        for record in _records(self.path, self.start, self.stop):
            digest.update(record.encode())
            yield record
        if digest.hexdigest() != self.digest:
            raise changed(self.path)

    def pieces(self) -> Iterator[str]:
        """Yield nothing: a table has documents, and no text beside them."""
        return iter(())

    def cut(self, fraction: float) -> "tuple[list[TableFile], list[TableFile]]":
        """Split into the first rows, one at least, and the last ones, with about `fraction` of the bytes."""
        ends = accumulate(len(record.encode()) for record in _records(self.path, 0, self.stop))
        at, _ = nearest_end((end for end, _ in pairwise(ends)), round(self.nbytes * (1 - fraction)))
        parts = [self._part(start, stop) for start, stop in ((0, at), (at, self.stop)) if stop > start]
        return parts[:1], parts[1:]

    def _part(self, start: int, stop: int) -> "TableFile":
        _, nbytes, digest = _measured(_records(self.path, start, stop))
        return replace(self, start=start, stop=stop, nbytes=nbytes, digest=digest)


SourceFile = TextFile | TableFile
"""A file of documents, or a part of one."""


def is_table(path: Path) -> bool:
    """True for the name of a table, which may have documents' columns or not."""
    return path.suffix.lower() in _BUILDERS or is_separated(path)


def scan_table(name: str, path: Path, *, is_named: bool) -> TableFile | None:
    """Return a table with documents' columns, else None.

    Args:
        name: Path relative to the searched folder.
        path: The file.
        is_named: The user named the file itself, not its folder.

    Raises:
        ConfigError: The table cannot be read, `datasets` is not installed, or a named table has no documents' columns.

    Effects: reads the table.
    """
    if is_separated(path) and not is_named and not begins_with_documents(path):
        return None
    return _scanned(name, path, is_named=is_named)


def scan_hub(name: str) -> TableFile:
    """Return the rows of a data set, `hf:OWNER/NAME`, `hf:OWNER/NAME/CONFIG`, with `:SPLIT` for another than train.

    Raises:
        ConfigError: The name is none of these, the data set or the split does not exist or cannot be reached,
            `datasets` is not installed, or the data set has no documents' columns.

    Effects: downloads the data set to the cache of `datasets`, unless it lies there; reads it.
    """
    table = _scanned(name.removeprefix(HUB), name, is_named=True)
    assert table is not None
    return table


def _scanned(name: str, path: Path | str, *, is_named: bool) -> TableFile | None:
    columns = _columns(path)
    if not has_documents(columns):
        if not is_named:
            return None
        raise without_documents(path, columns)
    num_rows, nbytes, digest = _measured(_records(path, 0, None))
    return TableFile(name=name, path=path, stop=num_rows, nbytes=nbytes, digest=digest)


def has_documents(columns: Iterable[str]) -> bool:
    """True for columns among which a document's columns are."""
    return any(set(names) <= set(columns) for names in COLUMN_SETS)


def without_documents(path: Path | str, columns: Sequence[str]) -> ConfigError:
    """Return the refusal of a table without documents' columns."""
    names = ", ".join(map(repr, columns[:_NUM_NAMED])) or "none"
    more = f" and {len(columns) - _NUM_NAMED} more" if len(columns) > _NUM_NAMED else ""
    return ConfigError(
        f"Expected {COLUMN_SETS_IN_WORDS} as columns of {str(path)!r}, got {names}{more}. Rename the columns."
    )


def _measured(records: Iterable[str]) -> tuple[int, int, str]:
    """Return the number of records, their bytes and their digest."""
    digest, num_rows, nbytes = hashlib.sha256(), 0, 0
    for record in records:
        content = record.encode()
        digest.update(content)
        num_rows, nbytes = num_rows + 1, nbytes + len(content)
    return num_rows, nbytes, digest.hexdigest()


def begins_with_documents(path: Path) -> bool:
    """True for a file of separated columns whose first row names documents' columns; other such files are text."""
    with suppress(*READ_ERRORS, ConfigError, csv.Error):
        return has_documents(separated_columns(path))
    return False


def _records(path: Path | str, start: int, stop: int | None) -> Iterator[str]:
    """Yield the JSON text of each row of a range, with the documents' columns alone."""
    with refused_table(path):
        for number, row in enumerate(_rows(path, start, stop), start=start + 1):
            yield record_text(row, f"row {number} of {str(path)!r}")


def record_text(row: Mapping[str, object], position: object) -> str:
    """Return the JSON text of a row's document.

    Args:
        row: The row's columns.
        position: The row, in words by `str`, for error messages.

    Raises:
        ConfigError: A column of bytes is no UTF-8.
    """
    try:
        text = json.dumps(row, ensure_ascii=False, default=_as_text)
    except UnicodeDecodeError:
        raise ConfigError(
            f"Expected UTF-8 text in {position}, got other bytes. Convert the column, or leave the row out."
        ) from None
    # Half characters, which only JSON in a column can hold, become escapes again: `document` refuses them by the row.
    return text.encode(errors="backslashreplace").decode()


def _as_text(value: object) -> str:
    """Return the text of a value that JSON has no form for: a text, where a table's column is one of bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)


def _rows(path: Path | str, start: int, stop: int | None) -> Iterable[Mapping[str, object]]:
    if isinstance(path, Path) and is_separated(path):
        return islice((row.fields for row in separated_rows(path)), start, stop)
    table = opened_table(path)
    table = table.select_columns([name for name in COLUMNS if name in table.column_names])
    if isinstance(path, Path):
        return islice(_table_rows(table), start, stop)
    # A downloaded data set has random access.
    return _table_rows(table.select(range(start, table.num_rows if stop is None else stop)))


def _table_rows(table: Any) -> Iterator[Mapping[str, object]]:
    for batch in table.with_format("arrow").iter(BATCH_SIZE):
        yield from batch_rows(batch)


def batch_rows(batch: Any) -> list[dict[str, object]]:
    """Return the rows of an Arrow table: JSON in columns is parsed, and fields of null are left out.

    `datasets` writes values whose fields differ from row to row, as the arguments of calls, as JSON.

    Raises:
        ValueError: A text under a column of JSON is not JSON. The message is one line.
    """
    rows = [_without_nulls(row) for row in batch.to_pylist()]
    # Types hold the names of the types in them; a field of that name costs time alone.
    if any(_JSON_TYPE in str(kind) for kind in batch.schema.types):
        rows = [_with_parsed_json(row, batch.schema) for row in rows]
    return rows


def _without_nulls(column: Any) -> Any:
    """Drop the fields of null, which stand for absent ones: in a table every row has every field.

    A message's content stays: an assistant's that calls a tool is null.
    """
    if isinstance(column, dict):
        return {name: _without_nulls(field) for name, field in column.items() if field is not None or name == "content"}
    return [_without_nulls(element) for element in column] if isinstance(column, list) else column


def _with_parsed_json(column: Any, kind: Any) -> Any:
    """Parse the texts in a column whose Arrow type is JSON; nulls in them are the writer's.

    Numbers are parsed by Python, as those of JSON lines: `datasets` reads 0.3 as 0.30000000000000004.
    """
    if getattr(kind, "extension_name", None) == _JSON_TYPE:
        return column if column is None else parse_json(column, is_line=True)
    if isinstance(column, dict):
        return {name: _with_parsed_json(field, kind.field(name).type) for name, field in column.items()}
    if isinstance(column, list):
        return [_with_parsed_json(element, getattr(kind, "value_type", None)) for element in column]
    return column


def _columns(path: Path | str) -> list[str]:
    with refused_table(path):
        if isinstance(path, Path) and is_separated(path):
            return separated_columns(path)
        return [*opened_table(path).column_names]


def opened_table(path: Path | str, *, is_streamed: bool = False) -> Any:
    """Open a table by `datasets`: a file or a data set to stream, else a data set that is downloaded.

    Raises:
        ConfigError: `datasets` is not installed, or the data set has no such name.
        Exception: The table cannot be opened; see `refused_table`.
    """
    datasets = _library(path)
    if isinstance(path, Path):
        builder = _BUILDERS[path.suffix.lower()]
        # Parquet is read in batches of the first row group's size otherwise, and that of a file without rows is 0.
        options = {"batch_size": BATCH_SIZE} if builder == "parquet" else {}
        files = glob.escape(str(path))
        return datasets.load_dataset(builder, data_files=files, split="train", streaming=True, **options)
    match = _HUB_NAME.fullmatch(path)
    if match is None:
        raise ConfigError(
            f"Expected {HUB}OWNER/NAME, {HUB}OWNER/NAME/CONFIG or one of them with :SPLIT, got {shown(path)}."
        )
    options = {"streaming": True} if is_streamed else {}
    return datasets.load_dataset(match[1], match[2], split=match[3] or "train", **options)


def _library(path: Path | str) -> Any:
    spec = importlib.util.find_spec("datasets")
    if spec is None or spec.origin is None:  # A folder of that name is no library.
        raise ConfigError(
            f"Expected datasets to be installed for {str(path)!r}, got none. Install it from a clone: uv pip install "
            "'./packages/lamella[data]'"
        )
    return import_module("datasets")


@contextmanager
def refused_table(path: Path | str) -> Iterator[None]:
    """Turn the errors of reading a table into refusals, and keep back the lines of libraries on them.

    Raises:
        ConfigError: Names the table and the reason.
    """
    with refused_rows(path), _silence():
        yield


@contextmanager
def refused_rows(path: Path | str) -> Iterator[None]:
    """Turn the errors of reading rows into refusals.

    Raises:
        ConfigError: Names the table and the reason.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # of datasets, pyarrow, the Hub's client, the network, and csv
        where = " from the Hub or its cache on this machine" if isinstance(path, str) else ""
        raise ConfigError(f"Expected to read {str(path)!r}{where}, got {in_short(error)}") from error


@contextmanager
def _silence() -> Iterator[None]:
    """Keep back the lines of libraries on errors that they raise too."""
    levels = {name: logging.getLogger(name).level for name in _LOGGERS}
    for name in levels:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
