"""Checksums of everything that a checkpoint stores, taken while it is written.

A side file holds them, `lamella_checksums.json`: by file, `[offset, length, crc32]` of each stored item. The manifest
names it, so that one that was lost is missed; plain torch does not look at it. The metadata and the manifest are items
too, each as long as its file.
"""

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from lamella_checkpoint._base.errors import CheckpointDamaged
from lamella_checkpoint._base.manifest import MANIFEST_FILE, Manifest
from lamella_checkpoint._base.small_files import file_size, read_json, unreadable

CHECKSUMS_FILE: Final = "lamella_checksums.json"
_ALGORITHM: Final = "crc32"


class Span(NamedTuple):
    """Where an item lies in its file, in bytes."""

    offset: int
    length: int


@dataclass(frozen=True, kw_only=True)
class Checksums:
    """The CRC-32 of each stored item, by file and by place in it."""

    files: Mapping[str, Mapping[Span, int]]

    @classmethod
    def of(cls, directory: Path) -> "Checksums | None":
        """The checksums of a checkpoint; None where its writer kept none (plain torch, or lamella before it did).

        Raises:
            CheckpointDamaged: The manifest is unreadable, or it names them and they are absent or unreadable.

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
            return cls(files={of_file: _spans(items) for of_file, items in content["files"].items()})
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            if isinstance(error, CheckpointDamaged):
                raise
            raise unreadable(file, error) from error

    def expected(self, file: str, offset: int, length: int) -> int | None:
        """The checksum of one item; None for a span that was not written as one."""
        return self.files.get(file, {}).get(Span(offset, length))

    def check(self, path: Path, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Hold the bytes of one item against its checksum. Releases the GIL while it counts.

        Args:
            path: The item's file, whose name is looked up.
            offset: Where the item starts in it.
            data: All bytes of the item.

        Raises:
            CheckpointDamaged: They are not what was written, or no item was written there.
        """
        length = memoryview(data).nbytes
        expected = self.expected(path.name, offset, length)
        if expected is None:
            raise CheckpointDamaged(str(path), f"no checksum for the {length} bytes at {offset}")
        if (found := zlib.crc32(data)) != expected:
            raise CheckpointDamaged(
                str(path),
                f"expected checksum {expected:#010x} of the {length} bytes at {offset}, got {found:#010x}",
            )

    def write(self, directory: Path) -> None:
        """Write the side file, and wait until its contents are on the disk."""
        files = {file: [[*span, checksum] for span, checksum in spans.items()] for file, spans in self.files.items()}
        with (directory / CHECKSUMS_FILE).open("w", encoding="utf-8") as file:
            json.dump({"algorithm": _ALGORITHM, "files": files}, file, separators=(",", ":"))
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())


class ChecksumStream:
    """A file that is written from its start on, and the checksum of what has been written of the present item.

    Counting and writing both release the GIL: several files are written at once by threads.

    `error` is what the file system refused last: whoever serializes into the stream may have made another error of it.
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

    def flush(self) -> None:
        """As of any stream: whoever serializes into it calls this."""
        self._file.flush()

    def end_item(self) -> tuple[Span, int]:
        """Where the item lies that ends here, and its checksum; the next begins."""
        span, checksum = Span(self._start, self._end - self._start), self._checksum
        self._start, self._checksum = self._end, 0
        return span, checksum


def of_whole_file(path: Path) -> Mapping[Span, int]:
    """The checksum of a small file as one item, read back."""
    content = path.read_bytes()
    return {Span(0, len(content)): zlib.crc32(content)}


def _spans(items: Iterable[list[int]]) -> dict[Span, int]:
    return {Span(int(offset), int(length)): int(checksum) for offset, length, checksum in items}
