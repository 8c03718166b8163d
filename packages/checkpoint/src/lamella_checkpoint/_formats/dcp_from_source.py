"""A checkpoint of torch DCP, written from a source by a single process, piece by piece."""

import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import BinaryIO, Final, Self

import torch

from lamella_checkpoint._base.manifest import Manifest
from lamella_checkpoint._formats.checksums import ByteSpan, ChecksumStream
from lamella_checkpoint._formats.dcp_write import (
    complete_of_one_process,
    without_archive_checksums,
    write_metadata,
)
from lamella_checkpoint._formats.placed import Placed
from lamella_checkpoint._formats.small_archives import save
from lamella_files import FilledBox, Source, WriteOptions, objects_once, stream

_NO_ALIASES: Final[Mapping[str, str]] = {}
_DEFAULTS: Final = WriteOptions()


def write_dcp(
    source: Source,
    dtypes: Mapping[str, torch.dtype],
    directory: Path,
    *,
    aliases: Mapping[str, str] = _NO_ALIASES,
    manifest: Manifest | None = None,
    path_of: Callable[[str], tuple[str, ...]] | None = None,
    options: WriteOptions = _DEFAULTS,
) -> None:
    """Write tensors and all objects as a torch DCP checkpoint, large tensors in chunks.

    Args:
        source: The values, under the source's names.
        dtypes: The tensors to write, with their dtypes.
        directory: Exists, and is empty.
        aliases: Further names of tensors, stored at the same place.
        manifest: Makes the result a checkpoint of this package, with checksums. None for another writer's.
        path_of: Maps a name to the keys of torch's nested dicts; None for a section and the rest of the name. Not
            with `manifest`.
        options: File size, buffer and progress.

    Raises:
        CheckpointDamaged: The conditions of `Source.read`.
    """
    # Without a manifest, no other checksums exist: the archives' are kept.
    checksums = nullcontext() if manifest is None else without_archive_checksums()
    with _DcpFiles(directory, options.max_file_nbytes) as files, checksums:
        names = _names(dtypes, aliases)
        places = []
        for piece in stream(source, dtypes, options.buffer_nbytes):
            places.append(files.save_piece(piece, names[piece.name], source.tensors[piece.name].shape))
            options.on_bytes(piece.values.nbytes)
        places += [files.save_object(value, aliases_of_value) for aliases_of_value, value in objects_once(source)]
    if manifest is not None:
        complete_of_one_process(directory, places, manifest)
    elif path_of is not None:
        write_metadata(directory, places, path_of=path_of, written_by=())
    else:
        write_metadata(directory, places, written_by=())


class _DcpFiles:
    """Files `__0_<n>.distcp` in turn."""

    def __init__(self, directory: Path, max_nbytes: int) -> None:
        self._directory, self._max_nbytes = directory, max_nbytes
        self._open: BinaryIO | None = None
        self._stream: ChecksumStream | None = None
        self._num_files = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._close()

    def save_piece(self, piece: FilledBox, names: tuple[str, ...], shape: tuple[int, ...]) -> Placed:
        """Append a chunk of a tensor of some names and shape."""
        file, span, checksum = self._save(piece.values)
        return Placed(
            names=names, shape=shape, chunk=piece.chunk, dtype=piece.values.dtype,
            file=file, span=span, checksum=checksum,
        )  # fmt: skip

    def save_object(self, value: object, names: tuple[str, ...]) -> Placed:
        """Append an object of some names."""
        file, span, checksum = self._save(value)
        return Placed(names=names, shape=None, chunk=None, dtype=None, file=file, span=span, checksum=checksum)

    def _save(self, value: object) -> tuple[str, ByteSpan, int]:
        """Append an item. Returns the file's name, the place and the checksum."""
        if self._stream is None or self._stream.nbytes >= self._max_nbytes:
            self._close()
            self._open = (self._directory / f"__0_{self._num_files}.distcp").open("xb", buffering=1 << 20)
            self._stream = ChecksumStream(self._open)
            self._num_files += 1
        save(value, self._stream)
        return f"__0_{self._num_files - 1}.distcp", *self._stream.end_item()

    def _close(self) -> None:
        if self._open is not None:
            with self._open as file:
                file.flush()
                os.fsync(file.fileno())
            self._open = None


def _names(dtypes: Mapping[str, torch.dtype], aliases: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """All names of each written tensor."""
    names: dict[str, tuple[str, ...]] = {name: (name,) for name in dtypes}
    for alias, name in aliases.items():
        if name in names:
            names[name] = (*names[name], alias)
    return names
