"""A source read from start to end, piece by piece, through a bounded buffer."""

import pickle
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from math import prod
from typing import Final, NamedTuple

import torch

from lamella_files._base.file_boxes import pieces
from lamella_files._sources.source import Source, TensorInfo, Wanted
from lamella_layout import Chunk

BUFFER_NBYTES: Final = 256 << 20
"""Default size of a conversion's tensor buffer."""

MAX_FILE_NBYTES: Final = 5_000_000_000
"""Default approximate size of one data file."""

_PIECES_A_BATCH: Final = 8  # A source reads the boxes of one call in parallel.


OnBytes = Callable[[int], None]
"""Called with the number of bytes written since the last call."""


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """File size, buffer and progress of a format's writer over a source.

    Attributes:
        max_file_nbytes: Approximate limit of one data file; without effect in a format of a single file.
        buffer_nbytes: Memory for tensors.
        on_bytes: Progress.
    """

    max_file_nbytes: int = MAX_FILE_NBYTES
    buffer_nbytes: int = BUFFER_NBYTES
    on_bytes: OnBytes = lambda _: None


_Batch = list[tuple[str, Chunk, torch.dtype]]


class FilledBox(NamedTuple):
    """A box of a tensor, with the values in contiguous host memory."""

    name: str
    chunk: Chunk
    values: torch.Tensor


def stream(
    source: Source, dtypes: Mapping[str, torch.dtype], buffer_nbytes: int = BUFFER_NBYTES
) -> Iterator[FilledBox]:
    """The named tensors piece by piece, in the order of `dtypes`; the next pieces are prefetched.

    Args:
        source: The tensors. Pieces lie within the source's chunks, along which reading is cheapest; an empty tensor
            is one piece.
        dtypes: The wanted dtypes, by name.
        buffer_nbytes: Limit for all live pieces together. A piece has one element at least.

    Raises:
        CheckpointDamaged: The conditions of `Source.read`.

    Effects: reads on a separate thread. A consumer that keeps earlier pieces exceeds the buffer.
    """
    batches = _batches(source, dtypes, max(1, buffer_nbytes // 2))
    with ThreadPoolExecutor(1) as reader:
        coming = [reader.submit(_read, source, batch) for batch in islice(batches, 1)]
        while coming:
            read = coming.pop().result()
            coming = [reader.submit(_read, source, batch) for batch in islice(batches, 1)]
            yield from read
            del read  # Frees the batch while the next one is still being read.


def objects_once(source: Source) -> Iterator[tuple[tuple[str, ...], object]]:
    """The objects of a source, each distinct value once with all of its names."""
    names: dict[bytes, list[str]] = {}
    for name in source.objects:
        names.setdefault(pickle.dumps(source.read_object(name)), []).append(name)
    for aliases in names.values():
        yield tuple(aliases), source.read_object(aliases[0])


def _batches(source: Source, dtypes: Mapping[str, torch.dtype], nbytes: int) -> Iterator[_Batch]:
    """Batches of pieces for one read, of at most `nbytes` together."""
    batch: _Batch = []
    num_free = nbytes
    for name, dtype in dtypes.items():
        for piece in _pieces_of(source.tensors[name], nbytes // _PIECES_A_BATCH // dtype.itemsize):
            if piece.numel * dtype.itemsize > num_free and batch:
                yield batch
                batch, num_free = [], nbytes
            batch.append((name, piece, dtype))
            num_free -= piece.numel * dtype.itemsize
    if batch:
        yield batch


def _pieces_of(info: TensorInfo, max_numel: int) -> Iterator[Chunk]:
    if not prod(info.shape):
        yield Chunk((0,) * len(info.shape), info.shape)
    for chunk in info.chunks:
        yield from pieces(chunk, max_numel)


def _read(source: Source, batch: _Batch) -> list[FilledBox]:
    read = [FilledBox(name, chunk, torch.empty(chunk.sizes, dtype=dtype)) for name, chunk, dtype in batch]
    source.read([Wanted(*piece) for piece in read])
    return read
