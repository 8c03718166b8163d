"""Directories that appear whole or not at all.

Note [How a checkpoint appears]
    A save writes into a sibling of the target, `<target>.saving-<token>`, and rank 0 renames the sibling to the target
    when every rank has finished and every file is on the disk. An existing target is exchanged with the sibling in one
    step (`renameat2`): a reader finds the old checkpoint or the new. On file systems without the exchange (NFS, some
    network file systems), the old checkpoint is renamed to `<target>.replaced-<token>` first: between two
    renames the target does not exist, and `find` reads the renamed old checkpoint. The token is new for every save:
    a process left by a killed job cannot write into the successor's directory.

    A killed save leaves only paths with the three suffixes. The next save to the same target removes leftovers, and
    restores a checkpoint renamed aside without a successor. Every removal renames first: should the leftover's save
    still be running (two jobs with one path, a process left by a killed job), the save finds nothing to publish, rather
    than a part.
"""

import ctypes
import errno
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from lamella_files._base.errors import CheckpointDamaged

METADATA_FILE = ".metadata"
_LEFTOVER = re.compile(r"(?P<target>.+)\.(?P<kind>saving|replaced|removed)-[0-9a-f]{8}", re.DOTALL)
_AT_FDCWD = -100  # "relative to the working directory", from fcntl.h
_RENAME_EXCHANGE = 2  # from linux/fs.h


class Leftover(NamedTuple):
    """A path left beside the target by an interrupted save or removal."""

    path: Path
    target: str
    kind: str

    def clear(self) -> None:
        """Restore a checkpoint moved aside without a successor; remove any other leftover.

        Effects: none on a leftover cleared by another process.
        """
        target = self.path.with_name(self.target)
        with suppress(FileNotFoundError):
            if self.kind == "replaced" and not target.exists():
                self.path.rename(target)
            else:
                # Renamed first: the leftover may belong to a running save, which publishes a whole directory or none.
                _discard(_moved_aside(self.path, target))


def leftovers(parent: Path) -> Iterator[Leftover]:
    """The leftovers in `parent`, sorted by name."""
    for path in sorted(parent.iterdir()) if parent.is_dir() else []:
        if match := _LEFTOVER.fullmatch(path.name):
            yield Leftover(path, match["target"], match["kind"])


def stage(target: Path, *, check: Callable[[Path], None] | None = None) -> Path:
    """An empty directory to write in, which `publish` turns into `target`.

    Args:
        target: The directory to create.
        check: Raises if the present target must not be replaced; None is `check_replaceable`.

    Raises:
        FileExistsError: `target` is no replaceable checkpoint, and a save would delete the contents.
        ValueError: `target` has the name of a killed save's leftover, which the next save would remove.

    Effects: creates the parents of `target`; removes the leftovers of killed saves to `target`.
    """
    if leftover := _LEFTOVER.fullmatch(target.name):
        raise ValueError(
            f"Expected a path to save to, got {str(target)!r}, the name of a leftover of a killed save to "
            f"{leftover['target']!r}, which the next save there removes. Save to another name."
        )
    (check or check_replaceable)(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    recover(target)
    staged = staging_path(target, secrets.token_hex(4))
    staged.mkdir()
    return staged


@contextmanager
def naming_target(staged: Path, target: Path) -> Iterator[None]:
    """Name the target in an OSError of the system without a file: a failed write, as to a full disk, names none.

    Raises:
        FileNotFoundError: The condition of `check_staged`, in place of the same error of a staged file.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            check_staged(staged, target)
        if error.errno is not None and error.filename is None:  # Other errors would be printed without their text.
            error.filename = str(target)
        raise


def staging_path(target: Path, token: str) -> Path:
    """The directory of a save before publication; `token` is eight hexadecimal digits, new for each save."""
    return target.with_name(f"{target.name}.saving-{token}")


def save_id_of(staged: Path) -> str:
    """The save's identifier, from the name of the save's directory before publication."""
    return staged.name.rpartition(".")[2]


def recover(target: Path) -> None:
    """Restore the checkpoint moved aside by an interrupted save; remove all other leftovers."""
    for leftover in leftovers(target.parent):
        if leftover.target == target.name:
            leftover.clear()


def publish(staged: Path, target: Path) -> None:
    """Turn a staged directory into `target`; the previous target is removed once the new checkpoint is in place.

    Raises:
        FileNotFoundError: The condition of `check_staged`. The present `target` stays.
        OSError: The disk refused. The previous target is back in its place.

    Effects: waits until the directory's entries are on the disk.
    """
    check_staged(staged, target)
    sync(staged)
    previous: Path | None = None
    if not target.exists():
        staged.rename(target)
    elif swap(staged, target):
        previous = staged
    else:
        previous = _replace_in_two_steps(staged, target)
    try:
        sync(target.parent)
    except OSError:
        if previous == staged:
            swap(staged, target)
        else:
            target.rename(staged)
            if previous is not None:
                previous.rename(target)
        raise
    if previous is not None:
        _discard(previous)


def check_staged(staged: Path, target: Path) -> None:
    """Refuse to go on with a save whose directory is gone.

    Raises:
        FileNotFoundError: Another save to the same path took the staged directory for a leftover.
    """
    if not staged.exists():
        raise FileNotFoundError(
            errno.ENOENT,
            "Expected one save at a time to a path, got another save that removed this one's files",
            str(target),
        )


def remove(target: Path) -> None:
    """Remove a checkpoint whole: no reader sees a part."""
    _discard(_moved_aside(target, target))


def find(target: Path) -> Path:
    """The path of a checkpoint: `target`, or the old checkpoint renamed aside by an interrupted replacement.

    Raises:
        CheckpointDamaged: `target` is the directory of an unfinished save.
        FileNotFoundError: Neither exists.
    """
    if target.exists():
        _check_finished(target)
        return target
    paths = {leftover.kind: leftover.path for leftover in leftovers(target.parent) if leftover.target == target.name}
    if "replaced" in paths:
        return paths["replaced"]
    got = f"an unfinished save of it ({paths['saving'].name!r})" if "saving" in paths else "nothing"
    raise FileNotFoundError(errno.ENOENT, f"Expected a checkpoint, got {got}", str(target))


@contextmanager
def unless_gone(target: Path) -> Iterator[None]:
    """Report a checkpoint removed or replaced inside the block, instead of a reader's secondary result.

    Raises:
        FileNotFoundError: At the end of the block, the path is absent or leads to another directory or file. Retention
            removes old checkpoints during reads.
    """
    before = _identity(target)
    try:
        yield
    finally:
        after = _identity(target)
        if after != before or after is None:
            raise gone(target, "another checkpoint at its path" if after else "a removal")


def gone(target: Path, got: str = "a removal") -> FileNotFoundError:
    """The error of a checkpoint removed or replaced during a read."""
    return FileNotFoundError(errno.ENOENT, f"Expected the checkpoint to stay while it is read, got {got}", str(target))


def _identity(path: Path) -> tuple[int, int] | None:
    """A value that changes with a replacement; None for an absent path."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _check_finished(target: Path) -> None:
    match = _LEFTOVER.fullmatch(target.name)
    if match and match["kind"] == "saving" and target.is_dir():
        raise CheckpointDamaged(
            str(target), f"it is unfinished: its save is under way, or was interrupted. Open {match['target']!r}"
        )


def swap(one: Path, other: Path) -> bool:
    """Exchange two paths in one step; False if the system cannot.

    Source: renameat2(2), which Python does not wrap.
    """
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    error = ctypes.get_errno()
    if error in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(error, os.strerror(error), str(one), None, str(other))


def sync(directory: Path) -> None:
    """Wait until a directory's entries (not the files' contents) are on the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace_in_two_steps(staged: Path, target: Path) -> Path:
    """The new path of the previous target."""
    aside = _sibling(target, "replaced")
    target.rename(aside)
    try:
        staged.rename(target)
    except OSError:
        aside.rename(target)
        raise
    return aside


def _discard(path: Path) -> None:
    """Remove a directory, or a link to one; a resisting file (held open by an NFS client) is left for the next save."""
    if path.is_symlink():
        path.unlink()  # `rmtree` refuses links; the directory behind the link is its user's.
    else:
        shutil.rmtree(path, ignore_errors=True)


def _moved_aside(path: Path, target: Path) -> Path:
    doomed = _sibling(target, "removed")
    path.rename(doomed)
    return doomed


def _sibling(target: Path, kind: str) -> Path:
    return target.with_name(f"{target.name}.{kind}-{secrets.token_hex(4)}")


def check_replaceable(target: Path) -> None:
    """Refuse to replace anything but a checkpoint: a save deletes the replaced directory.

    Raises:
        FileExistsError: The target holds other files.
    """
    if not (target / METADATA_FILE).is_file():
        check_vacant(target, "a checkpoint, ")


def check_vacant(target: Path, besides: str = "") -> None:
    """Refuse any existing contents: people keep files of their own in directories of some formats.

    Raises:
        FileExistsError: The target exists and is no empty directory.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(
            errno.EEXIST,
            f"Expected {besides}an empty directory or nothing to replace, got other files. Save to a path of its own",
            str(target),
        )
