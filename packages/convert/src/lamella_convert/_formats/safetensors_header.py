"""One safetensors file's header, checked against the file: names, dtypes, shapes, places."""

import json
import os
from collections import Counter
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import torch

from lamella_files import CheckpointDamaged, Stored, are_sizes, short, unreadable

DTYPES: Final[Mapping[str, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The format's names of dtypes. The format has no complex128, and F4 and F6 elements are no whole bytes."""

_MAX_HEADER_NBYTES: Final = 100_000_000  # The library's own limit.
_METADATA: Final = "__metadata__"
_SHARDING: Final = "DCP_SHARDING_INFO"
_OFFSETS: Final = "saved_offsets"


class Header(NamedTuple):
    """A file's header.

    `identity` is the file's at the read; `tensors` are the tensors' places; `offsets` those of a rank's parts in the
    whole tensors, by name, where torch's `HuggingFaceStorageWriter` wrote the file.
    """

    identity: tuple[int, ...]
    tensors: dict[str, Stored]
    offsets: dict[str, tuple[int, ...]]

    @classmethod
    def read(cls, file: Path) -> "Header":
        """Read and check a header.

        Raises:
            CheckpointDamaged: The file is absent, truncated or no safetensors file, or tensors overlap or leave holes.
        """
        try:
            descriptor = os.open(file, os.O_RDONLY)
        except OSError as error:
            raise unreadable(file, error) from error
        try:
            nbytes = os.fstat(descriptor).st_size
            header, start = _read_header(descriptor, nbytes)
            metadata = header.pop(_METADATA, None)
            tensors = {name: _entry(name, entry, start) for name, entry in header.items()}
            _check_cover(tensors, start, nbytes)
            return cls(identity(descriptor), tensors, _offsets(metadata, tensors))
        except (OSError, ValueError) as error:
            raise CheckpointDamaged(str(file), str(error)) from error
        finally:
            os.close(descriptor)

    @property
    def has_parts(self) -> bool:
        """Whether a tensor is certainly a part: it begins inside the whole tensor."""
        return any(any(offsets) for offsets in self.offsets.values())


def identity(descriptor: int) -> tuple[int, ...]:
    """A value that changes when a file is replaced or written."""
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Make a JSON object, for `read_json`. Raises: ValueError: A name appears twice."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        twice = next(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
        raise ValueError(f"{twice!r} appears twice")
    return fields


def _read_header(descriptor: int, file_nbytes: int) -> tuple[dict[str, Any], int]:
    """The header, and the first byte of the data."""
    nbytes = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if file_nbytes < 8 or nbytes > min(file_nbytes - 8, _MAX_HEADER_NBYTES):
        raise ValueError(f"its header would be {nbytes} bytes long, in a file of {file_nbytes}")
    try:
        # Given bytes, `json` would take UTF-16 too, and a mark of byte order, which the library refuses.
        header = json.loads(os.pread(descriptor, nbytes, 8).decode(), object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its header is no JSON: {error}") from error
    if not isinstance(header, dict):
        raise ValueError(f"its header is no JSON object, but {type(header).__name__}")
    return header, 8 + nbytes


def _offsets(metadata: object, tensors: Mapping[str, Stored]) -> dict[str, tuple[int, ...]]:
    """The tensors' offsets in the whole tensors, from the entry that torch's writer adds to the metadata."""
    text = metadata.get(_SHARDING) if isinstance(metadata, dict) else None
    if text is None:
        return {}
    try:
        entries = json.loads(text, object_pairs_hook=without_duplicates)
        offsets = {name: tuple(entries[name][_OFFSETS]) for name in tensors}
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"expected the offsets of each tensor as {_SHARDING}, got {short(text)}: {error!r}") from error
    for name, stored in tensors.items():
        if len(offsets[name]) != len(stored.shape) or not are_sizes(offsets[name]):
            raise ValueError(f"{name!r}: expected {len(stored.shape)} offsets, got {short(offsets[name])}")
    return offsets


def _entry(name: str, entry: object, start: int) -> Stored:
    """The place of a tensor, from the header's entry."""
    try:
        fields = cast(Any, entry)
        code, shape, (first, end) = fields["dtype"], fields["shape"], fields["data_offsets"]
        dtype, are_counts = DTYPES.get(code), are_sizes(shape) and are_sizes((first,)) and are_sizes((end,))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{name!r}: expected dtype, shape and data_offsets, got {short(entry)}") from error
    if dtype is None:
        raise ValueError(f"{name!r}: expected a dtype of whole bytes that torch has, got {short(code)}")
    if not are_counts:
        raise ValueError(
            f"{name!r}: expected counts of 0 or more, got shape {short(shape)} at bytes {short(first)} to {short(end)}"
        )
    nbytes = prod(shape) * dtype.itemsize
    if end - first != nbytes:
        raise ValueError(f"{name!r}: expected {nbytes} bytes for {code} of shape {shape!r}, got bytes {first} to {end}")
    return Stored(start + first, tuple(shape), dtype)


def _check_cover(tensors: Mapping[str, Stored], start: int, file_nbytes: int) -> None:
    """Check that the tensors are contiguous and end at the file's end; the format forbids holes."""
    position, previous = start, "the header"
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if stored.start != position:
            fault = "overlaps" if stored.start < position else "leaves a hole behind"
            raise ValueError(f"{name!r} at byte {stored.start - start} {fault} {previous}")
        position, previous = position + stored.nbytes, repr(name)
        if position > file_nbytes:
            raise ValueError(f"truncated: {name!r} ends at byte {position}, and the file at {file_nbytes}")
    if position < file_nbytes:
        raise ValueError(f"{file_nbytes - position} bytes behind {previous} are no tensor's")
