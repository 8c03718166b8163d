"""Tensors in memory as a source, and how tests read sources."""

from pathlib import Path

import torch

from lamella_checkpoint._base.source import TensorInfo, Wanted
from lamella_layout import Chunk


class Memory:
    """A source of tensors, and of objects: values that are no tensors."""

    path = Path("memory")

    def __init__(self, **values):
        self.values = values
        self.objects = tuple(name for name, value in values.items() if not isinstance(value, torch.Tensor))
        self.tensors = {
            name: TensorInfo(tuple(value.shape), value.dtype, (whole(value.shape),))
            for name, value in values.items()
            if name not in self.objects
        }

    def read(self, wanted):
        for each in wanted:
            each.into.copy_(cut(self.values[each.name], each.chunk))

    def read_object(self, name):
        return self.values[name]


def whole(shape):
    return Chunk((0,) * len(shape), tuple(shape))


def cut(tensor, chunk):
    return tensor[tuple(slice(each.start, each.stop) for each in chunk.ranges)]


def read(source, name, chunk=None, dtype=None):
    info = source.tensors[name]
    chunk = chunk or whole(info.shape)
    into = torch.empty(chunk.sizes, dtype=dtype or info.dtype)
    source.read([Wanted(name, chunk, into)])
    return into


def same_bits(one, other):
    assert one.dtype == other.dtype and one.shape == other.shape
    return torch.equal(bits(one), bits(other))


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def random_bits(shape, dtype):
    numel = torch.Size(shape).numel() * dtype.itemsize
    values = torch.randint(0, 2 if dtype == torch.bool else 256, (numel,), dtype=torch.uint8)
    return values.view(dtype).reshape(shape)
