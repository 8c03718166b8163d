"""Writer of torch DCP's file format: each rank its files, and one rank the metadata that completes the checkpoint.

Note [Names that share data]
    DCP's metadata maps a name to chunks, and each chunk to a place in a file. Two names may map to one place.
    A tied tensor is written once and found under each of its names, and an option that all parameters of a group
    share is written once and found under each parameter's name, by plain DCP too.

Note [Two checksums]
    An archive of `torch.save` holds a CRC-32 of its data, which no torch reader compares and which costs more than
    writing the data. The CRC-32 is omitted; a checksum of the whole item is computed on the way to the file. Without a
    manifest, which names the file of checksums, the archives' are the only ones, and are kept.

Note [Metadata that share parts]
    The metadata name shape, dtype and place of each tensor by small Python objects. Pickle writes an object once, and
    refers to it at its further occurrences, so equal sizes and properties are one object: the metadata of 300,000
    tensors of one shape take 4.0 s instead of 6.1, and 72 MB instead of 84.
"""

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import ClassVar, Final

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from lamella_checkpoint._base.manifest import MANIFEST_FILE, Manifest
from lamella_checkpoint._formats.checksums import (
    CHECKSUMS_FILE,
    ByteSpan,
    Checksums,
    ChecksumStream,
    whole_file_checksum,
)
from lamella_checkpoint._formats.extra_by_rank import without_equal_values
from lamella_checkpoint._formats.placed import Placed
from lamella_checkpoint._formats.small_archives import save
from lamella_checkpoint._state.shares import Encoded, Item
from lamella_files import METADATA_FILE, WRITTEN_BY

_NUM_THREADS: Final = 4
_SPLIT_NBYTES: Final = 64 << 20  # From about this size on, a second file with a thread pays.


def write_items(directory: Path, rank: int, items: Sequence[Item], *, archive_checksums: bool = False) -> list[Placed]:
    """Write a rank's items into the rank's own files, `__<rank>_<n>.distcp`.

    Args:
        directory: Exists, and holds no file of this rank yet.
        rank: Distinguishes this rank's files.
        items: The items, on any device.
        archive_checksums: Keep torch's checksums, for a checkpoint without a manifest: Note [Two checksums].

    Raises:
        OSError: The file system refused.

    Effects: no collective; one file, or for more than 64 MiB up to four, a thread each; copies accelerator tensors
        to the host item by item (from CUDA into pinned memory), after a host sync with the current stream;
        waits until the files' contents are on the disk.
    """
    _await_accelerator(items)
    bins = _bins(items)
    with nullcontext() if archive_checksums else without_archive_checksums(), ThreadPoolExecutor(len(bins)) as pool:
        files = [directory / f"__{rank}_{index}.distcp" for index in range(len(bins))]
        return [placed for file_items in pool.map(_write_file, files, bins) for placed in file_items]


def complete(
    directory: Path, parts: Sequence[Sequence[Placed]], manifest: Manifest, save_id: str | None = None
) -> None:
    """Complete a checkpoint from the files of all ranks: the metadata, the manifest, the checksums.

    Args:
        directory: Holds the files.
        parts: Each rank's placed items. If several ranks wrote a box, the first rank's counts.
        manifest: Without checksums.
        save_id: The name of the save, which the metadata hold; None for a save without a name.

    Raises:
        ValueError: Ranks wrote different data for one box, or together not the whole of a tensor.

    Effects: waits until the three files' contents are on the disk.
    """
    needed, manifest = without_equal_values(parts, manifest)
    write_metadata(directory, _first_of_each(needed), save_id=save_id)
    _write_beside(directory, manifest, (placed for part in parts for placed in part))


def complete_of_one_process(directory: Path, items: Sequence[Placed], manifest: Manifest) -> None:
    """Complete a checkpoint from the files of one process, with the values of `extra` by rank as they are.

    Effects: as `complete`.
    """
    write_metadata(directory, _first_of_each([items]))
    _write_beside(directory, manifest, items)


def _write_beside(directory: Path, manifest: Manifest, items: Iterable[Placed]) -> None:
    """Write the manifest and the checksums."""
    replace(manifest, checksums=CHECKSUMS_FILE).write(directory)
    files: dict[str, dict[ByteSpan, int]] = {}
    for placed in items:
        files.setdefault(placed.file, {})[placed.span] = placed.checksum
    side_files: dict[str, Mapping[ByteSpan, int]] = {
        name: whole_file_checksum(directory / name) for name in (METADATA_FILE, MANIFEST_FILE)
    }
    Checksums(files={**files, **side_files}).write(directory)


@dataclass(frozen=True)
class WithManifest:
    """The form of lamella's own checkpoints. Pickles."""

    manifest: Manifest
    archive_checksums: ClassVar[bool] = False

    def complete(self, directory: Path, parts: Sequence[Sequence[Placed]], save_id: str) -> None:
        """As the function `complete`."""
        complete(directory, parts, self.manifest, save_id)


@dataclass(frozen=True, kw_only=True)
class WithoutManifest:
    """The form of a checkpoint in another program's names. Pickles.

    Attributes:
        path_of: Maps a name to the keys of torch's nested dicts. A function of a module.
        files: Contents of further files, by name.
    """

    path_of: Callable[[str], tuple[str, ...]]
    files: Mapping[str, bytes] = field(default_factory=dict)
    archive_checksums: ClassVar[bool] = True

    def complete(self, directory: Path, parts: Sequence[Sequence[Placed]], save_id: str) -> None:
        """Complete a checkpoint from the files of all ranks: the metadata and the further files.

        Args:
            directory: Holds the files.
            parts: Each rank's placed items. If several ranks wrote a box, the first rank's counts.
            save_id: The name of the save, which the metadata hold.

        Raises:
            ValueError: The conditions of `complete`.

        Effects: waits until the files' contents are on the disk.
        """
        for name, content in self.files.items():
            with (directory / name).open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        write_metadata(directory, _first_of_each(parts), path_of=self.path_of, written_by=(), save_id=save_id)


Form = WithManifest | WithoutManifest
"""How a checkpoint is completed once every rank has written its items."""


# -- a rank's files ---------------------------------------------------------------------------------------------------


def _bins(items: Sequence[Item]) -> list[list[Item]]:
    """The items of each file, balanced by bytes."""
    num_files = max(1, min(_NUM_THREADS, sum(item.nbytes for item in items) // _SPLIT_NBYTES))
    bins: list[list[Item]] = [[] for _ in range(num_files)]
    loads = [0] * num_files
    for item in sorted(items, key=lambda item: -item.nbytes):
        index = loads.index(min(loads))
        bins[index].append(item)
        loads[index] += item.nbytes
    return bins


def _write_file(path: Path, items: Sequence[Item]) -> list[Placed]:
    placed = []
    with path.open("xb", buffering=1 << 20) as file:
        stream = ChecksumStream(file)
        for item in items:
            value = _on_host(item.value) if isinstance(item.value, torch.Tensor) else item.value
            if isinstance(value, Encoded):
                stream.write(value.content)
            else:
                save(value, stream)
            span, checksum = stream.end_item()
            dtype = value.dtype if isinstance(value, torch.Tensor) else None
            placed.append(
                Placed(
                    names=item.names, shape=item.shape, chunk=item.chunk, dtype=dtype,
                    file=path.name, span=span, checksum=checksum,
                )
            )  # fmt: skip
        file.flush()
        os.fsync(file.fileno())
    return placed


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the host, over a storage without other data: an archive includes the whole storage.

    A host tensor is not copied: the result is valid for as long as `tensor` lives. CUDA tensors are copied through
    pinned memory, which torch caches for the next item: fresh pages would take longer than the bus and the file.
    """
    if tensor.is_cuda and type(tensor) is torch.Tensor:
        # Blocking: `torch.save` reads the memory at once.
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor.detach())
    # Resolved first: memory of a lazily conjugated or negated view lacks the conjugation.
    host = tensor.cpu().resolve_conj().resolve_neg().contiguous()
    if type(host) is not torch.Tensor or host.untyped_storage().nbytes() == host.nbytes:
        return host
    if not host.nbytes:
        return host.clone()
    # Not `clone`: a view over the same bytes avoids a copy as large as the tensor. Aliases `tensor`'s memory.
    memory = (ctypes.c_ubyte * host.nbytes).from_address(host.data_ptr())
    return torch.frombuffer(memory, dtype=torch.uint8).view(host.dtype).view(host.shape)


def _await_accelerator(items: Sequence[Item]) -> None:
    """Synchronize with the current streams: the copying threads have other current streams, with no order to these."""
    devices = {item.value.device for item in items if isinstance(item.value, torch.Tensor)}
    for device in devices:
        if device.type not in ("cpu", "meta"):
            torch.accelerator.current_stream(device).synchronize()


@contextmanager
def without_archive_checksums() -> Iterator[None]:
    """Disable torch's archive checksums: Note [Two checksums]."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


# -- the metadata -----------------------------------------------------------------------------------------------------


def _first_of_each(parts: Sequence[Sequence[Placed]]) -> list[Placed]:
    """Each box of each name once; raises if any is missing.

    Ranks may know one value under different names: options are found under the names of the rank's own experts.
    """
    firsts: dict[tuple[str, tuple[int, ...]], tuple[int, Placed]] = {}
    places = []
    for rank, part in enumerate(parts):
        for placed in part:
            names = []
            for name in placed.names:
                key = (name, placed.chunk.offsets if placed.chunk else ())
                first_rank, first = firsts.setdefault(key, (rank, placed))
                if first is placed:
                    names.append(name)
                elif placed.chunk is not None and _data_of(placed) != _data_of(first):
                    raise ValueError(
                        f"Expected ranks {first_rank} and {rank} to hold the same data at {list(key[1])} of {name!r}, "
                        f"got {_text(first)} and {_text(placed)}. If they are parts of one tensor (tensor "
                        f"parallelism), make it a DTensor on a mesh that has them all."
                    )
            if names:
                places.append(placed if len(names) == len(placed.names) else replace(placed, names=tuple(names)))
    _check_whole(places)
    return places


def _data_of(placed: Placed) -> tuple[object, ...]:
    return placed.shape, placed.chunk, placed.dtype, placed.span.length, placed.checksum


def _text(placed: Placed) -> str:
    sizes = placed.chunk and list(placed.chunk.sizes)
    return f"{sizes} of {list(placed.shape or ())} in {placed.dtype} with checksum {placed.checksum:#010x}"


def _check_whole(places: Sequence[Placed]) -> None:
    num_held: dict[str, int] = {}
    wholes: dict[str, Placed] = {}
    for placed in places:
        for name in placed.names if placed.chunk is not None else ():
            assert placed.chunk is not None
            first = wholes.setdefault(name, placed)
            if (first.shape, first.dtype) != (placed.shape, placed.dtype):
                raise ValueError(f"Expected {name!r} to be alike on all ranks, got {_text(first)} and {_text(placed)}.")
            num_held[name] = num_held.get(name, 0) + placed.chunk.numel
    for name, first in wholes.items():
        if num_held[name] != (numel := prod(first.shape or ())):
            raise ValueError(f"Expected the ranks to hold the {numel} elements of {name!r}, got {num_held[name]}.")


def _section_and_name(name: str) -> tuple[str, ...]:
    section, _, suffix = name.partition(".")
    return section, suffix


def write_metadata(
    directory: Path,
    places: Sequence[Placed],
    *,
    path_of: Callable[[str], tuple[str, ...]] = _section_and_name,
    written_by: Sequence[str] = (WRITTEN_BY,),
    save_id: str | None = None,
) -> None:
    """Write `.metadata`.

    Args:
        directory: Holds the files.
        places: Each box of each name once.
        path_of: Maps a name to the keys of torch's nested dicts.
        written_by: The writer's mark; empty for a checkpoint without a manifest.
        save_id: Differs between two saves; None makes one.

    Effects: waits until the file's contents are on the disk.
    """
    tables: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    results: list[WriteResult] = []
    paths: dict[str, tuple[str, ...]] = {}
    size, properties = cache(torch.Size), cache(_properties)  # Note [Metadata that share parts]
    for placed in places:
        for name in placed.names:
            paths[name] = path_of(name)
            if name not in tables and placed.chunk is not None and placed.dtype is not None:
                tables[name] = TensorStorageMetadata(properties(placed.dtype), size(placed.shape or ()), [])
            table = tables.setdefault(name, BytesStorageMetadata())
            index = MetadataIndex(name)
            if placed.chunk is not None and isinstance(table, TensorStorageMetadata):
                offsets, sizes = size(placed.chunk.offsets), size(placed.chunk.sizes)
                index = MetadataIndex(name, offsets, len(table.chunks))
                table.chunks.append(ChunkStorageMetadata(offsets, sizes))
            place = _StorageInfo(placed.file, placed.span.offset, placed.span.length)
            results.append(WriteResult(index=index, size_in_bytes=placed.span.length, storage_data=place))
    writer = _MetadataWriter(directory, written_by, save_id)
    writer.set_up_storage_writer(True, rank=0)
    writer.finish(Metadata(state_dict_metadata=tables, planner_data=paths), [results])


def _properties(dtype: torch.dtype) -> TensorProperties:
    return TensorProperties(dtype=dtype)


class _MetadataWriter(FileSystemWriter):
    """DCP's writer, used only for its final step."""

    def __init__(self, directory: Path, written_by: Sequence[str], save_id: str | None) -> None:
        super().__init__(directory, sync_files=True)
        self._written_by = list(written_by)
        self._save_id = save_id

    def storage_meta(self) -> StorageMeta:
        # No checkpoint_id: it would be the staging directory's path, which no longer exists after publication.
        return StorageMeta(save_id=self._save_id or self.save_id, modules=self._written_by)
