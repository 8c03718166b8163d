"""A source read from start to end, in pieces that a buffer bounds."""

from collections.abc import Generator, Sequence

import pytest
import torch

from lamella_files import TensorInfo, Wanted, box_of, stream
from lamella_files.testing import MemorySource, dtypes_of
from lamella_layout import Chunk
from lamella_testing.bits import all_same_bits, tensors_of_each_kind

SMALL = 600
"""Bytes of a buffer that cuts each tensor into many pieces."""


@pytest.fixture
def source() -> MemorySource:
    return MemorySource({f"model.{name}": tensor for name, tensor in tensors_of_each_kind().items()})


def test_pieces_are_every_tensor_once_within_its_chunks_and_the_buffer(source: MemorySource) -> None:
    chunks = (Chunk((0, 0, 0), (7, 2, 3)), Chunk((0, 2, 0), (7, 3, 3)))
    source.tensors["model.float32"] = TensorInfo((7, 5, 3), torch.float32, chunks)
    tensors = {name: torch.zeros(info.shape, dtype=info.dtype) for name, info in source.tensors.items()}
    order = []
    for piece in stream(source, dtypes_of(source), SMALL):
        assert piece.values.nbytes <= SMALL // 2
        box_of(tensors[piece.name], piece.chunk).copy_(piece.values)
        order.append(piece.name)
        if piece.name == "model.float32":
            assert any(chunk.intersection(piece.chunk) == piece.chunk for chunk in chunks)
    assert list(dict.fromkeys(order)) == list(source.tensors)
    assert all_same_bits(tensors, source.full_tensors)


def test_no_more_than_the_buffer_is_read_ahead() -> None:
    source = MemorySource({"a": torch.arange(1000.0)})
    num_asked = []
    read_now = source.read

    def read(requests: Sequence[Wanted]) -> None:
        num_asked.append(sum(request.into.nbytes for request in requests))
        read_now(requests)

    source.read = read  # type: ignore[method-assign]
    pieces = stream(source, dtypes_of(source), 400)
    next(pieces)
    next(pieces)
    assert isinstance(pieces, Generator)
    assert sum(num_asked) <= 400
    assert max(num_asked) <= 200
    pieces.close()


def test_a_source_that_fails_is_heard(source: MemorySource) -> None:
    source.read = lambda _: 1 / 0  # type: ignore[assignment, method-assign]
    with pytest.raises(ZeroDivisionError):
        list(stream(source, dtypes_of(source)))
