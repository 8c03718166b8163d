"""Boxes of tensors: overlaps, and boxes that are read and written in place."""

import os
from pathlib import Path

import pytest
import torch

from lamella_files import Stored, box_of, first_overlap, read_adjacent, read_box, write_box
from lamella_layout import Chunk


@pytest.mark.parametrize(
    ("chunks", "overlap"),
    [
        ([((0, 0), (2, 2)), ((2, 0), (2, 2)), ((0, 2), (4, 1))], False),
        ([((0, 0), (2, 2)), ((1, 1), (1, 1))], True),
        ([((0, 0), (4, 1)), ((0, 1), (4, 1)), ((3, 0), (1, 2))], True),
        ([((0,), (0,)), ((0,), (3,))], False),
        ([((), ())], False),
        ([((), ()), ((), ())], True),
    ],
)
def test_overlaps_are_found(chunks: list[tuple[tuple[int, ...], tuple[int, ...]]], overlap: bool) -> None:
    overlapping_pair = first_overlap([Chunk(*chunk) for chunk in chunks])
    assert (overlapping_pair is not None) is overlap


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_boxes_are_written_and_read_at_their_place_in_the_file(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.arange(4 * 5 * 3).view(4, 5, 3).float().to(dtype)
    stored = Stored(7, (4, 5, 3), dtype)
    boxes = [Chunk((0, 0, 0), (4, 2, 3)), Chunk((0, 2, 0), (4, 3, 1)), Chunk((0, 2, 1), (4, 3, 2))]
    with (tmp_path / "file").open("xb+") as file:
        for box in boxes:
            write_box(file.fileno(), stored, box, box_of(values, box))
        assert os.fstat(file.fileno()).st_size == 7 + values.nbytes
        into = torch.empty_like(values)
        for box in boxes:
            read_box(file.fileno(), stored, box, box_of(into, box))
        assert torch.equal(into.view(torch.uint8), values.view(torch.uint8))
        with pytest.raises(EOFError, match="bytes early"):
            read_box(file.fileno(), stored._replace(start=8), boxes[2], torch.empty(4, 3, 2, dtype=dtype))


def test_a_span_reaches_from_the_first_element_of_a_box_to_the_last() -> None:
    stored = Stored(100, (4, 5), torch.float32)
    assert stored.span(Chunk((1, 1), (2, 3))) == (100 + 6 * 4, 8)
    assert stored.span(Chunk((1, 0), (2, 5))) == (100 + 5 * 4, 10)
    assert Stored(3, (), torch.int8).span(Chunk((), ())) == (3, 1)


KINDS = {
    "matrix": torch.arange(6.0).view(2, 3),
    "scalar": torch.tensor(3, dtype=torch.int16),
    "empty": torch.zeros(0, 4),
    "bfloat16": torch.arange(5.0).bfloat16(),
    "parameter": torch.nn.Parameter(torch.arange(4.0)),
}


def write_each(path: Path) -> list[tuple[Stored, torch.Tensor]]:
    """Write the tensors one behind the other, behind three bytes; returns their places with zeros to fill."""
    content, tensors = b"...", []
    for tensor in KINDS.values():
        tensors.append((Stored(len(content), tuple(tensor.shape), tensor.dtype), torch.zeros_like(tensor)))
        content += tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
    path.write_bytes(content)
    return tensors


def test_neighbours_are_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = write_each(tmp_path / "file")
    calls, preadv = [], os.preadv

    def counted(descriptor: int, memories: list[memoryview], position: int) -> int:
        calls.append(len(memories))
        return preadv(descriptor, memories, position)

    monkeypatch.setattr(os, "preadv", counted)
    with (tmp_path / "file").open("rb") as file:
        assert read_adjacent(file.fileno(), tensors)
    assert calls == [len(KINDS)]
    assert all(torch.equal(into, tensor) for (_, into), tensor in zip(tensors, KINDS.values(), strict=True))


@pytest.mark.parametrize("fault", ["truncated", "gap", "order", "shape", "dtype", "strides"])
def test_adjacent_reads_are_declined_for_gaps_and_for_mismatched_tensors(tmp_path: Path, fault: str) -> None:
    tensors = write_each(tmp_path / "file")
    (first, into), second = tensors[0], tensors[1]
    match fault:
        case "truncated":
            os.truncate(tmp_path / "file", (tmp_path / "file").stat().st_size - 1)
        case "gap":
            tensors = [tensors[0], *tensors[2:]]
        case "order":
            tensors[:2] = [second, (first, into)]
        case "shape":
            tensors[0] = first, torch.zeros(3, 2)
        case "dtype":
            tensors[0] = first, into.int()
        case "strides":
            tensors[0] = first, torch.zeros(3, 2).t()
    with (tmp_path / "file").open("rb") as file:
        assert not read_adjacent(file.fileno(), tensors)
