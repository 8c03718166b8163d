"""A checkpoint in memory, and whole reads of sources: for tests of rules, translations and formats."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import torch

from lamella_files._base.boxes import box_of, whole_box
from lamella_files._sources.source import Source, TensorInfo, Wanted
from lamella_layout import Chunk


class MemorySource:
    """A `Source` over dicts.

    Attributes:
        held: Tensors by name.
        values: Objects by name.
        tensors: Shapes, dtypes and chunks by name; tests may change the chunks.
        requests: The name and the box of each read so far.
    """

    path = Path("memory")

    def __init__(
        self,
        values: Mapping[str, object],
        objects: Mapping[str, object] | None = None,
        cuts: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """Hold tensors and objects.

        Args:
            values: Tensors, and objects, by name.
            objects: Further objects by name.
            cuts: Rows at which a tensor is cut into chunks along dim 0, by name.
        """
        self.full_tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
        plain_values = {name: value for name, value in values.items() if name not in self.full_tensors}
        self.values = plain_values | dict(objects or {})
        self.tensors = {name: _info(tensor, (cuts or {}).get(name, ())) for name, tensor in self.full_tensors.items()}
        self.requests: list[tuple[str, Chunk]] = []

    @property
    def objects(self) -> Sequence[str]:
        """As `Source.objects`."""
        return tuple(self.values)

    def read(self, requests: Sequence[Wanted]) -> None:
        """As `Source.read`; records each read in `requests`."""
        for want in requests:
            self.requests.append((want.name, want.chunk))
            box = box_of(self.full_tensors[want.name], want.chunk)
            assert want.into.shape == box.shape, (want.name, want.into.shape, box.shape)
            want.into.detach().copy_(box)

    def read_object(self, name: str) -> object:
        """As `Source.read_object`."""
        return self.values[name]


def read_tensor(
    source: Source, name: str, chunk: Chunk | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """A tensor of a source: one box, or the whole; in the stored dtype, or another."""
    info = source.tensors[name]
    chunk = chunk or whole_box(info.shape)
    into = torch.empty(chunk.sizes, dtype=dtype or info.dtype)
    source.read([Wanted(name, chunk, into)])
    return into


def dtypes_of(source: Source) -> dict[str, torch.dtype]:
    """The stored dtypes by name: a writer given these casts nothing."""
    return {name: info.dtype for name, info in source.tensors.items()}


def read_all(source: Source) -> dict[str, torch.Tensor]:
    """Every tensor of a source, whole."""
    tensors = _blanks(source)
    source.read([Wanted(name, whole_box(into.shape), into) for name, into in tensors.items() if into.numel()])
    return tensors


def read_in_chunks(source: Source) -> dict[str, torch.Tensor]:
    """Every tensor of a source, along the chunks; elements outside all chunks stay 77."""
    tensors = _blanks(source)
    for name, info in source.tensors.items():
        for chunk in info.chunks:
            source.read([Wanted(name, chunk, box_of(tensors[name], chunk))])
    return tensors


def _blanks(source: Source) -> dict[str, torch.Tensor]:
    return {name: torch.full(info.shape, 77, dtype=info.dtype) for name, info in source.tensors.items()}


def _info(tensor: torch.Tensor, rows: Sequence[int]) -> TensorInfo:
    shape = tuple(tensor.shape)
    if not rows:
        return TensorInfo(shape, tensor.dtype, (whole_box(shape),))
    row_shape = shape[1:]
    bounds = pairwise([0, *rows, shape[0]])
    chunks = [Chunk((start, *[0] * len(row_shape)), (stop - start, *row_shape)) for start, stop in bounds]
    return TensorInfo(shape, tensor.dtype, tuple(chunks))
