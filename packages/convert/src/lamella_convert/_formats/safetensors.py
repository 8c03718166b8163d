"""Safetensors files, one or many with an index, as a source of tensors.

Note [Safetensors without its library]
    The format is eight bytes, a JSON object, and the tensors row by row. The `safetensors` library maps a file and
    copies slices out of the map; here boxes are read straight into the memory of shards. A file truncated
    under a map, or a failing disk, ends the process by SIGBUS; a read raises an error with the file's name. Writes
    are in place, by many ranks or piece by piece, while the library writes whole files from one process.

    Measured on two cores, 768 MiB in six tensors, files in the page cache: whole tensors raise the peak of resident
    memory by 2 MiB, and by 771 MiB through the library's map, for the same 0.09 s of CPU time. Half of each row costs
    0.40 s of CPU time here (gaps below 32 KiB are read over) and 0.05 s in the library. The tests compare files of
    each implementation with the other's reader.
"""

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import torch

from lamella_checkpoint import CheckpointDamaged, TensorInfo, Wanted
from lamella_checkpoint.files import Stored, read_box, read_json, short, unreadable
from lamella_checkpoint.sources import are_sizes
from lamella_layout import Chunk

WEIGHTS_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"

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
_NUM_THREADS: Final = 8


def has_weights(directory: Path) -> bool:
    """Whether a directory has Hugging Face weights: one file, or an index of several."""
    return (directory / WEIGHTS_FILE).exists() or (directory / INDEX_FILE).exists()


class SafetensorsSource:
    """A `Source` over `<file>.safetensors`, or a directory with `model.safetensors` or its shards and their index.

    Names are the files' names. Without objects.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Read the headers, and compare them with each other, the files' lengths and the index.

        Raises:
            CheckpointDamaged: A file is absent, truncated or no safetensors file, tensors overlap or leave holes,
                or a file and the index disagree. The error names the file and the tensor.
            FileNotFoundError: The path is neither.

        Effects: reads the headers; no tensor.
        """
        self.path = Path(path)
        self._files: dict[Path, _File] = {}
        self._homes: dict[str, Path] = {}
        for file, names in _weights_files(self.path):
            opened = _File.read(file)
            _check_against_index(self.path / INDEX_FILE, file, opened.tensors, names)
            self._files[file] = opened
            self._homes.update(dict.fromkeys(opened.tensors, file))
        self._tensors = {name: _info(self._files[file].tensors[name]) for name, file in self._homes.items()}

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """As `Source.tensors`; each tensor is one chunk, with direct reads of any box."""
        return self._tensors

    @property
    def objects(self) -> Sequence[str]:
        """Empty: safetensors files hold tensors only."""
        return ()

    @property
    def files(self) -> tuple[Path, ...]:
        """The files with the tensors, in the order of the index."""
        return tuple(self._files)

    def read(self, wanted: Sequence[Wanted]) -> None:
        """As `Source.read`: only the boxes' bytes, in file order."""
        by_place = sorted(wanted, key=lambda each: (str(self._homes[each.name]), self._stored(each.name).start))
        streams = {each.into.device: _current_stream(each.into.device) for each in wanted}
        with ExitStack() as open_files:
            descriptors = {file: self._open(file, open_files) for file in {self._homes[each.name] for each in wanted}}
            pool = open_files.enter_context(ThreadPoolExecutor(_NUM_THREADS))
            for _ in pool.map(lambda each: self._read(descriptors, streams[each.into.device], each), by_place):
                pass

    def read_object(self, name: str) -> object:
        """Raise: safetensors files hold no objects.

        Raises:
            KeyError: Always.
        """
        raise KeyError(name)

    def _stored(self, name: str) -> Stored:
        return self._files[self._homes[name]].tensors[name]

    def _open(self, file: Path, open_files: ExitStack) -> int:
        try:
            descriptor = os.open(file, os.O_RDONLY)
        except OSError as error:
            raise unreadable(file, error) from error
        open_files.callback(os.close, descriptor)
        if _identity(descriptor) != self._files[file].identity:
            raise CheckpointDamaged(str(file), "it was replaced after its header had been read")
        return descriptor

    def _read(self, descriptors: Mapping[Path, int], stream: torch.Stream | None, wanted: Wanted) -> None:
        """Read one box, on a thread of the pool."""
        file = self._homes[wanted.name]
        assert wanted.into.shape == wanted.chunk.sizes, wanted
        if stream is not None:
            torch.accelerator.set_stream(stream)  # Current streams are per thread: copies follow the caller's order.
        try:
            with torch.no_grad():
                read_box(descriptors[file], self._stored(wanted.name), wanted.chunk, wanted.into)
        except (OSError, EOFError) as error:
            raise CheckpointDamaged(str(file), f"{wanted.name!r}: {type(error).__name__}: {error}") from error


class _File(NamedTuple):
    """One file's header: the file's identity at the read, and the tensors' places."""

    identity: tuple[int, ...]
    tensors: dict[str, Stored]

    @classmethod
    def read(cls, file: Path) -> "_File":
        """Read and check a header."""
        try:
            descriptor = os.open(file, os.O_RDONLY)
        except OSError as error:
            raise unreadable(file, error) from error
        try:
            header, start = _read_header(descriptor, os.fstat(descriptor).st_size)
            tensors = {name: _entry(name, entry, start) for name, entry in header.items() if name != "__metadata__"}
            _check_cover(tensors, start, os.fstat(descriptor).st_size)
            return cls(_identity(descriptor), tensors)
        except (OSError, ValueError) as error:
            raise CheckpointDamaged(str(file), str(error)) from error
        finally:
            os.close(descriptor)


def _weights_files(path: Path) -> Iterator[tuple[Path, frozenset[str] | None]]:
    """Each file of a model with the index's names for it; None without an index."""
    if path.is_file():
        yield path, None
    elif (path / WEIGHTS_FILE).is_file():
        yield path / WEIGHTS_FILE, None
    elif (path / INDEX_FILE).is_file():
        yield from _read_index(path / INDEX_FILE).items()
    else:
        raise FileNotFoundError(
            f"Expected a safetensors file, or a directory with {WEIGHTS_FILE!r} or {INDEX_FILE!r}, got {str(path)!r}."
        )


def _read_index(index: Path) -> dict[Path, frozenset[str]]:
    """The index's files with their tensors' names, in order.

    File names may not lead elsewhere. Links may: the hub's cache consists of links, and a foreign checkpoint brings
    names, not links on this machine.
    """
    try:
        weight_map = read_json(index, pairs=_without_duplicates)["weight_map"]
        names: dict[str, list[str]] = {}
        for name, file in weight_map.items():
            names.setdefault(os.fspath(file), []).append(name)
    except (KeyError, TypeError, AttributeError) as error:
        raise unreadable(index, error) from error
    for file, held in names.items():
        if Path(file).name != file or file in ("", ".."):
            raise CheckpointDamaged(str(index), f"it leads outside, to {file!r} for {held[0]!r}")
        if not os.path.isfile(index.parent / file):
            raise CheckpointDamaged(str(index.parent / file), f"absent, and the index has {held[0]!r} in it")
    return {index.parent / file: frozenset(held) for file, held in names.items()}


def _check_against_index(index: Path, file: Path, held: Iterable[str], expected: frozenset[str] | None) -> None:
    for name in sorted(set() if expected is None else expected.symmetric_difference(held)):
        where = "in its index and not" if name in (expected or ()) else "not in its index and"
        raise CheckpointDamaged(str(file), f"{name!r} is {where} in the file: {str(index)!r}")


def _read_header(descriptor: int, file_nbytes: int) -> tuple[dict[str, Any], int]:
    """The header, and the first byte of the data."""
    nbytes = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if file_nbytes < 8 or nbytes > min(file_nbytes - 8, _MAX_HEADER_NBYTES):
        raise ValueError(f"its header would be {nbytes} bytes long, in a file of {file_nbytes}")
    try:
        header = json.loads(os.pread(descriptor, nbytes, 8), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its header is no JSON: {error}") from error
    if not isinstance(header, dict):
        raise ValueError(f"its header is no JSON object, but {type(header).__name__}")
    return header, 8 + nbytes


def _entry(name: str, entry: object, start: int) -> Stored:
    """The place of a tensor, from the header's entry."""
    try:
        code, shape, (first, end) = (cast(Any, entry)[key] for key in ("dtype", "shape", "data_offsets"))
        is_known, are_counts = code in DTYPES, are_sizes(shape) and are_sizes([first]) and are_sizes([end])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{name!r}: expected dtype, shape and data_offsets, got {short(entry)}") from error
    if not is_known:
        raise ValueError(f"{name!r}: expected a dtype of whole bytes that torch has, got {short(code)}")
    if not are_counts:
        raise ValueError(
            f"{name!r}: expected counts of 0 or more, got shape {short(shape)} at bytes {short(first)} to {short(end)}"
        )
    nbytes = prod(shape) * DTYPES[code].itemsize
    if end - first != nbytes:
        raise ValueError(f"{name!r}: expected {nbytes} bytes for {code} of shape {shape!r}, got bytes {first} to {end}")
    return Stored(start + first, tuple(shape), DTYPES[code])


def _check_cover(tensors: Mapping[str, Stored], start: int, file_nbytes: int) -> None:
    """Check that the tensors are contiguous and end at the file's end; the format forbids holes."""
    position, previous = start, "the header"
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if stored.start != position:
            what = "overlaps" if stored.start < position else "leaves a hole behind"
            raise ValueError(f"{name!r} at byte {stored.start - start} {what} {previous}")
        position, previous = position + stored.nbytes, repr(name)
        if position > file_nbytes:
            raise ValueError(f"truncated: {name!r} ends at byte {position}, and the file at {file_nbytes}")
    if position < file_nbytes:
        raise ValueError(f"{file_nbytes - position} bytes behind {previous} are no tensor's")


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
        raise ValueError(f"{twice!r} appears twice")
    return found


def _info(stored: Stored) -> TensorInfo:
    return TensorInfo(stored.shape, stored.dtype, (Chunk((0,) * len(stored.shape), stored.shape),))


def _identity(descriptor: int) -> tuple[int, ...]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _current_stream(device: torch.device) -> torch.Stream | None:
    return None if device.type == "cpu" else torch.accelerator.current_stream(device)
