"""Files other than their names promise (pipes, sparse terabytes, links, endless JSON, flipped bits), and full disks."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_TERABYTES = 1 << 42


def make_pipe(file: Path) -> None:
    """Put a named pipe in the file's place: a reader waits for ever to open the pipe."""
    file.unlink(missing_ok=True)
    os.mkfifo(file)


def make_huge(file: Path) -> None:
    """Make the file four terabytes long, without blocks on the disk."""
    file.touch()
    os.truncate(file, _TERABYTES)


def make_link(file: Path) -> None:
    """Put a symbolic link to a file outside of the folder in the file's place."""
    elsewhere = file.parent.parent / "elsewhere"
    if file.exists():
        file.rename(elsewhere)
    else:
        elsewhere.write_text("{}")
    file.symlink_to(elsewhere)


def flip(file: Path, position: int) -> None:
    """Flip the lowest bit of a byte of the file."""
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)


def make_deep(file: Path) -> None:
    """Fill the file with brackets too deep for a recursive parser."""
    file.write_text("[" * 100_000)


@contextmanager
def no_file_larger_than(num_bytes: int | None) -> Iterator[None]:
    """A full disk, for this process and for processes started meanwhile; None limits nothing."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (before[0] if num_bytes is None else num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
