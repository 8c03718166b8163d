"""The contents of a checkpoint as a tree: for people, and as JSON."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from lamella_convert._formats.open import Format, open_checkpoint
from lamella_files import Source, printable, short


class Entry(NamedTuple):
    """A tensor, or an object (without a shape).

    `nbytes` is the size of the values; tied names count each.
    """

    name: str
    shape: tuple[int, ...] | None
    dtype: str | None
    num_chunks: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """The contents of a checkpoint, without the values.

    Attributes:
        path: The file or directory; the directory of one iteration among several.
        format: The format of its files.
        entries: Tensors, then objects, in the order of the files.
        files: Sizes in bytes, by name.
        extra: Plain values beside the tensors.
        stripped: Keys and prefixes removed from the stored names.
        lacking: Values missing for a resumed run of the writing program.
    """

    path: Path
    format: Format
    entries: tuple[Entry, ...]
    files: Mapping[str, int]
    extra: Mapping[str, Any] = field(default_factory=dict)
    stripped: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(entry.nbytes for entry in self.entries)

    def lines(self, *, depth: int | None = None) -> Iterator[str]:
        """The tree as text: a line for each name, and one for each common part of names, with totals.

        Args:
            depth: How many parts of a name are shown; deeper parts are summed up. None shows all.
        """
        num_tensors = sum(entry.shape is not None for entry in self.entries)
        yield printable(
            f"{self.path}: {self.format.value}, {num_tensors} tensors of {_size(self.nbytes)}, {_files(self.files)}"
        )
        for name, value in self.extra.items():
            yield f"  {printable(name)} = {short(value)}"
        if self.stripped:
            yield printable(f"  left out of names: {', '.join(self.stripped)}")
        if self.lacking:
            yield f"  lacking: {', '.join(self.lacking)}"
        root = _Node()
        for entry in self.entries:
            root.add(entry)
        yield from root.lines("  ", depth)

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def as_json(self) -> dict[str, Any]:
        """The same for programs: plain data for JSON."""
        return {
            "path": str(self.path),
            "format": self.format.value,
            "nbytes": self.nbytes,
            "files": dict(self.files),
            "extra": {name: _jsonable(value) for name, value in self.extra.items()},
            "stripped": list(self.stripped),
            "lacking": list(self.lacking),
            "entries": [
                {**entry._asdict(), "shape": None if entry.shape is None else list(entry.shape)}
                for entry in self.entries
            ],
        }


def inspect(path: str | os.PathLike[str], *, trust: bool = False, native: bool = False) -> Inspection:
    """List the contents of a checkpoint of any format.

    Args:
        path: Its file or directory.
        trust: Allow unpickling of types beyond plain data and torch's own. **Unsafe: can execute code.**
        native: Whether to list native names, rather than stored names.

    Raises:
        CheckpointDamaged: The conditions of `open_checkpoint`.
        CheckpointUntrusted: The conditions of `open_checkpoint`.
        FileNotFoundError: The path does not exist.
        SizeUnknown: Native names are wanted, as for `OpenCheckpoint.source`.

    Effects: reads metadata and small files, and no tensor; no collective, no accelerator.
    """
    opened = open_checkpoint(path, trust=trust)
    return Inspection(
        path=opened.path,
        format=opened.format,
        entries=tuple(_entries(opened.source if native else opened.raw)),
        files=_file_sizes(opened.path),
        extra=opened.extra,
        stripped=opened.stripped,
        lacking=opened.lacking,
    )


def _entries(source: Source) -> Iterator[Entry]:
    for name, info in source.tensors.items():
        dtype = str(info.dtype).removeprefix("torch.")
        yield Entry(name, tuple(info.shape), dtype, len(info.chunks), prod(info.shape) * info.dtype.itemsize)
    for name in source.objects:
        yield Entry(name, None, None, 0, 0)


def _file_sizes(path: Path) -> dict[str, int]:
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file())
    return {file.name: file.stat().st_size for file in files}


class _Node:
    """A part of names, with the entries below."""

    __slots__ = ("entry", "inner", "nbytes", "num_objects", "num_tensors")

    def __init__(self) -> None:
        self.entry: Entry | None = None
        self.inner: dict[str, _Node] = {}
        self.num_tensors = self.num_objects = self.nbytes = 0

    def add(self, entry: Entry) -> None:
        node = self
        for part in entry.name.split("."):
            node._count(entry)
            if part not in node.inner:  # Not `setdefault`, which would make a node for each part of each name.
                node.inner[part] = _Node()
            node = node.inner[part]
        node.entry = entry

    def lines(self, indent: str, depth: int | None) -> Iterator[str]:
        """A line for each part, down to a depth. Not recursive: a name may have any number of parts."""
        levels = [iter(self.inner.items())]
        while levels:
            part, node = next(levels[-1], ("", None))
            if node is None:
                levels.pop()
                continue
            while len(node.inner) == 1 and node.entry is None:  # Parts without siblings share a line.
                ((inner_part, inner),) = node.inner.items()
                part, node = f"{part}.{inner_part}", inner
            text = node._total() if node.entry is None else _description(node.entry)
            yield f"{indent}{'  ' * (len(levels) - 1)}{printable(part)}  {text}"
            if node.inner and (depth is None or depth > len(levels)):
                levels.append(iter(node.inner.items()))

    def _count(self, entry: Entry) -> None:
        self.num_tensors += entry.shape is not None
        self.num_objects += entry.shape is None
        self.nbytes += entry.nbytes

    def _total(self) -> str:
        tensors = f"{self.num_tensors} tensors, {_size(self.nbytes)}" if self.num_tensors else ""
        objects = f"{self.num_objects} objects" if self.num_objects else ""
        return ", ".join(filter(None, (tensors, objects)))


def _description(entry: Entry) -> str:
    if entry.shape is None:
        return "object"
    chunks = "" if entry.num_chunks == 1 else f", {entry.num_chunks} chunks"
    return f"{entry.dtype} {list(entry.shape)}, {_size(entry.nbytes)}{chunks}"


def _size(nbytes: int) -> str:
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _files(files: Mapping[str, int]) -> str:
    num = len(files)
    return f"{num} {'file' if num == 1 else 'files'} of {_size(sum(files.values()))}"


def _jsonable(value: object) -> Any:
    if isinstance(value, dict):
        return {str(key): _jsonable(element) for key, element in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(element) for element in value]
    is_plain = isinstance(value, bool | float | str | None) or (isinstance(value, int) and value.bit_length() < 1024)
    return value if is_plain else short(value)
