"""Objects of a checkpoint's files: verified by checksum, and unpickled as plain data."""

import io
import pickle
import re
import struct
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from lamella_files._archives.metadata import DcpItem
from lamella_files._archives.torch_zip import FileSlice, Record, checksum, plain_data, records
from lamella_files._base.errors import CheckpointDamaged, CheckpointUntrusted
from lamella_files._base.pickles import PickleTooLarge, check_size
from lamella_files._base.small_files import reason

Expected = Callable[[DcpItem], int | None]
"""The CRC-32 recorded for an item; None if the writer recorded none (torch's archive may have one)."""


def read_object(directory: Path, name: str, item: DcpItem, expected: Expected | None, *, trust: bool) -> object:
    """Unpickle an object as plain data.

    Args:
        directory: The directory of the checkpoint.
        name: The name of the entry, for messages.
        item: The object's place in the files.
        expected: The checksums to verify; None verifies nothing.
        trust: Allow unpickling of types that torch does not know as plain data. **Unsafe: can execute code.**

    Raises:
        CheckpointDamaged: The object cannot be read, or differs from its checksum.
        CheckpointUntrusted: The object holds other types, without `trust`.
    """
    with _opened(directory / item.file, name, item) as content:
        if expected is not None:
            check_content(directory / item.file, name, item, content, expected)
        return unpickle(content, directory / item.file, name, trust=trust)


def check_object(directory: Path, name: str, item: DcpItem, expected: Expected) -> None:
    """Verify an object's bytes by checksum. Arguments and errors are those of `read_object`."""
    with _opened(directory / item.file, name, item) as content:
        check_content(directory / item.file, name, item, content, expected)


@contextmanager
def _opened(file: Path, name: str, item: DcpItem) -> Iterator[BinaryIO]:
    """An item as a file of its own."""
    try:
        with file.open("rb") as opened:
            yield cast(BinaryIO, io.BufferedReader(FileSlice(opened.fileno(), item.offset, item.length)))
    except OSError as error:
        raise damaged(file, name, error) from error


def unpickle(content: BinaryIO, file: Path, name: str, *, trust: bool) -> Any:
    """The value that `torch.save` wrote, without running code unless trusted.

    Compressed archives are refused: torch writes none, and a small one may expand beyond the memory.

    Raises:
        CheckpointDamaged: The content is no output of `torch.save`.
        CheckpointUntrusted: The content has types that torch does not know as plain data, without `trust`.
    """
    try:
        return plain_data(content)
    except Exception as error:  # Not final: torch knows more types, and gives a better message.
        is_refused = isinstance(error, zipfile.BadZipFile) and zipfile.is_zipfile(content)
        if is_refused or isinstance(error, PickleTooLarge):
            raise damaged(file, name, error) from error
    content.seek(0)
    try:
        value = torch.load(content, map_location="cpu", weights_only=not trust)
        check_size(value, content.seek(0, io.SEEK_END))
        return value
    except pickle.UnpicklingError as error:
        unknown = unsafe_types(content, error)
        if unknown and not trust:
            raise CheckpointUntrusted(str(file), unknown, name) from None
        raise damaged(file, name, error) from error
    except Exception as error:  # Unpickling garbage can raise any exception.
        raise damaged(file, name, error) from error


def unsafe_types(file: BinaryIO | Path, error: Exception) -> str:
    """The types in a `torch.save` file refused by torch's weights-only reader, as text; empty without any."""
    try:
        if not isinstance(file, Path):
            file.seek(0)
        names = torch.serialization.get_unsafe_globals_in_checkpoint(cast(Any, file))
    except Exception:  # noqa: BLE001  torch parses the refused file again, and no files from before torch 1.6.
        names = re.findall(r"nsupported (?:GLOBAL|global: GLOBAL) (\S+)", str(error))
    return ", ".join(sorted(names))


def check_content(file: Path, name: str, item: DcpItem, content: BinaryIO, expected: Expected) -> None:
    """Verify an item's bytes by the recorded checksum, or by the checksums of torch's archive.

    Raises:
        CheckpointDamaged: The bytes differ.
    """
    crc = expected(item)
    if crc is not None:
        check_equal(file, name, (item.length, crc), checksum(content, 0, item.length))
        return
    try:
        files = records(content)
    except (zipfile.BadZipFile, ValueError, struct.error) as error:
        raise damaged(file, name, error) from error
    for record in files.values():
        check_record(file, name, record, checksum(content, record.start, record.length)[1])


def damaged(file: Path, name: str, error: Exception) -> CheckpointDamaged:
    """An exception of a read as an error that names the file and the entry."""
    return CheckpointDamaged(str(file), f"{name!r}: {reason(error)}")


def check_equal(file: Path, name: str, expected: tuple[int, int], got: tuple[int, int]) -> None:
    """Refuse an entry whose number of bytes and CRC-32 are not the expected ones."""
    if got != expected:
        raise CheckpointDamaged(
            str(file),
            f"expected {expected[0]} bytes with the checksum {expected[1]:08x} for {name!r}, "
            f"got {got[0]} bytes with {got[1]:08x}",
        )


def check_record(file: Path, name: str, record: Record, crc: int) -> None:
    """Refuse a record whose CRC-32 is not the archive's, if the archive has one."""
    if record.crc is not None:
        check_equal(file, name, (record.length, record.crc), (record.length, crc))
