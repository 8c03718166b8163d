"""A DCP checkpoint, opened by its path; any other format is refused, with the way out."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Final

from lamella_checkpoint._base.manifest import MANIFEST_FILE
from lamella_checkpoint._base.opened import Opened, native
from lamella_checkpoint._base.ranks import rank
from lamella_checkpoint._base.sections import LiveNames
from lamella_checkpoint._formats.dcp_read import StoredCheckpoint
from lamella_checkpoint._formats.extra_by_rank import extra_of_rank
from lamella_files import METADATA_FILE, FormatUnknown, find

_WAY_OUT: Final = "lamella-convert opens {}: pass lamella_convert.open_checkpoint(path) in place of the path."


def open_dcp(
    path: str | os.PathLike[str],
    *,
    trust: bool = False,
    verify: bool = True,
    live: LiveNames | None = None,
    compared_files: slice = slice(None),
) -> Opened:
    """Open a checkpoint written by `save` or plain torch DCP.

    Args:
        path: The checkpoint's directory.
        trust: Allow unpickling of types beyond plain data and torch's own. **Unsafe: can execute code.**
        verify: Verify checksums while reading, if there are any.
        live: Names of a live model: distinguish shared prefixes from names.
        compared_files: The files to compare with the metadata, for `StoredCheckpoint`.

    Raises:
        CheckpointDamaged: A file is absent or unreadable.
        CheckpointUntrusted: The metadata holds other types than torch's own.
        FileNotFoundError: `path` does not exist.
        FormatUnknown: `path` is not torch DCP.

    Effects: reads metadata and small files, and no tensor; no collective.
    """
    stored = StoredCheckpoint(dcp_directory(path), trust=trust, verify=verify, compared_files=compared_files)
    opened = opened_dcp(stored, live)
    if opened.manifest is not None:
        return opened
    return replace(opened, way_out=_WAY_OUT.format("checkpoints with Megatron's names"))


def opened_dcp(stored: StoredCheckpoint, live: LiveNames | None = None) -> Opened:
    """A checkpoint with loaded metadata, under native names, with this rank's `extra`."""
    if stored.manifest is None:
        return native(stored, stored.metadata.paths, live, identity=stored.save_id)
    extra = extra_of_rank(stored, stored.manifest, rank())
    return Opened(source=stored, extra=extra, manifest=stored.manifest, identity=stored.save_id)


def dcp_directory(path: str | os.PathLike[str]) -> Path:
    """The directory of a DCP checkpoint; after an interrupted replacement, the old checkpoint's present directory.

    Raises:
        FileNotFoundError: `path` does not exist.
        FormatUnknown: `path` is not torch DCP.
    """
    directory = find(Path(os.path.realpath(path)))
    if is_dcp(directory):
        return directory
    raise FormatUnknown(
        str(directory),
        "a directory without one" if directory.is_dir() else "a file",
        expected="a checkpoint of torch DCP",
        way_out=_WAY_OUT.format("other formats"),
    )


def is_dcp(path: Path) -> bool:
    """Whether a directory's files are DCP's; the metadata file may be absent."""
    if not path.is_dir():
        return False
    if any((path / name).exists() for name in (METADATA_FILE, MANIFEST_FILE)):
        return True  # Without a list of the files of thousands of ranks.
    return any(file.suffix == ".distcp" for file in path.iterdir())
