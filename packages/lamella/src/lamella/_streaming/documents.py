"""The endless stream of a source's documents: epoch after epoch, the files in another order in each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from lamella._data.documents import FilePosition, PositionedParts
from lamella._data.order import shuffled
from lamella._data.streamed_files import StreamedSource


class StreamPosition(NamedTuple):
    """A place between two documents of a stream, or between two pieces of a text.

    Attributes:
        epoch: The epoch, from 0 on.
        num_files: The files of the epoch read to their end.
        in_file: The place in the next file; None for the beginning.
    """

    epoch: int = 0
    num_files: int = 0
    in_file: FilePosition | None = None

    @property
    def begins_document(self) -> bool:
        """False between two pieces of a text: the one record of its file is not read to the end."""
        return self.in_file is None or self.in_file["num_records"] > 0


@dataclass(kw_only=True)
class DocumentStream:
    """The documents of a source.

    Attributes:
        files: The files.
        seed: The seed of the order of the files.
    """

    files: Sequence[StreamedSource]
    seed: int

    def __post_init__(self) -> None:
        self._reader: Iterator[tuple[PositionedParts, StreamPosition]] = iter(())
        self._position: StreamPosition | None = None

    def documents(self, start: StreamPosition) -> Iterator[tuple[PositionedParts, StreamPosition]]:
        """Yield the documents from a place up to the end of the epoch, each with the place behind it.

        Effects: opens files at the place, unless the last call stopped at the place: the files are still open.
        """
        # Opened at every window, a compressed file would be decompressed from the beginning as often.
        if self._position != start:
            self._reader = self._documents(start)
        self._position = None  # After an error the reader yields nothing more, as if the epoch had ended.
        for document, position in self._reader:
            self._position = position
            yield document, position
            self._position = None

    def _documents(self, start: StreamPosition) -> Iterator[tuple[PositionedParts, StreamPosition]]:
        count = len(self.files)
        order = shuffled(torch.arange(count), count, self.seed, start.epoch).tolist()
        for number in range(start.num_files, count):
            in_file = start.in_file if number == start.num_files else None
            for document in self.files[order[number]].documents(in_file):
                yield document, StreamPosition(start.epoch, number, document.after)

    def described(self, position: StreamPosition) -> str:
        """Return the file read at a place, in words."""
        count = len(self.files)
        number = torch.tensor([min(position.num_files, count - 1)])
        return repr(str(self.files[int(shuffled(number, count, self.seed, position.epoch))].path))
