"""Hugging Face's safetensors files: planned from names and shapes, created in full length, filled in any order.

Note [Files with many writers]
    A safetensors file is flat: a planned header determines every element's place. Files are created first, and each
    holder of a box writes the box in place, rows or columns, in any order: a conversion piece by piece, or each rank's
    shards, without communication. The `safetensors` library cannot: the library writes a file from one process
    holding all of its tensors.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import torch

from lamella_convert._formats.safetensors_files import INDEX_FILE, WEIGHTS_FILE
from lamella_convert._formats.safetensors_header import DTYPES
from lamella_files import Stored, write_box
from lamella_layout import Chunk

MAX_SHARD_NBYTES: Final = 5_000_000_000
"""The hub's own limit for one file."""

_CODES: Final = {dtype: code for code, dtype in DTYPES.items()}
_ALIGNMENT: Final = 8


class Blank(NamedTuple):
    """A tensor to write."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * self.dtype.itemsize


class PlannedFile(NamedTuple):
    """A file to create: the header, and the tensors' places."""

    name: str
    header: bytes
    tensors: Mapping[str, Stored]

    @property
    def nbytes(self) -> int:
        """The file's length."""
        return len(self.header) + sum(stored.nbytes for stored in self.tensors.values())


def stored_dtype(dtype: torch.dtype, target_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype to store: `wanted` for floating point wider than a byte (float8 weights have scales, and stay)."""
    return target_dtype if target_dtype is not None and dtype.is_floating_point and dtype.itemsize > 1 else dtype


def plan_files(tensors: Mapping[str, Blank], max_shard_nbytes: int = MAX_SHARD_NBYTES) -> tuple[PlannedFile, ...]:
    """Assign tensors to files, in order, as many as fit into each; a larger tensor gets a separate file.

    Raises:
        TypeError: The format lacks a tensor's dtype.
        ValueError: No tensors, or a tensor has the format's reserved name for metadata.

    Equal on every rank with the same names, shapes and dtypes.
    """
    if not tensors:
        raise ValueError("Expected tensors to write, got none.")
    shards: list[dict[str, Blank]] = []
    num_free = 0
    for name, blank in tensors.items():
        if not shards or (blank.nbytes > num_free and shards[-1]):
            shards.append({})
            num_free = max_shard_nbytes
        shards[-1][name] = blank
        num_free -= blank.nbytes
    if len(shards) == 1:
        return (plan_file(WEIGHTS_FILE, shards[0]),)
    names = (f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1))
    return tuple(map(plan_file, names, shards))


def plan_file(name: str, tensors: Mapping[str, Blank]) -> PlannedFile:
    """Lay tensors out in one file. Raises and Effects: as `plan_files`."""
    _check_storable(tensors)
    # The library maps files into memory and views them: wider elements come first, or later tensors were misaligned.
    ordered = sorted(tensors, key=lambda tensor_name: -tensors[tensor_name].dtype.itemsize)
    offsets: dict[str, int] = {}
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor_name in ordered:
        blank, first = tensors[tensor_name], end
        end += blank.nbytes
        offsets[tensor_name] = first
        entries[tensor_name] = {
            "dtype": _CODES[blank.dtype],
            "shape": list(blank.shape),
            "data_offsets": [first, end],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    start = 8 + len(text)
    stored = {tensor_name: Stored(start + first, *tensors[tensor_name]) for tensor_name, first in offsets.items()}
    return PlannedFile(name, len(text).to_bytes(8, "little") + text, stored)


def make_files(directory: Path, files: Iterable[PlannedFile]) -> None:
    """Create the files, in full length and with headers, and without the tensors' contents."""
    for file in files:
        with (directory / file.name).open("xb") as opened:
            opened.write(file.header)
            opened.truncate(file.nbytes)


def write_index(directory: Path, files: Sequence[PlannedFile]) -> None:
    """Write the index of tensors by file, if there are several files."""
    if len(files) == 1:
        return
    index = {
        "metadata": {"total_size": sum(stored.nbytes for file in files for stored in file.tensors.values())},
        "weight_map": {name: file.name for file in files for name in file.tensors},
    }
    with (directory / INDEX_FILE).open("x", encoding="utf-8") as opened:
        json.dump(index, opened, indent=2, sort_keys=True)
        opened.write("\n")
        opened.flush()
        os.fsync(opened.fileno())


class FileFilling:
    """Open files to fill with boxes of their tensors."""

    def __init__(self, directory: Path, files: Iterable[PlannedFile]) -> None:
        self._directory = directory
        self._homes = {name: file for file in files for name in file.tensors}
        self._descriptors: dict[str, int] = {}
        self._open_files = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._open_files.close()

    def write(self, name: str, chunk: Chunk, values: torch.Tensor) -> None:
        """Write a box in place, cast to the file's dtype. Effects: opens the file at its first box."""
        file = self._homes[name]
        if chunk.numel:
            write_box(self._descriptor(file.name), file.tensors[name], chunk, values)

    def sync(self) -> None:
        """Wait until all written data is on the disk."""
        for descriptor in self._descriptors.values():
            os.fsync(descriptor)

    def _descriptor(self, file: str) -> int:
        if file not in self._descriptors:
            self._descriptors[file] = os.open(self._directory / file, os.O_WRONLY)
            self._open_files.callback(os.close, self._descriptors[file])
        return self._descriptors[file]


def _check_storable(tensors: Mapping[str, Blank]) -> None:
    if "__metadata__" in tensors:
        raise ValueError("Expected no tensor to be named '__metadata__', which safetensors keeps for itself.")
    for name, blank in tensors.items():
        if not _is_text(name):
            raise ValueError(f"Expected names that can be written in UTF-8, got {name!r}.")
        if blank.dtype not in _CODES:
            raise TypeError(
                f"Expected dtypes that safetensors has, got {blank.dtype} for {name!r}. Pass a `dtype` to cast "
                f"floating point; leave others out."
            )


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
