"""Tables that `datasets` streams, from any row on: Parquet and Arrow files, and data sets of the Hugging Face Hub.

A place in a table is a row of a row group. Only Parquet files have several groups, and only in versions of `datasets`
with `reshard`; rows of the group before the place are read, and not converted.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lamella._data.columns import document
from lamella._data.documents import FilePosition, PositionedParts, RecordPosition
from lamella._data.json_files import COLUMNS, Form
from lamella._data.tables import (
    BATCH_SIZE,
    HUB,
    batch_rows,
    has_documents,
    opened_table,
    record_text,
    refused_table,
    without_documents,
)


@dataclass(frozen=True)
class StreamedDataset:
    """A file of a table, or a data set of the Hub, opened once.

    Attributes:
        location: The file, or the data set's name with `hf:`.
    """

    location: Path | str

    @cached_property
    def table(self) -> Any:
        """The data set of `datasets`, with documents' columns alone where it tells its columns."""
        names = self._opened.column_names
        with refused_table(self.location):
            documents = [name for name in COLUMNS if name in (names or ())]
            return self._opened.select_columns(documents) if documents else self._opened

    def columns(self) -> list[str]:
        """Return the names of the columns. Effects: reads a row where the data set does not tell them."""
        with refused_table(self.location):
            return [*(self._opened.column_names or next(iter(self._opened), {}))]

    @cached_property
    def _opened(self) -> Any:
        with refused_table(self.location):
            return opened_table(self.location, is_streamed=True)


@dataclass(frozen=True, kw_only=True)
class StreamedTable:
    """A file of a table's rows.

    Attributes:
        name: Path relative to the searched folder, or the data set's name with the file's number.
        dataset: The file, or the data set that it is of.
        number: Number of the file in the data set, from 0 on.
        num_files: The number of the data set's files.
        nbytes: Bytes of the file; None where nobody tells.
        source: The name of the file's source; empty without names.
        form: How documents lie in the file: one a row.
    """

    name: str
    dataset: StreamedDataset
    number: int = 0
    num_files: int = 1
    nbytes: int | None = None
    source: str = ""
    form: Form = "table"

    @property
    def path(self) -> Path | str:
        """The file, in words for a data set of the Hub."""
        location = self.dataset.location
        return f"{location}, file {self.number + 1} of {self.num_files}" if isinstance(location, str) else location

    def num_records_before(self) -> int:
        """Return 0: records are counted from the beginning of the file."""
        return 0

    def documents(self, start: FilePosition | None = None) -> Iterator[PositionedParts]:
        """Yield the documents, from a place on.

        Raises:
            ConfigError: The table cannot be read, or a row holds no document. Names the row.
        """
        for row, after in self._rows(start or {}):
            position = RecordPosition(self, after["num_records"])
            yield PositionedParts(tuple(document(record_text(row, position), position)), after)

    def _rows(self, start: FilePosition) -> Iterator[tuple[Mapping[str, object], FilePosition]]:
        first_group, num_passed = start.get("group", 0), start.get("num_rows", 0)
        num_records = start.get("num_records", 0)
        with refused_table(self.path):
            groups = self._groups()
        for group in range(first_group, groups.num_shards):
            num_rows = 0
            for batch in self._batches(groups, group):
                with refused_table(self.path):
                    rows = batch_rows(batch.slice(max(0, num_passed - num_rows)))
                num_rows += batch.num_rows
                for number, row in enumerate(rows, start=num_rows - len(rows) + 1):
                    num_records += 1
                    fields = {name: field for name, field in row.items() if name in COLUMNS}
                    yield fields, {"group": group, "num_rows": number, "num_records": num_records}
            num_passed = 0

    def _groups(self) -> Any:
        table = self.dataset.table
        if self.num_files > 1:
            table = table.shard(num_shards=self.num_files, index=self.number)
        return table.reshard() if hasattr(table, "reshard") else table

    def _batches(self, groups: Any, number: int) -> Iterator[Any]:
        with refused_table(self.path):
            group = groups.shard(num_shards=groups.num_shards, index=number) if groups.num_shards > 1 else groups
            batches = group.with_format("arrow").iter(BATCH_SIZE)
        while True:
            with refused_table(self.path):  # not around the loop's body, in which others read tables
                batch = next(batches, None)
            if batch is None:
                return
            yield batch


def stream_table(name: str, path: Path, *, is_named: bool) -> StreamedTable | None:
    """Return a Parquet or Arrow file with documents' columns, else None.

    Raises:
        ConfigError: The table cannot be read, `datasets` is not installed, or a named table has no documents' columns.

    Effects: reads the table's schema.
    """
    dataset = StreamedDataset(path)
    if not has_documents(columns := dataset.columns()):
        if is_named:
            raise without_documents(path, columns)
        return None
    return StreamedTable(name=name, dataset=dataset, nbytes=path.stat().st_size)


def stream_hub(name: str) -> list[StreamedTable]:
    """Return the files of a data set, `hf:OWNER/NAME`, `hf:OWNER/NAME/CONFIG`, with `:SPLIT` for another than train.

    Raises:
        ConfigError: The conditions of `scan_hub`.

    Effects: asks the Hub for the list of files; reads a row where the data set does not tell its columns.
    """
    dataset = StreamedDataset(name)
    if not has_documents(columns := dataset.columns()):
        raise without_documents(name, columns)
    count = dataset.table.num_shards
    stem, width = name.removeprefix(HUB), len(str(count))
    return [
        StreamedTable(name=f"{stem}/{number:0{width}}", dataset=dataset, number=number, num_files=count)
        for number in range(count)
    ]
