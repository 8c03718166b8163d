"""Checksums of every stored item of a checkpoint, computed during the write.

The side file `lamella_checksums.json` holds `[offset, length, crc32]` of each stored item, by file. The manifest
names the side file, so that a lost one is detected; plain torch ignores the file. The metadata and the manifest are
items too, each as long as its file.
"""

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from lamella_checkpoint._base.manifest import MANIFEST_FILE, Manifest
from lamella_files import CheckpointDamaged, file_size, read_json, unreadable

CHECKSUMS_FILE: Final = "lamella_checksums.json"
_ALGORITHM: Final = "crc32"


class ByteSpan(NamedTuple):
    """An item's byte range in the file."""

    offset: int
    length: int


@dataclass(frozen=True, kw_only=True)
class Checksums:
    """The CRC-32 of each stored item, by file and by span."""

    files: Mapping[str, Mapping[ByteSpan, int]]

    @classmethod
    def of(cls, directory: Path) -> "Checksums | None":
        """The checksums of a checkpoint; None where the writer kept none (plain torch, or an early lamella).

        Raises:
            CheckpointDamaged: The manifest is unreadable, or names a side file that is absent or unreadable.

        Effects: reads two small files; no collective.
        """
        file = directory / CHECKSUMS_FILE
        is_named = (directory / MANIFEST_FILE).exists() and Manifest.read(directory).checksums is not None
        if not is_named and not file.exists():
            return None
        file_size(directory, CHECKSUMS_FILE)
        content = read_json(file)
        try:
            if content["algorithm"] != _ALGORITHM:
                raise CheckpointDamaged(str(file), f"expected {_ALGORITHM!r}, got {content['algorithm']!r}")
            return cls(files={file: _spans(items) for file, items in content["files"].items()})
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            if isinstance(error, CheckpointDamaged):
                raise
            raise unreadable(file, error) from error

    def expected(self, file: str, offset: int, length: int) -> int | None:
        """The checksum of one item; None for a span that was not written as one item."""
        return self.files.get(file, {}).get(ByteSpan(offset, length))

    def check(self, path: Path, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Compare the bytes of one item with the stored checksum. Releases the GIL during the computation.

        Args:
            path: The item's file; the name is the key.
            offset: The item's first byte in the file.
            data: All bytes of the item.

        Raises:
            CheckpointDamaged: The bytes differ from the written bytes, or no item was written at this span.
        """
        length = memoryview(data).nbytes
        expected = self.expected(path.name, offset, length)
        if expected is None:
            raise CheckpointDamaged(str(path), f"no checksum for the {length} bytes at {offset}")
        if (checksum := zlib.crc32(data)) != expected:
            raise CheckpointDamaged(
                str(path),
                f"expected checksum {expected:#010x} of the {length} bytes at {offset}, got {checksum:#010x}",
            )

    def write(self, directory: Path) -> None:
        """Write the side file, and wait until the contents are on the disk."""
        files = {file: [[*span, checksum] for span, checksum in spans.items()] for file, spans in self.files.items()}
        with (directory / CHECKSUMS_FILE).open("w", encoding="utf-8") as file:
            # Not `dump`, whose encoder is Python's, with a call of `write` for each number.
            file.write(json.dumps({"algorithm": _ALGORITHM, "files": files}, separators=(",", ":")) + "\n")
            file.flush()
            os.fsync(file.fileno())


class ChecksumStream:
    """A file written sequentially, with a running checksum of the current item.

    Checksum and write both release the GIL: threads write several files at once.

    `error` is the file system's last refusal: the serializer on top may have raised a different exception from it.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.error: OSError | None = None
        self._file = file
        self._start = self._end = self._checksum = 0

    def write(self, data: bytes | memoryview) -> int:
        """Append bytes to the file and to the item."""
        try:
            num_written = self._file.write(data)
        except OSError as error:
            self.error = error
            raise
        self._checksum = zlib.crc32(data, self._checksum)
        self._end += num_written
        return num_written

    @property
    def nbytes(self) -> int:
        """The number of written bytes; the file's `tell` would ask the system."""
        return self._end

    def flush(self) -> None:
        """The stream protocol's flush; the serializer on top calls it."""
        self._file.flush()

    def end_item(self) -> tuple[ByteSpan, int]:
        """End the current item and start the next; returns the ended item's span and checksum."""
        span, checksum = ByteSpan(self._start, self._end - self._start), self._checksum
        self._start, self._checksum = self._end, 0
        return span, checksum


def whole_file_checksum(path: Path) -> Mapping[ByteSpan, int]:
    """The checksum of a small file as one item, from a second read."""
    content = path.read_bytes()
    return {ByteSpan(0, len(content)): zlib.crc32(content)}


def _spans(items: Iterable[list[int]]) -> dict[ByteSpan, int]:
    return {ByteSpan(int(offset), int(length)): int(checksum) for offset, length, checksum in items}
