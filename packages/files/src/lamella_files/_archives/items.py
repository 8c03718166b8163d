"""Tensors of a checkpoint's files, read box by box by several threads.

Note [Memory during a load]
    A thread holds one piece of one item: rows, of 16 MiB together (or one row, if larger). Rows wanted unchanged, in
    contiguous host memory of the same dtype, are read straight into their target without a buffer. So a load costs
    no memory beside the targets, however large the stored chunks are.

Note [Whole items are verified]
    An item with a checksum to verify is read whole, from front to back, and unwanted bytes are dropped.
    Without verification, only the wanted boxes are read.
"""

import io
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, Final, NamedTuple, Self, cast

import torch

from lamella_files._archives.metadata import DcpItem
from lamella_files._archives.objects import Expected, check_content, check_equal, check_record, damaged
from lamella_files._archives.torch_zip import FileSlice, TensorRecord, find_tensor
from lamella_files._base.errors import CheckpointDamaged
from lamella_files._base.file_boxes import Stored, is_plain_memory, read_box, write_mode
from lamella_layout import Chunk, Range

_PIECE_BYTES: Final = 16 << 20
_SMALL_BYTES: Final = 16 << 10
_MAX_THREADS: Final = 8


class Copy(NamedTuple):
    """A box of a stored chunk, in the chunk's own coordinates, and the destination tensor."""

    box: Chunk
    into: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class ItemRead:
    """All copies from one stored chunk: collected, so that the chunk is read once.

    `found` is the elements' place in the item, if known; `is_verified` means that an earlier read checked the checksum,
    as when a large chunk is read part by part.
    """

    name: str
    item: DcpItem
    sizes: tuple[int, ...]
    found: TensorRecord | None = None
    is_verified: bool = False
    copies: list[Copy] = field(default_factory=list)


def num_threads() -> int:
    """Number of reading threads: the process's CPUs, at most eight, as disks gain nothing from more."""
    return min(_MAX_THREADS, len(os.sched_getaffinity(0)))


def read_tensors(
    directory: Path,
    reads: Iterable[ItemRead],
    expected: Expected | None,
    on_item: Callable[[DcpItem], None] = lambda _: None,
) -> None:
    """Copy the wanted boxes of stored chunks.

    Args:
        directory: The directory of the checkpoint.
        reads: The reads in any order; each item once.
        expected: The checksums to verify; None verifies nothing.
        on_item: Called with each item after the read, on the calling thread.

    Raises:
        CheckpointDamaged: An item cannot be read, or differs from its checksum, or is no tensor of the expected shape.

    Effects: no collective; several threads, see Note [Memory during a load]; copies to accelerators on the calling
        thread's current streams.
    """
    for read, error in _outcomes(directory, reads, expected):
        if error is not None:
            raise error
        on_item(read.item)


def check_tensors(
    directory: Path, reads: Iterable[ItemRead], expected: Expected, on_item: Callable[[DcpItem], None]
) -> list[CheckpointDamaged]:
    """All errors of stored chunks, where `read_tensors` stops at the first.

    Effects: as `read_tensors`.
    """
    errors: list[CheckpointDamaged] = []
    for read, error in _outcomes(directory, reads, expected):
        on_item(read.item)
        errors += [error] if error is not None else []
    return errors


class _Files:
    """Descriptors of the files in use: opened for the first item, closed after the last one."""

    def __init__(self, directory: Path, num_items: Counter[str]) -> None:
        self._directory = directory
        self._num_left = num_items
        self._lock = Lock()
        self._descriptors: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    @contextmanager
    def opened(self, file: str) -> Iterator[int]:
        with self._lock:
            if file not in self._descriptors:
                try:
                    self._descriptors[file] = os.open(self._directory / file, os.O_RDONLY | os.O_CLOEXEC)
                except OSError as error:
                    raise CheckpointDamaged(str(self._directory / file), f"{type(error).__name__}: {error}") from error
            descriptor = self._descriptors[file]
        try:
            yield descriptor
        finally:
            with self._lock:
                self._num_left[file] -= 1
                if self._num_left[file] == 0:
                    os.close(self._descriptors.pop(file))  # A checkpoint may have more files than descriptors.


def _outcomes(
    directory: Path, reads: Iterable[ItemRead], expected: Expected | None
) -> Iterator[tuple[ItemRead, CheckpointDamaged | None]]:
    """Read the items, and yield each with its error in order of completion; closing the iterator cancels the rest."""
    ordered = sorted(reads, key=lambda read: (read.item.file, read.item.offset))
    streams = _streams(ordered)
    with _Files(directory, Counter(read.item.file for read in ordered)) as files:

        def run(read: ItemRead) -> tuple[ItemRead, CheckpointDamaged | None]:
            try:
                with files.opened(read.item.file) as descriptor, write_mode(copy.into for copy in read.copies):
                    _read_tensor(directory / read.item.file, descriptor, read, None if read.is_verified else expected)
            except CheckpointDamaged as error:
                return read, error
            return read, None

        threads = min(num_threads(), len(ordered))
        if threads <= 1:
            yield from map(run, ordered)
            return
        # Pool threads start on the device's default stream: copies there would not be ordered with the caller's stream.
        with ThreadPoolExecutor(threads, "lamella-checkpoint", lambda: _use(streams)) as pool:
            futures = [pool.submit(run, read) for read in ordered]
            try:
                for future in as_completed(futures):
                    yield future.result()
            finally:
                pool.shutdown(cancel_futures=True)


def _streams(reads: Sequence[ItemRead]) -> list[torch.Stream]:
    """The caller's current streams on the written accelerators: a new thread would use the default streams."""
    devices = {copy.into.device for read in reads for copy in read.copies if copy.into.device.type != "cpu"}
    return [torch.accelerator.current_stream(device) for device in devices]


def _use(streams: Sequence[torch.Stream]) -> None:
    for stream in streams:
        torch.accelerator.set_stream(stream)


def _read_tensor(file: Path, descriptor: int, read: ItemRead, expected: Expected | None) -> None:
    try:
        stored, record = FileSlice(descriptor, read.item.offset, read.item.length), read.found
        if record is None and read.item.length > _SMALL_BYTES:
            record = find_tensor(cast(BinaryIO, stored))
        if record is None:
            _copy_all(file, stored, read, expected)
        else:
            _check_sizes(file, read, record.shape)
            _copy_boxes(file, descriptor, read, record, expected)
    except (CheckpointDamaged, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # A garbage archive can raise any exception.
        raise damaged(file, read.name, error) from error


def _copy_boxes(
    file: Path, descriptor: int, read: ItemRead, tensor_record: TensorRecord, expected: Expected | None
) -> None:
    record, item = tensor_record.record, read.item
    crc = None if expected is None else expected(item)
    if crc is not None:
        sweep = _Sweep(descriptor, read, tensor_record)
        sweep.pass_over(0, record.start)
        sweep.copy_rows()
        sweep.pass_over(record.start + record.length, item.length)
        check_equal(file, read.name, (item.length, crc), (item.length, sweep.crc))
    elif expected is not None and record.crc is not None:
        sweep = _Sweep(descriptor, read, tensor_record)
        sweep.copy_rows()
        check_record(file, read.name, record, sweep.crc)
    else:
        stored = Stored(item.offset + record.start, tensor_record.shape, tensor_record.dtype)
        for box, into in read.copies:
            read_box(descriptor, stored, box, into)


def _copy_all(file: Path, stored: FileSlice, read: ItemRead, expected: Expected | None) -> None:
    """Copy via a whole tensor: for small items, and for tensors that only torch can read."""
    stored.seek(0)
    is_small = read.item.length <= _SMALL_BYTES
    content = io.BytesIO(stored.read(read.item.length)) if is_small else cast(BinaryIO, io.BufferedReader(stored))
    if expected is not None:
        check_content(file, read.name, read.item, content, expected)
    tensor = _tensor_in(content)
    if not isinstance(tensor, torch.Tensor):
        raise CheckpointDamaged(str(file), f"expected a tensor for {read.name!r}, got {type(tensor).__name__}")
    _check_sizes(file, read, tuple(tensor.shape))
    for copy in read.copies:
        copy.into.copy_(tensor[_slices(copy.box)])


def _tensor_in(content: BinaryIO) -> object:
    tensor_record = find_tensor(content)
    if tensor_record is None or 0 in tensor_record.shape:
        content.seek(0)
        return torch.load(content, map_location="cpu", weights_only=True)
    content.seek(tensor_record.record.start)
    return torch.frombuffer(bytearray(content.read(tensor_record.record.length)), dtype=tensor_record.dtype).view(
        tensor_record.shape
    )


def _check_sizes(file: Path, read: ItemRead, shape: tuple[int, ...]) -> None:
    if shape != read.sizes:
        raise CheckpointDamaged(str(file), f"expected a chunk of shape {read.sizes} of {read.name!r}, got {shape}")


def _slices(box: Chunk) -> tuple[slice, ...]:
    return tuple(slice(along.start, along.stop) for along in box.ranges)


class _Sweep:
    """One pass over a whole item, from front to back, that computes the checksum and copies the wanted rows."""

    def __init__(self, descriptor: int, read: ItemRead, record: TensorRecord) -> None:
        self._descriptor, self._item, self._record = descriptor, read.item, record
        # A scalar is treated as a row of one element.
        self._sizes = read.sizes or (1,)
        self._copies = (
            read.copies if read.sizes else [Copy(Chunk((0,), (1,)), copy.into.view(1)) for copy in read.copies]
        )
        self.crc = 0

    def pass_over(self, start: int, stop: int) -> None:
        """Read unwanted bytes of the item, for the checksum."""
        for begin in range(start, stop, _PIECE_BYTES):
            self._fill(memoryview(bytearray(min(_PIECE_BYTES, stop - begin))), begin)

    def copy_rows(self) -> None:
        """Read the tensor, piece by piece: Note [Memory during a load]."""
        rows, sizes, dtype = self._sizes[0], self._sizes[1:], self._record.dtype
        row_bytes = prod(sizes) * dtype.itemsize
        if not row_bytes:
            return
        step = max(1, _PIECE_BYTES // row_bytes)
        buffer: torch.Tensor | None = None
        for first in range(0, rows, step):
            piece = Range(first, min(first + step, rows))
            target = _direct(piece, sizes, dtype, self._copies)
            if target is None and buffer is None:
                # One buffer for all pieces: memory freed and taken anew stays with the allocator, for every thread.
                buffer = torch.empty(min(step, rows), *sizes, dtype=dtype)
            memory = cast(torch.Tensor, buffer)[: piece.numel] if target is None else target
            as_bytes: Any = memory.reshape(-1).view(torch.uint8).numpy()
            self._fill(memoryview(as_bytes), self._record.record.start + first * row_bytes)
            for box, into in self._copies if target is None else ():
                common = piece.intersection(box.ranges[0])
                if common.numel:
                    inner = memory[common.start - first : common.stop - first][:, *_slices(box)[1:]]
                    into[common.start - box.offsets[0] : common.stop - box.offsets[0]].copy_(inner)

    def _fill(self, view: memoryview, start: int) -> None:
        done, begin = 0, self._item.offset + start
        while done < len(view):
            num_read = os.preadv(self._descriptor, [view[done:]], begin + done)
            if num_read == 0:
                raise EOFError(f"the file ends {len(view) - done} bytes too early")
            done += num_read
        self.crc = zlib.crc32(view, self.crc)


def _direct(piece: Range, sizes: tuple[int, ...], dtype: torch.dtype, copies: Sequence[Copy]) -> torch.Tensor | None:
    """The view of the target that equals the piece bit by bit, as destination of the read; None without such a view."""
    if len(copies) != 1 or copies[0].box.sizes[1:] != sizes:
        return None
    [(box, into)] = copies
    if box.ranges[0].intersection(piece) != piece:
        return None
    part = into[piece.start - box.offsets[0] : piece.stop - box.offsets[0]]
    return part if is_plain_memory(part, dtype) else None
