"""Safetensors files, one or many with an index, as a source of tensors.

Note [Safetensors without its library]
    The format is eight bytes, a JSON object, and the tensors row by row. The `safetensors` library maps a file and
    copies slices out of the map; here boxes are read straight into the memory of shards. A file truncated
    under a map, or a failing disk, ends the process by SIGBUS; a read raises an error with the file's name. Writes
    are in place, by many ranks or piece by piece, while the library writes whole files from one process.

    Measured on two cores, 768 MiB in six tensors, files in the page cache: whole tensors raise the peak of resident
    memory by 2 MiB, and by 771 MiB through the library's map, for the same 0.09 s of CPU time. Half of each row costs
    0.40 s of CPU time here (gaps below 32 KiB are read over) and 0.05 s in the library. The tests compare files of
    each implementation with the other's reader.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Final, NamedTuple

import torch

from lamella_convert._formats.safetensors_files import WeightsFiles, unneeded_files, weights_files
from lamella_convert._formats.safetensors_header import identity
from lamella_files import (
    CheckpointDamaged,
    Stored,
    TensorInfo,
    Wanted,
    box_of,
    first_overlap,
    read_adjacent,
    read_box,
    unreadable,
    whole_box,
    write_mode,
)
from lamella_layout import Chunk

_NUM_THREADS: Final = 8
_GROUP_NBYTES: Final = 1 << 20
_MAX_GROUP: Final = 1024


class _StoredBox(NamedTuple):
    """A stored box of a tensor: all of the tensor, except in files by rank."""

    file: Path
    stored: Stored
    chunk: Chunk


class _BoxRead(NamedTuple):
    """The box of a part to read, in the part's own coordinates, and the destination."""

    name: str
    part: _StoredBox
    box: Chunk
    into: torch.Tensor


class SafetensorsSource:
    """A `Source` over `<file>.safetensors`, or a directory in an arrangement of Note [One arrangement].

    Names are the files' names. Without objects.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Read the headers, and compare them with each other, the files' lengths and the index.

        Raises:
            CheckpointDamaged: The conditions of `weights_files`; or ranks' parts overlap, or do not cover a tensor.
            FileNotFoundError: The conditions of `weights_files`.
            RankPart: The conditions of `weights_files`.

        Effects: reads the headers; no tensor.
        """
        self.path = Path(path)
        self._files = weights_files(self.path)
        self._parts = _parts(self._files)
        self._tensors = {name: _info(self.path, name, parts) for name, parts in self._parts.items()}

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """As `Source.tensors`; a tensor is one chunk, or one a rank, with direct reads of any box."""
        return self._tensors

    @property
    def objects(self) -> Sequence[str]:
        """Empty: safetensors files hold tensors only."""
        return ()

    @property
    def files(self) -> tuple[Path, ...]:
        """The files with the tensors, in the order of the index."""
        return tuple(self._files.headers)

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks about whole files in a form that readers may not expect."""
        return self._files.notes

    @property
    def unneeded(self) -> list[str]:
        """Names of safetensors files beside the model's own."""
        return unneeded_files(self.path, self._files.headers)

    def read(self, requests: Sequence[Wanted]) -> None:
        """As `Source.read`: only the boxes' bytes, in file order."""
        reads = sorted(self._reads(requests), key=lambda read: (str(read.part.file), read.part.stored.start))
        streams = {request.into.device: _current_stream(request.into.device) for request in requests}
        with ExitStack() as open_files:
            descriptors = {file: self._open(file, open_files) for file in {read.part.file for read in reads}}
            pool = open_files.enter_context(ThreadPoolExecutor(_NUM_THREADS))
            for _ in pool.map(lambda group: _read(descriptors, streams, group), _groups(reads)):
                pass

    def read_object(self, name: str) -> object:
        """Raise: safetensors files hold no objects.

        Raises:
            KeyError: Always.
        """
        raise KeyError(name)

    def _reads(self, requests: Sequence[Wanted]) -> Iterator[_BoxRead]:
        for request in requests:
            assert request.into.shape == request.chunk.sizes, request
            parts = self._parts[request.name]
            if len(parts) == 1:
                yield _BoxRead(request.name, parts[0], request.chunk, request.into)
                continue
            for part in parts:
                common = part.chunk.intersection(request.chunk)
                if common.numel:
                    into = box_of(request.into, common.relative_to(request.chunk))
                    yield _BoxRead(request.name, part, common.relative_to(part.chunk), into)

    def _open(self, file: Path, open_files: ExitStack) -> int:
        try:
            descriptor = os.open(file, os.O_RDONLY)
        except OSError as error:
            raise unreadable(file, error) from error
        open_files.callback(os.close, descriptor)
        if identity(descriptor) != self._files.headers[file].identity:
            raise CheckpointDamaged(str(file), "it was replaced after its header had been read")
        return descriptor


def _parts(files: WeightsFiles) -> dict[str, list[_StoredBox]]:
    """The stored boxes of each tensor, in the order of the files."""
    parts: dict[str, list[_StoredBox]] = {}
    for file, header in files.headers.items():
        for name, stored in header.tensors.items():
            offsets = header.offsets[name] if files.are_of_ranks else (0,) * len(stored.shape)
            parts.setdefault(name, []).append(_StoredBox(file, stored, Chunk(offsets, stored.shape)))
    return parts


def _info(path: Path, name: str, parts: Sequence[_StoredBox]) -> TensorInfo:
    first = parts[0]
    if len(parts) == 1 and not any(first.chunk.offsets):
        return TensorInfo(first.stored.shape, first.stored.dtype, (first.chunk,))
    if any(
        (len(part.stored.shape), part.stored.dtype) != (len(first.stored.shape), first.stored.dtype) for part in parts
    ):
        raise CheckpointDamaged(str(path), f"parts of {name!r} of several dtypes or numbers of dims")
    chunks = tuple(part.chunk for part in parts)
    shape = tuple(max(along.stop for along in dim) for dim in zip(*(chunk.ranges for chunk in chunks), strict=True))
    if overlap := first_overlap(chunks):
        files = [part.file.name for part in parts if part.chunk in overlap]
        raise CheckpointDamaged(
            str(path), f"parts of {name!r} overlap: {files[0]!r} and {files[1]!r} have the same rows"
        )
    if (num_held := sum(chunk.numel for chunk in chunks)) != prod(shape):
        raise CheckpointDamaged(
            str(path), f"the files of ranks hold {num_held} of the {prod(shape)} elements of {name!r}"
        )
    return TensorInfo(shape, first.stored.dtype, tuple(chunk for chunk in chunks if chunk.numel) or (whole_box(shape),))


def _groups(reads: Iterable[_BoxRead]) -> Iterator[list[_BoxRead]]:
    """The reads of one task each: handing a thread one small tensor at a time costs more than reading the tensor."""
    group: list[_BoxRead] = []
    nbytes = 0
    for read in reads:
        group.append(read)
        nbytes += read.into.nbytes
        if nbytes >= _GROUP_NBYTES or len(group) == _MAX_GROUP:
            yield group
            group, nbytes = [], 0
    if group:
        yield group


def _read(
    descriptors: Mapping[Path, int], streams: Mapping[torch.device, torch.Stream | None], group: Sequence[_BoxRead]
) -> None:
    """Read some boxes, on a thread of the pool."""
    with write_mode(read.into for read in group):
        if _read_at_once(descriptors, group):
            return
        for read in group:
            file = read.part.file
            if (stream := streams[read.into.device]) is not None:
                # Current streams are per thread: copies follow the caller's order.
                torch.accelerator.set_stream(stream)
            try:
                read_box(descriptors[file], read.part.stored, read.box, read.into)
            except (OSError, EOFError) as error:
                raise CheckpointDamaged(str(file), f"{read.name!r}: {type(error).__name__}: {error}") from error


def _read_at_once(descriptors: Mapping[Path, int], group: Sequence[_BoxRead]) -> bool:
    """Read neighbours in a file by one system call; False for other boxes, and where the file cannot be read."""
    file = group[0].part.file
    if len(group) == 1 or any(read.part.file is not file for read in group):
        return False
    try:
        return read_adjacent(descriptors[file], [(read.part.stored, read.into) for read in group])
    except OSError:
        return False  # The read of each tensor raises an error with the tensor's name.


def _current_stream(device: torch.device) -> torch.Stream | None:
    return None if device.type == "cpu" else torch.accelerator.current_stream(device)
