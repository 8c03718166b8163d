"""torch DCP's file format, written: each rank its files, and one rank the metadata that makes a checkpoint of them.

Note [Names that share data]
    DCP's metadata maps a name to its chunks, and each chunk to a place in a file. Nothing says that two names cannot
    map to one place. A tied tensor is written once and found under each of its names, and an option that all
    parameters of a group share is written once and found under each parameter's name, by plain DCP too.

Note [Two checksums]
    An archive of `torch.save` holds a CRC-32 of its data, which no reader of torch compares and which costs more than
    writing the data does. It is left out, and one of the whole item is taken on the way to the file.
"""

import ctypes
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import BinaryIO, Final, cast

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

from lamella_checkpoint._base.directories import METADATA_FILE
from lamella_checkpoint._base.manifest import MANIFEST_FILE, Manifest
from lamella_checkpoint._formats.checksums import CHECKSUMS_FILE, Checksums, ChecksumStream, Span, of_whole_file
from lamella_checkpoint._formats.metadata import WRITTEN_BY
from lamella_checkpoint._state.shares import Item
from lamella_layout import Chunk

_NUM_THREADS: Final = 4
_SPLIT_NBYTES: Final = 64 << 20  # A second file, and a thread for it, pays from about here on.


@dataclass(frozen=True, kw_only=True)
class Placed:
    """An item that lies in a file: all that the metadata says of it. Pickles small."""

    names: tuple[str, ...]
    shape: tuple[int, ...] | None
    chunk: Chunk | None
    dtype: torch.dtype | None
    file: str
    span: Span
    checksum: int


def write_items(directory: Path, rank: int, items: Sequence[Item]) -> list[Placed]:
    """Write a rank's items into files of its own, `__<rank>_<n>.distcp`.

    Args:
        directory: Exists, and holds no file of this rank yet.
        rank: What tells this rank's files from others'.
        items: What to write, on any device.

    Raises:
        OSError: The file system refused.

    Effects: no collective; one file, or for more than 64 MiB up to four, a thread each; copies what is on an
        accelerator to the host item by item (from CUDA into pinned memory), once its current stream has come so far;
        waits until the files' contents are on the disk.
    """
    _await_accelerator(items)
    bins = _bins(items)
    with without_archive_checksums(), ThreadPoolExecutor(len(bins)) as pool:
        files = [directory / f"__{rank}_{index}.distcp" for index in range(len(bins))]
        return [placed for of_file in pool.map(_write_file, files, bins) for placed in of_file]


def complete(directory: Path, parts: Sequence[Sequence[Placed]], manifest: Manifest) -> None:
    """Make a checkpoint of the files that all ranks have written: the metadata, the manifest, the checksums.

    Args:
        directory: Holds the files.
        parts: What each rank has placed in them. Of a box that several have written, the first rank's counts.
        manifest: Without checksums.

    Raises:
        ValueError: Ranks wrote different data for one box, or together not the whole of a tensor.

    Effects: waits until the three files' contents are on the disk.
    """
    places = _first_of_each(parts)
    write_metadata(directory, places)
    replace(manifest, checksums=CHECKSUMS_FILE).write(directory)
    files: dict[str, dict[Span, int]] = {}
    for placed in (placed for part in parts for placed in part):
        files.setdefault(placed.file, {})[placed.span] = placed.checksum
    own: dict[str, Mapping[Span, int]] = {
        name: of_whole_file(directory / name) for name in (METADATA_FILE, MANIFEST_FILE)
    }
    Checksums(files={**files, **own}).write(directory)


# -- a rank's files ---------------------------------------------------------------------------------------------------


def _bins(items: Sequence[Item]) -> list[list[Item]]:
    """The items of each file, of about equally many bytes."""
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
            try:
                torch.save(value, cast(BinaryIO, stream))  # It writes and flushes, no more.
            except RuntimeError as error:
                raise stream.error or error from error
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
    """The tensor on the host, over a storage that holds nothing else: an archive takes all of a storage.

    What is there already is not copied: the result is good for as long as `tensor` lives. What is on CUDA goes through
    pinned memory, which torch keeps for the next item: fresh pages would take longer than the bus and the file.
    """
    if tensor.is_cuda and type(tensor) is torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor.detach())
    host = tensor.cpu().contiguous()
    if type(host) is not torch.Tensor or host.untyped_storage().nbytes() == host.nbytes:
        return host
    if not host.nbytes:
        return host.clone()
    memory = (ctypes.c_ubyte * host.nbytes).from_address(host.data_ptr())
    return torch.frombuffer(memory, dtype=torch.uint8).view(host.dtype).view(host.shape)


def _await_accelerator(items: Sequence[Item]) -> None:
    """Let the current stream come to an end: the threads that copy have other current streams."""
    devices = {item.value.device for item in items if isinstance(item.value, torch.Tensor)}
    for device in devices:
        if device.type not in ("cpu", "meta"):
            torch.accelerator.current_stream(device).synchronize()


@contextmanager
def without_archive_checksums() -> Iterator[None]:
    """Note [Two checksums]."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


# -- the metadata -----------------------------------------------------------------------------------------------------


def _first_of_each(parts: Sequence[Sequence[Placed]]) -> list[Placed]:
    """Each box of each name once, and nothing missing.

    Ranks may know one value under different names: options are found under those of the rank's own experts.
    """
    firsts: dict[tuple[str, tuple[int, ...]], tuple[int, Placed]] = {}
    places = []
    for rank, part in enumerate(parts):
        for placed in part:
            names = []
            for name in placed.names:
                key = (name, placed.chunk.offsets if placed.chunk else ())
                first_rank, first = firsts.setdefault(key, (rank, placed))
                if placed.chunk is not None and _data_of(placed) != _data_of(first):
                    raise ValueError(
                        f"Expected ranks {first_rank} and {rank} to hold the same data at {list(key[1])} of {name!r}, "
                        f"got {_text(first)} and {_text(placed)}. If they are parts of one tensor (tensor "
                        f"parallelism), make it a DTensor on a mesh that has them all."
                    )
                if first is placed:
                    names.append(name)
            if names:
                places.append(replace(placed, names=tuple(names)))
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
            whole = wholes.setdefault(name, placed)
            if (whole.shape, whole.dtype) != (placed.shape, placed.dtype):
                raise ValueError(f"Expected {name!r} to be alike on all ranks, got {_text(whole)} and {_text(placed)}.")
            num_held[name] = num_held.get(name, 0) + placed.chunk.numel
    for name, whole in wholes.items():
        if num_held[name] != (numel := prod(whole.shape or ())):
            raise ValueError(f"Expected the ranks to hold the {numel} elements of {name!r}, got {num_held[name]}.")


def _section_and_name(name: str) -> tuple[str, ...]:
    section, _, rest = name.partition(".")
    return section, rest


def write_metadata(
    directory: Path,
    places: Sequence[Placed],
    *,
    path_of: Callable[[str], tuple[str, ...]] = _section_and_name,
    written_by: Sequence[str] = (WRITTEN_BY,),
) -> None:
    """Write `.metadata`.

    Args:
        directory: Holds the files.
        places: Each box of each name once.
        path_of: The keys of the nested dicts that torch makes of a name.
        written_by: What the checkpoint says of itself; none for one without a manifest.

    Effects: waits until the file's contents are on the disk.
    """
    tables: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    results: list[WriteResult] = []
    paths: dict[str, tuple[str, ...]] = {}
    for placed in places:
        for name in placed.names:
            paths[name] = path_of(name)
            table = tables.setdefault(name, _table(placed))
            index = MetadataIndex(name)
            if placed.chunk is not None and isinstance(table, TensorStorageMetadata):
                offsets, sizes = torch.Size(placed.chunk.offsets), torch.Size(placed.chunk.sizes)
                index = MetadataIndex(name, offsets, len(table.chunks))
                table.chunks.append(ChunkStorageMetadata(offsets, sizes))
            place = _StorageInfo(placed.file, placed.span.offset, placed.span.length)
            results.append(WriteResult(index=index, size_in_bytes=placed.span.length, storage_data=place))
    writer = _MetadataWriter(directory, written_by)
    writer.set_up_storage_writer(True, rank=0)
    writer.finish(Metadata(state_dict_metadata=tables, planner_data=paths), [results])


def _table(placed: Placed) -> TensorStorageMetadata | BytesStorageMetadata:
    if placed.chunk is None or placed.dtype is None:
        return BytesStorageMetadata()
    return TensorStorageMetadata(TensorProperties(dtype=placed.dtype), torch.Size(placed.shape or ()), [])


class _MetadataWriter(FileSystemWriter):
    """DCP's writer, of which only the end is used."""

    def __init__(self, directory: Path, written_by: Sequence[str]) -> None:
        super().__init__(directory, sync_files=True)
        self._written_by = list(written_by)

    def storage_meta(self) -> StorageMeta:
        # No checkpoint_id: it would be the staging directory's path, which no longer exists when somebody reads it.
        return StorageMeta(save_id=self.save_id, modules=self._written_by)
