"""Rows of separated columns (CSV, TSV), by Python's `csv`, from the beginning of any row on.

The reader of `datasets` takes "1" for a number and "NA" for nothing, and leaves its files open.
"""

import codecs
import csv
import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from lamella._data.json_files import COLUMNS
from lamella._data.text_files import blocks, no_text, opened, suffix_of
from lamella._settings.options import ConfigError

_DELIMITERS: Final[Mapping[str, str]] = {".csv": ",", ".tsv": "\t"}
_LONGEST_FIELD: Final = (1 << 31) - 1


class SeparatedRow(NamedTuple):
    """A row of a file.

    Attributes:
        fields: The fields of documents' columns, by column.
        stop: Bytes from the beginning of the file to the end of the row.
    """

    fields: Mapping[str, str]
    stop: int


def is_separated(path: Path | str) -> bool:
    """True for the name of a file of separated columns."""
    return isinstance(path, Path) and suffix_of(path) in _DELIMITERS


def separated_columns(path: Path) -> list[str]:
    """Return the columns that the first row names.

    Raises:
        ConfigError: The file is no UTF-8. Names the line.
        csv.Error, OSError, EOFError, zlib.error: The row cannot be read.
    """
    with _counted_lines(path, 0) as lines:
        return next(_reader(path, lines), [])


def separated_rows(path: Path, start: int = 0, num_rows_before: int = 0) -> Iterator[SeparatedRow]:
    """Yield the rows below the first, which names the columns.

    Args:
        path: The file.
        start: `stop` of the row to go on after; 0 for the beginning.
        num_rows_before: The number of rows up to `start`, for error messages.

    Raises:
        ConfigError: The file is no UTF-8, or has two of a document's columns of one name. Names the line or the column.
        csv.Error, OSError, EOFError, zlib.error: A row cannot be read.
    """
    columns = separated_columns(path)
    repeated = next((name for name in COLUMNS if columns.count(name) > 1), None)
    if repeated is not None:  # Only the last of them would be read.
        raise ConfigError(
            f"Expected the column {repeated!r} of {str(path)!r} once, got it {columns.count(repeated)} times. Rename "
            "the columns that hold no documents."
        )
    with _counted_lines(path, start) as lines:
        reader = _reader(path, lines)
        if not start:
            next(reader, None)
        for number, row in enumerate(filter(None, reader), start=num_rows_before + 1):
            if len(row) > len(columns):
                raise csv.Error(f"{len(row)} fields in row {number}, under {len(columns)} columns")
            fields = {name: field for name, field in zip(columns, row, strict=False) if name in COLUMNS}
            yield SeparatedRow(fields, lines.stop)


def _reader(path: Path, lines: "_CountedLines") -> Iterator[list[str]]:
    csv.field_size_limit(_LONGEST_FIELD)  # of this process: the default refuses documents of 128 KiB
    return csv.reader(lines, delimiter=_DELIMITERS[suffix_of(path)], strict=True)


class _CountedLines:
    """The lines of a text, as `csv` reads them: one after another, as rows need them.

    Attributes:
        stop: Bytes from the beginning of the file to the end of the last line.
    """

    def __init__(self, path: Path, text: io.TextIOWrapper, start: int) -> None:
        self._path, self._text, self.stop = path, text, start

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        try:
            line = next(self._text)
        except UnicodeDecodeError as error:
            num_lines = sum(block.count(b"\n") for block in blocks(self._path, 0, self.stop))
            number = num_lines + error.object[: error.start].count(b"\n") + 1
            raise no_text(self._path, f"line {number} of {str(self._path)!r}") from None
        self.stop += len(line.encode())
        return line


@contextmanager
def _counted_lines(path: Path, start: int) -> Iterator[_CountedLines]:
    with opened(path) as file:
        if not start and file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8:
            start = len(codecs.BOM_UTF8)
        file.seek(start)
        with io.TextIOWrapper(file, encoding="utf-8", newline="") as text:
            yield _CountedLines(path, text, start)
