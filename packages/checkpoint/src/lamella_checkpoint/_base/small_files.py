"""The small files of a checkpoint (what lists, counts and configures), read as what they should be and nothing else.

Whoever hands a checkpoint over chooses what lies under their names: a pipe that never ends, a link to a file of the
reader's, a sparse file of terabytes, JSON that is nested without end. Each is refused here by the file's name.
"""

import json
from collections.abc import Callable
from pathlib import Path
from stat import S_ISREG
from typing import Any, Final

from lamella_checkpoint._base.errors import CheckpointDamaged

MAX_NBYTES: Final = 4 << 30
"""More than the metadata of any checkpoint, and less than what a reader cannot hold."""

Pairs = Callable[[list[tuple[str, object]]], dict[str, object]]


def read_bytes(file: Path, at_most: int = MAX_NBYTES) -> bytes:
    """All of a file.

    Raises:
        CheckpointDamaged: It is absent, unreadable, no regular file, or longer than `at_most`.
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
        file: To read.
        pairs: Makes a dict of an object's keys and values; raises a ValueError where it does not like them.
    """
    try:
        return json.loads(read_text(file), object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointDamaged):
            raise
        raise unreadable(file, error) from error


def check_small(file: Path, at_most: int = MAX_NBYTES) -> None:
    """Refuse what `read_bytes` refuses, without reading it."""
    try:
        status = file.stat()
    except (OSError, ValueError) as error:
        raise unreadable(file, error) from error
    if not S_ISREG(status.st_mode):
        raise CheckpointDamaged(str(file), "not a regular file")
    if status.st_size > at_most:
        raise CheckpointDamaged(str(file), f"expected {at_most} bytes at most, got {status.st_size}")


def file_size(directory: Path, file: str) -> int:
    """The size of a file that lies in the directory itself, whatever links say, and is one.

    Raises:
        CheckpointDamaged: It is absent, elsewhere, or no regular file.
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
    """What could not be read, as an error that names the file."""
    return CheckpointDamaged(str(file), f"{type(error).__name__}: {error}")
