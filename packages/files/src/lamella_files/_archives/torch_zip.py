"""Byte ranges of tensor elements in a file of `torch.save`: a zip archive with uncompressed records.

`zipfile` lists the archive, without the first byte of a record. This module takes the byte from the record's local
header, and boxes are read from there without the rest of the record.
"""

import io
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, cast

import torch

from lamella_files._base.boxes import are_sizes
from lamella_files._base.pickles import Inert, read_pickle
from lamella_files._base.small_files import MAX_NBYTES
from lamella_files._base.text import short

_PIECE_NBYTES: Final = 1 << 20
_DIRECTORY: Final = 0x10  # Of an entry's attributes, as in DOS.
_LOCAL_HEADER: Final = struct.Struct("<4s22xHH")  # signature, length of the name, length of the extra field


class Record(NamedTuple):
    """One file of the archive: name, byte range, and the archive's CRC-32; None without a CRC-32."""

    name: str
    start: int
    length: int
    crc: int | None


class TensorRecord(NamedTuple):
    """A contiguous tensor in the archive: shape, dtype, and a record with exactly the tensor's elements."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    record: Record


class FileSlice(io.RawIOBase):
    """Some bytes of an open file, read by position: several threads may share the file."""

    def __init__(self, descriptor: int, offset: int, length: int) -> None:
        super().__init__()
        self._descriptor, self._offset, self._length, self._position = descriptor, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        if origin + offset < 0:
            raise OSError(f"expected a position in the archive, got {origin + offset}")
        self._position = origin + offset
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        memory = memoryview(buffer)[: max(0, self._length - self._position)]
        num_read = os.preadv(self._descriptor, [memory], self._offset + self._position) if memory else 0
        self._position += num_read
        return num_read


def records(file: BinaryIO) -> dict[str, Record]:
    """The files of an archive by name, without the name of the archive's only directory.

    Raises:
        zipfile.BadZipFile: The file is no archive, or an archive in a form that torch does not write.
    """
    files: dict[str, Record] = {}
    num_bytes = file.seek(0, os.SEEK_END)
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
                raise zipfile.BadZipFile(f"{info.filename!r} is compressed")
            if info.external_attr & _DIRECTORY and info.file_size:  # torch leaves such an entry's memory unfilled.
                raise zipfile.BadZipFile(f"{info.filename!r} is marked as a directory, and has contents")
            file.seek(info.header_offset)
            signature, num_name, num_extra = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
            if signature != b"PK\3\4":
                raise zipfile.BadZipFile(f"no header of {info.filename!r} where it should be")
            start = info.header_offset + _LOCAL_HEADER.size + num_name + num_extra
            # torch can be told not to compute checksums, and then writes 0: such a record is treated as unchecked.
            crc = None if info.CRC == 0 and info.file_size else info.CRC
            name = info.filename.partition("/")[2]
            if start + info.file_size > num_bytes:
                raise zipfile.BadZipFile(f"{info.filename!r} ends behind the archive")
            if name in files:
                raise zipfile.BadZipFile(f"{name!r} is there twice")
            files[name] = Record(name, start, info.file_size, crc)
    return files


def check_places(path: Path, files: Mapping[str, Record]) -> None:
    """Compare the places of an archive's records with the places that torch finds: torch reads other zip fields.

    Raises:
        zipfile.BadZipFile: The places differ, or torch cannot open the archive.
    """
    try:
        reader: Any = torch._C.PyTorchFileReader(str(path))
        starts = {name: reader.get_record_offset(name) for name in reader.get_all_records()}
    except RuntimeError as error:
        raise zipfile.BadZipFile(str(error).partition("\n")[0]) from error
    if differing := {(record.name, record.start) for record in files.values()} ^ {*starts.items()}:
        raise zipfile.BadZipFile(f"torch reads other bytes as {min(differing)[0]!r} than the directory says")


def find_tensor(file: BinaryIO) -> TensorRecord | None:
    """Find the elements of the one tensor in an archive.

    Returns:
        None where the archive holds something else, or a tensor not stored plainly: with strides, with a conj or neg
        bit, with another byte order, or of a subclass. torch itself must read such a tensor.

    Raises:
        zipfile.BadZipFile: The file is no archive, or an archive in a form that torch does not write.
    """
    files = records(file)
    saved = read_pickle(read_record(file, files["data.pkl"]), knows=lambda *_: True)
    tensor = stored_tensor(saved, files) if is_little_endian(file, files) else None
    return tensor.whole if tensor is not None else None


def plain_data(file: BinaryIO) -> Any:
    """The value in an archive of numbers, text and containers of them: several times as fast as torch's reader.

    Raises:
        UnknownType: The archive holds a value of another type.
        Exception: Anything, where the file is no archive.
    """
    return read_pickle(read_record(file, records(file)["data.pkl"]), knows=lambda *_: False)


class StoredTensor(NamedTuple):
    """A tensor of an archive: a view of a storage, stored as a record.

    Offset and strides are in elements. The tensor's values are the conjugates (`is_conj`) or the negatives (`is_neg`)
    of the stored elements: torch saves the views `x.conj()` and `x.conj().imag` as `x` with a bit.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    record: Record
    offset: int
    strides: tuple[int, ...]
    is_conj: bool = False
    is_neg: bool = False

    @property
    def whole(self) -> TensorRecord | None:
        """The values' record, if the contiguous values fill the whole record."""
        is_whole = self.offset == 0 and self.record.length == prod(self.shape) * self.dtype.itemsize
        return TensorRecord(self.shape, self.dtype, self.record) if is_whole and self._is_readable else None

    @property
    def found(self) -> TensorRecord | None:
        """The values' byte range, if contiguous. A part of a record has no checksum."""
        if self.whole is not None or not self._is_readable:
            return self.whole
        return TensorRecord(self.shape, self.dtype, self._part(prod(self.shape)))

    @property
    def span(self) -> TensorRecord:
        """The elements of storage from the tensor's first to last, as one row; only for a tensor with elements."""
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return TensorRecord((last + 1,), self.dtype, self._part(last + 1))

    def view(self, elements: torch.Tensor) -> torch.Tensor:
        """The tensor with the values that `torch.load` gives, from the elements of `span`."""
        tensor = elements.as_strided(self.shape, self.strides)
        tensor = tensor.conj() if self.is_conj else tensor
        return tensor.neg() if self.is_neg else tensor

    def _part(self, numel: int) -> Record:
        """The part of the record with `numel` elements from the offset on."""
        itemsize = self.dtype.itemsize
        return self.record._replace(start=self.record.start + self.offset * itemsize, length=numel * itemsize, crc=None)

    @property
    def _is_readable(self) -> bool:
        """Whether the stored bytes are the values, in order."""
        return self.is_contiguous and not (self.is_conj or self.is_neg)

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements are contiguous."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size not in (0, 1) and stride != expected:
                return False
            expected *= size
        return True


_PLAIN_CLASSES: Final = ("torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Buffer")


def stored_tensor(saved: object, files: Mapping[str, Record]) -> StoredTensor | None:
    """The tensor described by an archive's pickle; None for any other value, and for tensors of other kinds.

    Raises:
        ValueError: The tensor exceeds its record.
    """
    if not isinstance(saved, Inert):
        return None
    match saved.kind, saved.args:
        case "torch._utils._rebuild_parameter" | "torch._utils._rebuild_parameter_with_state", (data, *_):
            return stored_tensor(data, files)
        case "torch._tensor._rebuild_from_type_v2", (type() as function, type() as kind, tuple(args), _) if (
            issubclass(function, Inert) and getattr(kind, "kind", "") in _PLAIN_CLASSES
        ):
            return stored_tensor(function(*args), files)  # A plain tensor with attributes, such as `nn.Buffer`.
        case "torch._utils._rebuild_tensor_v2", (storage, int(offset), tuple(shape), tuple(strides), _, _, *metadata):
            dtype = _dtype(storage)
        case (
            "torch._utils._rebuild_tensor_v3",
            (storage, int(offset), tuple(shape), tuple(strides), _, _, torch.dtype() as dtype, *metadata),
        ):
            pass
        case _:
            return None
    bits = None if dtype is None else _bits(metadata, dtype)
    match storage:
        case ("storage", _, str(key), *_) if f"data/{key}" in files and dtype is not None and bits is not None:
            tensor = StoredTensor(tuple(shape), dtype, files[f"data/{key}"], offset, tuple(strides), *bits)
            if len(shape) != len(strides) or not _fits(tensor):
                raise ValueError(
                    f"expected a tensor inside the {tensor.record.length} bytes of {key!r}, got {dtype} of shape "
                    f"{short(shape)} with strides {short(strides)} at {short(offset)}"
                )
            return tensor
        case _:
            return None


def _bits(metadata: list[Any], dtype: torch.dtype) -> tuple[bool, bool] | None:
    """The conj bit and the neg bit in torch's metadata of a tensor, if any; None for metadata that only torch reads."""
    match metadata:
        case []:
            return False, False
        case [dict() as bits] if bits.keys() <= {"conj", "neg"} and all(isinstance(bit, bool) for bit in bits.values()):
            is_conj, is_neg = bits.get("conj", False), bits.get("neg", False)
            is_possible = dtype.is_complex or (dtype.is_floating_point and not is_conj)
            return (is_conj, is_neg) if is_possible else None
        case _:
            return None


def storage_records(value: object) -> Iterator[str]:
    """Names of the records referenced by a value of an archive's pickle, including records of unsupported types."""
    match value:
        case ("storage", _, str(key), *_):
            yield f"data/{key}"
        case Inert(args=args, state=state, items=items):
            yield from storage_records((args, state, items))
        case dict():
            yield from storage_records((*value, *value.values()))
        case list() | tuple() | set() | frozenset():
            for element in value:
                yield from storage_records(element)


def is_little_endian(file: BinaryIO, files: Mapping[str, Record]) -> bool:
    """Whether numbers are stored in the byte order of the machines that torch runs on."""
    return "byteorder" not in files or read_record(file, files["byteorder"]) == b"little"


def read_record(file: BinaryIO, record: Record) -> bytes:
    """The contents of one small file of the archive, verified by the archive's checksum.

    Raises:
        zipfile.BadZipFile: The checksum differs, or the record exceeds the size limit for small files.
    """
    if record.length > MAX_NBYTES:
        raise zipfile.BadZipFile(f"expected {MAX_NBYTES} bytes at most for {record.name!r}, got {record.length}")
    file.seek(record.start)
    content = file.read(record.length)
    if record.crc is not None and zlib.crc32(content) != record.crc:
        raise zipfile.BadZipFile(f"the {record.length} bytes of {record.name!r} differ from their checksum")
    return content


def checksum(file: BinaryIO, start: int, length: int) -> tuple[int, int]:
    """The number of bytes read from a range of a file, and their CRC-32. Effects: holds one piece at a time."""
    file.seek(start)
    num_read = crc = 0
    while piece := file.read(min(_PIECE_NBYTES, length - num_read)):
        num_read, crc = num_read + len(piece), zlib.crc32(piece, crc)
    return num_read, crc


def _fits(tensor: StoredTensor) -> bool:
    """Whether the tensor lies inside the record, and shape, offset and strides are valid counts."""
    if not (
        are_sizes(tensor.shape) and are_sizes([tensor.offset]) and all(are_sizes([stride]) for stride in tensor.strides)
    ):
        return False
    last = tensor.offset + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True))
    return 0 in tensor.shape or (last + 1) * tensor.dtype.itemsize <= tensor.record.length


def storage_class(dtype: torch.dtype) -> type:
    """The class that pickles name for storages of a dtype, `torch.FloatStorage` and the like."""
    names: dict[torch.dtype, str] = {kind: name for name, kind in torch.storage._storage_type_to_dtype_map().items()}
    return cast(type, getattr(torch, names[dtype]))


def _dtype(storage: object) -> torch.dtype | None:
    """The dtype of a storage's class, `torch.FloatStorage` and the like."""
    match storage:
        case (_, type() as kind, *_):
            name = kind.__name__
        case _:
            return None
    dtypes: dict[str, torch.dtype] = torch.storage._storage_type_to_dtype_map()
    return dtypes.get(name)
