"""One run at a time in a folder.

Note [The lock dies with the run]
    The lock is an flock on an open file; the file's text only names the holder. Workers inherit the descriptor, so the
    lock lasts until the last worker has exited, even after a SIGKILL of the parent. The file is removed before the
    lock is released. A process that opened the old file meanwhile may lock a removed file: `_is_at` compares the
    descriptor with the path, and `_acquire` retries.
"""

import errno
import fcntl
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from lamella._settings.options import ConfigError

LOCK_FILE: Final = "lock"

_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)


@contextmanager
def locked(root: Path, option: str = "--run-dir") -> Iterator[tuple[int, ...]]:
    """Lock a run's folder; yield the descriptors of the lock, for workers to inherit.

    Args:
        root: The folder.
        option: The option that names the folder, for errors.

    Yields no descriptors when the folder cannot be written to; `prepare` then raises the error.

    Raises:
        ConfigError: Another run holds the lock. Names the process and host of the other run.

    Effects: creates the folder; removes the created folders again if still empty.
    """
    absent_folders = _absent(root)
    path = root / LOCK_FILE
    descriptor = _acquired(path, option)
    try:
        yield () if descriptor is None else (descriptor,)
    finally:
        if descriptor is not None:
            with suppress(OSError):  # In a folder with the sticky bit, only the file's owner may remove the file.
                path.unlink()
            os.close(descriptor)
        _remove(absent_folders)


@contextmanager
def locked_folder(folder: Path, option: str) -> Iterator[tuple[int, ...]]:
    """Lock a folder of checkpoints, which two runs may name by different options; yield as `locked`.

    The lock is on the folder itself: without a file, the folder stays as it is where the run is refused later.

    Args:
        folder: The folder.
        option: The option that names the folder, for errors.

    Raises:
        ConfigError: Another run holds the lock.

    Effects: creates the folder; removes the created folders again if still empty.
    """
    absent_folders = _absent(folder)
    descriptor = _acquired_folder(folder, option)
    try:
        yield () if descriptor is None else (descriptor,)
    finally:
        if descriptor is not None:
            os.close(descriptor)
        _remove(absent_folders)


def _absent(folder: Path) -> list[Path]:
    return [path for path in (folder, *folder.parents) if not os.path.exists(path)]


def _remove(folders: list[Path]) -> None:
    """Remove folders that are empty, the innermost first."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


def _acquired_folder(folder: Path, option: str) -> int | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None  # `prepare` refuses a folder that cannot be written to.
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigError(
            f"Expected no other run with its checkpoints in {str(folder)!r}, got one. Wait for its end, or pass "
            f"another {option}."
        ) from None
    except OSError:
        os.close(descriptor)  # A file system without locks of folders: `locked` has said so, or locks a file.
        return None
    return descriptor


def _acquired(path: Path, option: str) -> int | None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return _acquire(path, option)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            print(
                f"lamella: {str(path.parent)!r} cannot be locked ({error.strerror}). Start no second run in it.",
                file=sys.stderr,
            )
        elif os.path.lexists(path):  # Another user's run may hold a lock that this user cannot open.
            raise ConfigError(
                f"Expected to lock {str(path)!r}, got {error.strerror}. Another run may be using the folder: pass "
                f"another {option}, or remove the file if there is none."
            ) from error
        return None


def _acquire(path: Path, option: str) -> int:
    while True:
        descriptor = _open(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, path):
                _sign(descriptor)
                return descriptor
        except BlockingIOError:
            holder = os.pread(descriptor, 1000, 0).decode(errors="replace").strip() or "of another process"
            os.close(descriptor)
            raise ConfigError(
                f"Expected no other run in {str(path.parent)!r}, got one {holder}. Wait for its end, or pass another "
                f"{option}."
            ) from None
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)  # The file was removed by a run that has just ended: open the path again.


def _open(path: Path) -> int:
    """Open the lock file; only for reading where the file is another user's, which is enough to lock."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except PermissionError:
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _sign(descriptor: int) -> None:
    with suppress(OSError):  # A full disk: the lock holds without the text.
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"of process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
