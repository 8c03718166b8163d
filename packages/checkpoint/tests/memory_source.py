"""A checkpoint that is two dicts: what tests translate, and what they read all of."""

from itertools import pairwise
from pathlib import Path

import torch

from lamella_checkpoint._base.source import TensorInfo, Wanted
from lamella_layout import Chunk


class MemorySource:
    """Tensors by name, each cut along dim 0 at the given rows; `requests` records what was read of it."""

    def __init__(self, tensors, objects=None, cuts=None):
        self.held, self.values = dict(tensors), dict(objects or {})
        self.tensors = {name: self._info(tensor, (cuts or {}).get(name, ())) for name, tensor in tensors.items()}
        self.path = Path("memory")
        self.requests = []

    @property
    def objects(self):
        return tuple(self.values)

    def read(self, wanted):
        for want in wanted:
            self.requests.append((want.name, want.chunk))
            box = self.held[want.name]
            for dim, (offset, size) in enumerate(zip(*want.chunk, strict=True)):
                box = box.narrow(dim, offset, size)
            assert want.into.shape == box.shape, (want.name, want.into.shape, box.shape)
            want.into.copy_(box)

    def read_object(self, name):
        return self.values[name]

    def _info(self, tensor, rows):
        shape = tuple(tensor.shape)
        if not shape:
            return TensorInfo(shape, tensor.dtype, (Chunk((), ()),))
        bounds = [0, *rows, shape[0]]
        rest = shape[1:]
        chunks = [Chunk((start, *[0] * len(rest)), (stop - start, *rest)) for start, stop in pairwise(bounds)]
        return TensorInfo(shape, tensor.dtype, tuple(chunks))


def read_all(source):
    """Every tensor of a source, whole."""
    whole = {name: torch.full(info.shape, 77, dtype=info.dtype) for name, info in source.tensors.items()}
    wanted = [
        Wanted(name, Chunk((0,) * into.ndim, tuple(into.shape)), into) for name, into in whole.items() if into.numel()
    ]
    source.read(wanted)
    return whole


def read_in_chunks(source):
    """Every tensor of a source, along its chunks; what no chunk covers stays 77."""
    whole = {name: torch.full(info.shape, 77, dtype=info.dtype) for name, info in source.tensors.items()}
    for name, info in source.tensors.items():
        for chunk in info.chunks:
            box = whole[name]
            for dim, (offset, size) in enumerate(zip(*chunk, strict=True)):
                box = box.narrow(dim, offset, size)
            source.read([Wanted(name, chunk, box)])
    return whole
