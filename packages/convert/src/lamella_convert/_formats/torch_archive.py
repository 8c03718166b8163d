"""A file of `torch.save`, written piece by piece: a zip archive whose records have places before they have contents.

Note [Filling an archive]
    The archive's pickle is written first, with blank tensors: shape and dtype without memory. Every storage
    then has a place, at a multiple of 64 bytes as in torch's own archives, and boxes are filled one by one, in any
    order. A record's header and the archive's directory need the record's CRC-32 (torch's readers ignore the CRC-32,
    this package's readers compare it). Boxes in the order of the file are summed while they are written; a
    record filled in another order is read once more.

    torch itself writes such an archive for fake tensors under `skip_data`. The import of its fake mode costs as much
    as half a gigabyte, its archive does not tell the places of storages, and tensors inside other values lose their
    data.
"""

import io
import os
import pickle
import struct
import sys
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, NamedTuple, Self

import torch
from torch.storage import TypedStorage, UntypedStorage

from lamella_files import Stored, checksum, storage_class, whole_box, write_box
from lamella_layout import Chunk

_ALIGNMENT: Final = 64  # As of torch's writer: mapped tensors start at cache lines.
_PADDING: Final = struct.Struct("<2sH")  # An extra field of a record's header, as torch pads: a tag and the length.
_PROTOCOL: Final = 2  # As of `torch.save`.


@dataclass(frozen=True, eq=False)
class BlankTensor:
    """A tensor without memory, in contents to save. The same blank at two places is one tensor with two names."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(eq=False)
class _PlacedRecord:
    """A file of the archive. `stored` is the place of the elements; bytes before `num_summed` are in `crc`."""

    info: zipfile.ZipInfo
    stored: Stored
    num_summed: int = 0
    crc: int = 0


class _BlankStorage(NamedTuple):
    """A storage without memory, as the pickle refers to it."""

    key: str
    kind: type
    numel: int


_STORAGES: Final = (_BlankStorage, TypedStorage, UntypedStorage)


class TorchArchive:
    """A new file of `torch.save` with a place for every tensor of some contents; a context that completes the file."""

    def __init__(self, path: Path, contents: object) -> None:
        """Create the file with all contents but the elements of blank tensors.

        Args:
            path: Does not exist.
            contents: The value to save: plain data, tensors and `BlankTensor`s.

        Raises:
            OSError: The file cannot be written.
        """
        pickled = _ContentsPickler(contents)
        self._end = 0
        self._records: list[_PlacedRecord] = []
        self._blank_records: dict[BlankTensor, _PlacedRecord] = {}
        self._file: BinaryIO = path.open("xb+")
        try:
            self._begin(pickled)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        with self._file:
            if kind is None:
                self._complete()

    def write(self, blank: BlankTensor, chunk: Chunk, values: torch.Tensor) -> None:
        """Fill a box of a blank tensor.

        Args:
            blank: A tensor of the contents.
            chunk: The box. All boxes together cover the tensor; boxes in the order of memory are cheapest.
            values: The box's elements, contiguous on the host, of the blank's dtype.

        Raises:
            OSError: The file cannot be written.
        """
        self._write(self._blank_records[blank], chunk, values)

    def _begin(self, pickled: "_ContentsPickler") -> None:
        small = {"data.pkl": pickled.content, "byteorder": sys.byteorder.encode(), "version": b"3\n"}
        for name, content in small.items():
            self._fill(name, torch.frombuffer(bytearray(content), dtype=torch.uint8))
        for key, storage in enumerate(pickled.storages):
            if isinstance(storage, BlankTensor):
                self._blank_records[storage] = self._add(f"data/{key}", storage.shape, storage.dtype)
            else:
                self._fill(f"data/{key}", torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).cpu())

    def _write(self, record: _PlacedRecord, chunk: Chunk, values: torch.Tensor) -> None:
        first, numel = record.stored.span(chunk)
        write_box(self._file.fileno(), record.stored, chunk, values)
        if first == record.stored.start + record.num_summed and numel == chunk.numel:
            elements: Any = values.reshape(-1).view(torch.uint8).numpy()
            record.crc = zlib.crc32(elements, record.crc)
            record.num_summed += values.nbytes

    def _fill(self, name: str, elements: torch.Tensor) -> None:
        record = self._add(name, tuple(elements.shape), elements.dtype)
        self._write(record, whole_box(record.stored.shape), elements)

    def _add(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> _PlacedRecord:
        """Append a record; the header is written in the end."""
        info = zipfile.ZipInfo(f"archive/{name}")
        info.header_offset, info.CRC = self._end, 0
        info.file_size = info.compress_size = prod(shape) * dtype.itemsize
        start = self._end + len(info.FileHeader()) + _PADDING.size
        num_padding = -start % _ALIGNMENT
        info.extra = _PADDING.pack(b"FB", num_padding) + bytes(num_padding)
        record = _PlacedRecord(info, Stored(start + num_padding, shape, dtype))
        self._records.append(record)
        self._end = record.stored.start + info.file_size
        return record

    def _complete(self) -> None:
        """Write the headers and the directory, and wait until all contents are on the disk."""
        for record in self._records:
            info = record.info
            is_summed = record.num_summed == info.file_size
            info.CRC = record.crc if is_summed else checksum(self._file, record.stored.start, info.file_size)[1]
            self._file.seek(info.header_offset)
            self._file.write(info.FileHeader())
            info.extra = b""  # The directory needs no padding.
        with zipfile.ZipFile(self._file, "w") as directory:
            directory.infolist().extend(record.info for record in self._records)
            directory.start_dir = self._end
        self._file.flush()
        os.fsync(self._file.fileno())


class _ContentsPickler(pickle.Pickler):
    """The pickle of some contents in torch's form, and the storages by number."""

    def __init__(self, contents: object) -> None:
        stream = io.BytesIO()
        super().__init__(stream, protocol=_PROTOCOL)
        self.storages: list[BlankTensor | UntypedStorage] = []
        self._keys: dict[int, str] = {}
        self.dump(contents)
        self.content = stream.getvalue()

    def reducer_override(self, value: object) -> Any:
        """Reduce a blank tensor as torch reduces a tensor."""
        if not isinstance(value, BlankTensor):
            return NotImplemented
        rebuild, kind, last_arguments = _reduction(value.dtype)
        is_typed = kind is not UntypedStorage
        numel = prod(value.shape) * (1 if is_typed else value.dtype.itemsize)
        storage = _BlankStorage(str(len(self.storages)), kind, numel)
        self.storages.append(value)
        return rebuild, (storage, 0, value.shape, _strides(value.shape), False, OrderedDict(), *last_arguments)

    def persistent_id(self, value: object) -> object:
        """Name the record of a storage, blank or not."""
        if not isinstance(value, _STORAGES):  # Asked of each number and each name.
            return None
        if isinstance(value, _BlankStorage):
            return "storage", value.kind, value.key, "cpu", value.numel
        if isinstance(value, TypedStorage):
            storage = value._untyped_storage
            numel = storage.nbytes() // value.dtype.itemsize
            return "storage", storage_class(value.dtype), self._key(storage), "cpu", numel
        return "storage", UntypedStorage, self._key(value), "cpu", value.nbytes()

    def _key(self, storage: UntypedStorage) -> str:
        if storage._cdata not in self._keys:
            self._keys[storage._cdata] = str(len(self.storages))
            self.storages.append(storage)
        return self._keys[storage._cdata]


@lru_cache(maxsize=1024)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return Stored(0, shape, torch.uint8).strides


@cache
def _reduction(dtype: torch.dtype) -> tuple[Callable[..., torch.Tensor], type, tuple[object, ...]]:
    """Torch's reduction of a tensor: the rebuilding function, the storage's class, and arguments behind the hooks."""
    tensor: Any = torch.empty(0, dtype=dtype)
    rebuild, arguments = tensor.__reduce_ex__(_PROTOCOL)
    is_typed = isinstance(arguments[0], TypedStorage)
    return rebuild, storage_class(dtype) if is_typed else UntypedStorage, arguments[6:]
