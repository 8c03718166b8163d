"""Boxes of a tensor stored row by row in a file: read and written in place, through bounded buffers."""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from math import prod
from typing import Final, NamedTuple

import torch

from lamella_layout import Chunk

BUFFER_NBYTES: Final = 8 << 20
"""Memory limit of a read or write, besides the caller's tensor."""

_GAP_NBYTES: Final = 32 << 10  # Reading over a gap of this length costs about as much as another system call.


class Stored(NamedTuple):
    """A tensor stored in a file without gaps, last dim innermost; `start` is the byte of the first element."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size in the file, in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def strides(self) -> tuple[int, ...]:
        """Elements from one index to the next, one entry a dim."""
        return tuple(prod(self.shape[dim + 1 :]) for dim in range(len(self.shape)))

    def span(self, chunk: Chunk) -> tuple[int, int]:
        """The first byte of a box, and the number of elements from the first to the last, both included."""
        if chunk.sizes == self.shape:
            return self.start, prod(self.shape)
        strides = self.strides
        first = sum(offset * stride for offset, stride in zip(chunk.offsets, strides, strict=True))
        last = sum((size - 1) * stride for size, stride in zip(chunk.sizes, strides, strict=True))
        return self.start + first * self.dtype.itemsize, last + 1


def pieces(chunk: Chunk, max_numel: int) -> Iterator[Chunk]:
    """Cut a box into boxes of at most `max_numel` elements, in memory order; none for an empty box."""
    if chunk.numel <= max(max_numel, 1):
        if chunk.numel:
            yield chunk
        return
    dim = _outermost(chunk)
    num_rows = max(1, max_numel * chunk.sizes[dim] // chunk.numel)
    for start in range(0, chunk.sizes[dim], num_rows):
        yield from pieces(_rows(chunk, dim, start, num_rows), max_numel)


def write_mode(targets: Iterable[torch.Tensor]) -> AbstractContextManager[None]:
    """The mode of autograd to fill tensors in: without gradients, and inference mode if any is an inference tensor.

    A thread of a pool is not in its caller's inference mode, and torch refuses to fill inference tensors outside of it.
    """
    return torch.inference_mode() if any(target.is_inference() for target in targets) else torch.no_grad()


def read_box(descriptor: int, stored: Stored, chunk: Chunk, into: torch.Tensor) -> None:
    """Fill `into`, of the box's sizes and on any device, with a box of a stored tensor, cast to `into`'s dtype.

    Raises:
        EOFError: The file ends before the box does.
        OSError: The file cannot be read.

    Effects: reads the box's bytes, and gaps cheaper to read than another system call; straight into
        `into`, if contiguous host memory of the stored dtype.
    """
    into = into.detach()
    if is_plain_memory(into, stored.dtype):
        _read_host(descriptor, stored, chunk, into)
        return
    for piece in pieces(chunk, BUFFER_NBYTES // stored.dtype.itemsize):
        host = torch.empty(piece.sizes, dtype=stored.dtype)
        _read_host(descriptor, stored, piece, host)
        _part(into, piece, chunk).copy_(host)


def read_adjacent(descriptor: int, tensors: Sequence[tuple[Stored, torch.Tensor]]) -> bool:
    """Fill whole tensors, stored one behind the other, by one system call.

    A few kilobytes cost less to read than to ask for, and threads with tiny reads wait for each other's interpreter.

    Args:
        descriptor: The open file.
        tensors: Stored tensors in the order of the file, 1,024 at most, each with the memory to fill.

    Returns:
        Whether the tensors are filled. False, with undefined contents, if bytes lie between two tensors, memory is not
            contiguous host memory of the stored shape and dtype, or the system read less: `read_box` tells why.

    Raises:
        OSError: The file cannot be read.
    """
    position = tensors[0][0].start if tensors else 0
    start = position
    for stored, into in tensors:
        if stored.start != position or into.shape != stored.shape or not is_plain_memory(into, stored.dtype):
            return False
        position += into.nbytes
    return os.preadv(descriptor, [_bytes_of(into.detach()) for _, into in tensors], start) == position - start


def write_box(descriptor: int, stored: Stored, chunk: Chunk, values: torch.Tensor) -> None:
    """Write `values`, of the box's sizes and on any device, to the box of a stored tensor, cast to the stored dtype.

    Raises:
        OSError: The file cannot be written.

    Effects: writes the box's bytes and no others, so that many ranks can fill one tensor; copies from an accelerator
        buffer by buffer.
    """
    values = values.detach()
    if is_plain_memory(values, stored.dtype):
        _write_runs(descriptor, stored, chunk, values)
        return
    for piece in pieces(chunk, BUFFER_NBYTES // stored.dtype.itemsize):
        part = _part(values, piece, chunk).to(device="cpu", dtype=stored.dtype)
        host = part.resolve_conj().resolve_neg().contiguous()
        _write_runs(descriptor, stored, piece, host)


def _read_host(descriptor: int, stored: Stored, chunk: Chunk, host: torch.Tensor) -> None:
    """Read a box into contiguous host memory of the stored dtype."""
    first, numel = stored.span(chunk)
    close = _widest_gap(stored, chunk) <= _GAP_NBYTES
    if numel == chunk.numel or not chunk.numel:
        _fill(descriptor, first, host)
    elif close and numel * stored.dtype.itemsize <= BUFFER_NBYTES:
        buffer = torch.empty(numel, dtype=stored.dtype)
        _fill(descriptor, first, buffer)
        host.copy_(buffer.as_strided(chunk.sizes, stored.strides))
    else:
        dim = _outermost(chunk)
        num_rows = max(1, BUFFER_NBYTES // (stored.strides[dim] * stored.dtype.itemsize)) if close else 1
        for start in range(0, chunk.sizes[dim], num_rows):
            rows = _rows(chunk, dim, start, num_rows)
            _read_host(descriptor, stored, rows, host.narrow(dim, start, rows.sizes[dim]))


def _write_runs(descriptor: int, stored: Stored, chunk: Chunk, host: torch.Tensor) -> None:
    first, numel = stored.span(chunk)
    if numel == chunk.numel:
        _drain(descriptor, first, host)
        return
    dim = _outermost(chunk)
    for row in range(chunk.sizes[dim]):
        _write_runs(descriptor, stored, _rows(chunk, dim, row, 1), host.narrow(dim, row, 1))


def _widest_gap(stored: Stored, chunk: Chunk) -> int:
    """The widest gap between two runs of a box, in bytes."""
    widest, extent = 0, 1  # `extent`: elements from the first to the last of the inner dims.
    for size, stride in zip(reversed(chunk.sizes), reversed(stored.strides), strict=True):
        if size > 1:
            widest = max(widest, stride - extent)
            extent += (size - 1) * stride
    return widest * stored.dtype.itemsize


def _outermost(chunk: Chunk) -> int:
    """The first dim along which a box can be cut."""
    return next(dim for dim, size in enumerate(chunk.sizes) if size > 1)


def _rows(chunk: Chunk, dim: int, start: int, num_rows: int) -> Chunk:
    """Some indices of a box along one dim."""
    offsets, sizes = list(chunk.offsets), list(chunk.sizes)
    offsets[dim] += start
    sizes[dim] = min(num_rows, sizes[dim] - start)
    return Chunk(tuple(offsets), tuple(sizes))


def is_plain_memory(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a tensor's memory on the host holds the elements in order, as a file does."""
    is_lazy = tensor.is_conj() or tensor.is_neg()  # The memory has other elements than the tensor.
    return tensor.device.type == "cpu" and tensor.dtype == dtype and tensor.is_contiguous() and not is_lazy


def _part(tensor: torch.Tensor, piece: Chunk, chunk: Chunk) -> torch.Tensor:
    """The piece of a box, as a view of a tensor holding the box."""
    return tensor[tuple(slice(indices.start, indices.stop) for indices in piece.relative_to(chunk).ranges)]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous host tensor."""
    # `reshape` keeps odd strides of a single element, and the byte view below would fail.
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


def _fill(descriptor: int, position: int, tensor: torch.Tensor) -> None:
    memory = _bytes_of(tensor)
    while memory:
        num_read = os.preadv(descriptor, [memory], position)
        if not num_read:
            raise EOFError(f"the file ends at byte {position}, {len(memory)} bytes early")
        memory, position = memory[num_read:], position + num_read


def _drain(descriptor: int, position: int, tensor: torch.Tensor) -> None:
    memory = _bytes_of(tensor)
    while memory:
        num_written = os.pwrite(descriptor, memory, position)
        memory, position = memory[num_written:], position + num_written
