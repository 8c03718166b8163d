"""A checkpoint's small files (metadata, indices, configurations), read with checks of type and size.

A checkpoint's author controls the entries under these names: an endless pipe, a link to a file of the
reader's, a sparse file of terabytes, JSON nested without end. Each is refused here by the file's name.
"""

import json
from collections.abc import Callable
from pathlib import Path
from stat import S_ISREG
from typing import Any, Final

from lamella_files._base.errors import CheckpointDamaged

MAX_NBYTES: Final = 4 << 30
"""More than the metadata of any checkpoint, and small enough for a reader's memory."""

Pairs = Callable[[list[tuple[str, object]]], dict[str, object]]


def read_bytes(file: Path, at_most: int = MAX_NBYTES) -> bytes:
    """All of a file.

    Raises:
        CheckpointDamaged: The file is absent, unreadable, no regular file, or longer than `at_most`.
    """
    check_small(file, at_most)
    try:
        return file.read_bytes()
    except OSError as error:
        raise unreadable(file, error) from error


def read_text(file: Path, at_most: int = MAX_NBYTES) -> str:
    """As `read_bytes`, of text in UTF-8."""
    try:
        return read_bytes(file, at_most).decode()
    except UnicodeDecodeError as error:
        raise unreadable(file, error) from error


def read_json(file: Path, *, pairs: Pairs | None = None) -> Any:
    """As `read_text`, of JSON.

    Args:
        file: The file to read.
        pairs: Makes a dict of an object's keys and values; raises a ValueError for invalid pairs.
    """
    try:
        return json.loads(read_text(file), object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointDamaged):
            raise
        raise unreadable(file, error) from error


def check_small(file: Path, at_most: int = MAX_NBYTES) -> None:
    """Refuse the files that `read_bytes` refuses, without reading."""
    try:
        status = file.stat()
    except (OSError, ValueError) as error:
        raise unreadable(file, error) from error
    if not S_ISREG(status.st_mode):
        raise CheckpointDamaged(str(file), "not a regular file")
    if status.st_size > at_most:
        raise CheckpointDamaged(str(file), f"expected {at_most} bytes at most, got {status.st_size}")


def file_size(directory: Path, file: str) -> int:
    """The size of a regular file directly in the directory, after resolving links.

    Raises:
        CheckpointDamaged: The file is absent, elsewhere, or no regular file.
    """
    path = directory / file
    try:
        real, status = path.resolve(strict=True), path.stat()
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    if real.parent != directory.resolve():
        raise CheckpointDamaged(str(path), f"it leads outside, to {str(real)!r}")
    if not S_ISREG(status.st_mode):
        raise CheckpointDamaged(str(path), "not a regular file")
    return status.st_size


def unreadable(file: Path, error: Exception) -> CheckpointDamaged:
    """An exception of a read as an error that names the file."""
    return CheckpointDamaged(str(file), reason(error))


def reason(error: Exception) -> str:
    """An exception of a read as text, without torch's advice to run the code of a file that its reader refuses."""
    text = str(error).rpartition("WeightsUnpickler error:")[2].partition("\n\nCheck the documentation of torch.load")[0]
    return f"{type(error).__name__}: {text.strip()}"
