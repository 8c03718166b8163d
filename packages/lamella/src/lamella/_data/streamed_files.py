"""Files whose documents are read as the run goes, from any document on.

A place in a file of text, JSON or separated columns is a number of bytes to seek to. A compressed file is
decompressed up to the place.
"""

import codecs
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lamella._data.columns import document
from lamella._data.documents import EndOfText, FilePosition, PositionedParts, RecordPosition
from lamella._data.json_files import Form, elements, form_of
from lamella._data.separated import is_separated, separated_columns, separated_rows
from lamella._data.streamed_tables import StreamedDataset, StreamedTable, stream_table
from lamella._data.tables import (
    begins_with_documents,
    has_documents,
    is_table,
    record_text,
    refused_rows,
    without_documents,
)
from lamella._data.text_files import blocks, decoded, no_text, opened, pieces_of, refused_damage, scan_text, suffix_of

_MARK: Final = "\ufeff"


@dataclass(frozen=True, kw_only=True)
class StreamedFile:
    """A file of documents read as the run goes.

    Attributes:
        name: Path relative to the searched folder, independent of the machine.
        path: The file.
        nbytes: Bytes of the file.
        form: How documents lie in the file.
        source: The name of the file's source; empty without names.
    """

    name: str
    path: Path
    nbytes: int
    form: Form
    source: str = ""

    def num_records_before(self) -> int:
        """Return 0: records are counted from the beginning of the file."""
        return 0

    def documents(self, start: FilePosition | None = None) -> Iterator[PositionedParts]:
        """Yield the documents, from a place on; of a text the pieces, then the end.

        Raises:
            ConfigError: The file cannot be read, is no UTF-8, or a record holds no document. Names the record.
        """
        place = start or {"nbytes": 0, "num_records": 0}
        if self.form == "text":
            if not place["num_records"]:
                yield from self._pieces(place["nbytes"])
            return
        number = place["num_records"]
        for record, stop in self._records(place["nbytes"], number):
            number += 1
            if record.strip():
                parts = tuple(document(record, RecordPosition(self, number)))
                yield PositionedParts(parts, {"nbytes": stop, "num_records": number})

    def _pieces(self, start: int) -> Iterator[PositionedParts]:
        stop = start or self._num_mark_bytes()
        for piece in pieces_of(self._texts(stop)):
            stop += len(piece.encode())
            yield PositionedParts((piece,), {"nbytes": stop, "num_records": 0})
        yield PositionedParts((EndOfText(),), {"nbytes": stop, "num_records": 1})

    def _num_mark_bytes(self) -> int:
        """Count the bytes of the byte order mark; 0 without one."""
        with refused_damage(self.path), opened(self.path) as file:
            return len(codecs.BOM_UTF8) if file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8 else 0

    def _records(self, start: int, num_before: int) -> Iterator[tuple[str, int]]:
        """Yield the JSON texts of records, some blank, with the bytes up to the end of each."""
        if self.form == "lines":
            return self._lines(start, num_before)
        if self.form == "array":
            return ((element.text, start + element.stop) for element in elements(self._texts(start), self.path))
        return self._rows(start, num_before)

    def _rows(self, start: int, num_before: int) -> Iterator[tuple[str, int]]:
        with refused_rows(self.path):
            for number, row in enumerate(separated_rows(self.path, start, num_before), start=num_before + 1):
                yield record_text(row.fields, RecordPosition(self, number)), row.stop

    def _lines(self, start: int, num_before: int) -> Iterator[tuple[str, int]]:
        with refused_damage(self.path), opened(self.path) as file:
            file.seek(start)
            for number, line in enumerate(file, start=num_before + 1):
                start += len(line)
                try:
                    text = _checked_text(line.decode())
                except UnicodeDecodeError:
                    raise no_text(self.path, f"line {number} of {str(self.path)!r}") from None
                yield (text.removeprefix(_MARK) if number == 1 else text), start

    def _texts(self, start: int) -> Iterator[str]:
        with refused_damage(self.path):
            try:
                yield from map(_checked_text, decoded(self.path, start))
            except UnicodeDecodeError:
                scan_text(self.name, self.path, is_named=True)  # refuses the file by its line
                raise no_text(self.path, repr(str(self.path))) from None


def _checked_text(text: str) -> str:
    """Return a text; a NUL in it is refused like bytes that are no UTF-8, as in a prepared text."""
    if "\0" in text:
        raise UnicodeDecodeError("utf-8", b"\0", 0, 1, "NUL")
    return text


StreamedSource = StreamedFile | StreamedTable
"""A file of documents that is read as the run goes."""


def stream_file(name: str, path: Path, *, is_named: bool) -> StreamedSource | None:
    """Return a file with documents; None for a file without documents whose folder alone was named.

    Args:
        name: Path relative to the searched folder.
        path: The file.
        is_named: The user named the file itself, not the folder.

    Raises:
        ConfigError: The file cannot be read, or is named and has no documents.

    Effects: reads the beginning of the file. A file whose later bytes are no text is refused when read.
    """
    if is_table(path) and not is_separated(path):
        if (table := stream_table(name, path, is_named=is_named)) is not None:
            return table
    elif is_separated(path) and (is_named or begins_with_documents(path)):
        with refused_rows(path):
            columns = separated_columns(path)
        if not has_documents(columns):
            raise without_documents(path, columns)
        return StreamedFile(name=name, path=path, nbytes=path.stat().st_size, form="table")
    return _stream_text(name, path, is_named=is_named)


def _stream_text(name: str, path: Path, *, is_named: bool) -> StreamedFile | None:
    with refused_damage(path):
        content = blocks(path, 0)
        block = next(content, b"")
        nbytes = path.stat().st_size if block else 0  # The content of a compressed file may be empty.
        try:
            # The block may end within a character, unless the content ends there too.
            _checked_text(codecs.getincrementaldecoder("utf-8")().decode(block, final=not next(content, b"")))
            form = form_of(path, suffix_of(path), decoded(path), is_named=is_named)
        except UnicodeDecodeError:
            if is_named:
                raise no_text(path, repr(str(path))) from None
            return None
    return StreamedFile(name=name, path=path, nbytes=nbytes, form=form)


def to_json(files: Iterable[StreamedSource]) -> str:
    """Return the list of files as JSON, for the reading rank."""
    return json.dumps([_fields(file) for file in files], indent=1) + "\n"


def _fields(file: StreamedSource) -> dict[str, object]:
    fields: dict[str, object] = {"source": file.source, "name": file.name, "nbytes": file.nbytes}
    if isinstance(file, StreamedFile):
        return fields | {"path": str(file.path), "form": file.form}
    location = file.dataset.location
    kind = "data_set" if isinstance(location, str) else "table"
    return fields | {kind: str(location), "number": file.number, "num_files": file.num_files}


def from_json(text: str) -> list[StreamedSource]:
    """Return the files of a list made by `to_json`."""
    datasets: dict[str, StreamedDataset] = {}
    files: list[StreamedSource] = []
    for fields in json.loads(text):
        if "path" in fields:
            files.append(StreamedFile(**fields | {"path": Path(fields["path"])}))
            continue
        location = fields.pop("data_set", None) or Path(fields.pop("table"))
        dataset = datasets.setdefault(str(location), StreamedDataset(location))
        files.append(StreamedTable(dataset=dataset, **fields))
    return files


def documents_of(files: Iterable[StreamedSource]) -> Iterator[PositionedParts]:
    """Yield the documents of files in turn."""
    for file in files:
        yield from file.documents()
