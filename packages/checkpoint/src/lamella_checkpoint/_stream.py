"""A source from one end to the other, piece by piece, through a bounded buffer."""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Final, NamedTuple

import torch

from lamella_checkpoint._file_boxes import pieces
from lamella_checkpoint._source import Source, Wanted
from lamella_layout import Chunk

BUFFER_NBYTES: Final = 256 << 20
"""What a conversion holds of tensors by default."""

_PIECES_A_BATCH: Final = 8  # A source reads the boxes of one call several at a time.


class Piece(NamedTuple):
    """A box of a tensor, and what it holds, in contiguous host memory."""

    name: str
    chunk: Chunk
    values: torch.Tensor


def stream(source: Source, dtypes: Mapping[str, torch.dtype], buffer_nbytes: int = BUFFER_NBYTES) -> Iterator[Piece]:
    """The named tensors piece by piece, in the order of `dtypes`; the next pieces are read while one is in hand.

    Args:
        source: What to read. Pieces lie within its chunks, along which reading is cheapest.
        dtypes: Names, and the dtypes that they are wanted in.
        buffer_nbytes: What the pieces that are alive take together. A piece has one element at least.

    Raises:
        CheckpointDamaged: As `Source.read`.

    Effects: reads on a thread of its own. Whoever keeps a piece beyond the next one holds more than the buffer.
    """
    batches = _batches(source, dtypes, max(1, buffer_nbytes // 2))
    with ThreadPoolExecutor(1) as ahead:
        coming = [ahead.submit(_read, source, batch) for batch in islice(batches, 1)]
        while coming:
            read = coming.pop().result()
            coming = [ahead.submit(_read, source, batch) for batch in islice(batches, 1)]
            yield from read
            del read


def _batches(
    source: Source, dtypes: Mapping[str, torch.dtype], nbytes: int
) -> Iterator[list[tuple[str, Chunk, torch.dtype]]]:
    """Pieces that are read together, of at most `nbytes` together."""
    batch: list[tuple[str, Chunk, torch.dtype]] = []
    left = nbytes
    for name, dtype in dtypes.items():
        for chunk in source.tensors[name].chunks:
            for piece in pieces(chunk, nbytes // _PIECES_A_BATCH // dtype.itemsize):
                if piece.numel * dtype.itemsize > left and batch:
                    yield batch
                    batch, left = [], nbytes
                batch.append((name, piece, dtype))
                left -= piece.numel * dtype.itemsize
    if batch:
        yield batch


def _read(source: Source, batch: list[tuple[str, Chunk, torch.dtype]]) -> list[Piece]:
    read = [Piece(name, chunk, torch.empty(chunk.sizes, dtype=dtype)) for name, chunk, dtype in batch]
    source.read([Wanted(*piece) for piece in read])
    return read
