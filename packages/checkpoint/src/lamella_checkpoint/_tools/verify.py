"""Whether a checkpoint is whole: every byte against its checksum, every tensor against its chunks, every file."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from lamella_checkpoint._base.boxes import first_overlap
from lamella_checkpoint._base.directories import METADATA_FILE
from lamella_checkpoint._base.errors import CheckpointDamaged, CheckpointUntrusted
from lamella_checkpoint._base.manifest import FILE as MANIFEST_FILE
from lamella_checkpoint._base.manifest import Manifest
from lamella_checkpoint._base.small_files import file_size, read_bytes
from lamella_checkpoint._base.text import printable
from lamella_checkpoint._formats.checksums import FILE as CHECKSUMS_FILE
from lamella_checkpoint._formats.checksums import Checksums
from lamella_checkpoint._formats.dcp_read import check_place, too_large
from lamella_checkpoint._formats.dcp_write import WRITTEN_BY
from lamella_checkpoint._formats.items import Expected, ItemRead, check_object, check_tensors
from lamella_checkpoint._formats.metadata import Item, StoredMetadata
from lamella_checkpoint._formats.open import Format, find_files
from lamella_checkpoint._formats.safetensors import SafetensorsSource
from lamella_checkpoint._formats.torch_file import TorchFile, archive_records, whole_read

T = TypeVar("T")

OnProgress = Callable[[int, int], None]
"""Is told how many bytes have been read, and how many there are."""


class Problem(NamedTuple):
    """What is wrong with a file."""

    file: str
    problem: str

    def __str__(self) -> str:
        return printable(f"{self.file}: {self.problem}")


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What was found; true when the checkpoint is whole.

    Attributes:
        path: Of the file or directory.
        problems: What is wrong, file by file.
        unneeded: Names of data files that nothing in the checkpoint refers to. They do no harm.
        num_bytes: That were read.
        num_unverified_bytes: Of these, what no checksum was kept of: it is there, and has the right shape.
    """

    path: Path
    problems: tuple[Problem, ...]
    unneeded: tuple[str, ...]
    num_bytes: int
    num_unverified_bytes: int

    def __bool__(self) -> bool:
        return not self.problems

    def lines(self) -> Iterator[str]:
        """The findings as text."""
        yield from map(str, self.problems)
        if self.unneeded:
            yield printable(f"not needed: {', '.join(self.unneeded)}")
        if self.num_unverified_bytes:
            yield f"{self.num_unverified_bytes} of {self.num_bytes} bytes have no checksum"
        state = "whole" if self else f"damaged, {len(self.problems)} problems"
        yield printable(f"{self.path}: {state}, {self.num_bytes} bytes read")

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def as_json(self) -> dict[str, Any]:
        """The same for programs: plain data that JSON can hold."""
        return {
            "path": str(self.path),
            "whole": bool(self),
            "problems": [each._asdict() for each in self.problems],
            "unneeded": list(self.unneeded),
            "num_bytes": self.num_bytes,
            "num_unverified_bytes": self.num_unverified_bytes,
        }


def verify(
    path: str | os.PathLike[str], *, trust: bool = False, on_progress: OnProgress = lambda done, total: None
) -> Verification:
    """Read all of a checkpoint and say everything that is wrong with it; nothing in it runs.

    Args:
        path: Of any format that `open_checkpoint` knows.
        trust: Whether DCP's metadata may hold other types than torch's own, and a file of `torch.save` may be a module.
        on_progress: Is told how far it is.

    Raises:
        CheckpointUntrusted: It does, without `trust`.
        FileNotFoundError: There is nothing.
        FormatUnknown: There is no format that has these files.

    Effects: reads every stored chunk, several at a time, and holds 16 MiB of each; no collective, no accelerator.
    """
    found, kind = find_files(path)
    run = _Run(found, on_progress)
    try:
        if kind is Format.DCP:
            run.of_dcp(trust=trust)
        elif kind is Format.SAFETENSORS:
            run.of_safetensors()
        else:
            run.of_torch_file(trust=trust)
    except CheckpointUntrusted:
        raise
    except CheckpointDamaged as error:
        run.note(error)
    return Verification(
        path=found,
        problems=tuple(run.problems),
        unneeded=tuple(run.unneeded),
        num_bytes=run.num_bytes,
        num_unverified_bytes=run.num_unverified_bytes,
    )


class _Run:
    def __init__(self, path: Path, on_progress: OnProgress) -> None:
        self._path = path
        self._on_progress = on_progress
        self._total = 0
        self.problems: list[Problem] = []
        self.unneeded: list[str] = []
        self.num_bytes = 0
        self.num_unverified_bytes = 0

    def _try(self, work: Callable[[], T]) -> T | None:
        try:
            return work()
        except CheckpointDamaged as error:
            self.note(error)
            return None

    def note(self, error: CheckpointDamaged) -> None:
        """Add what an error says, once."""
        problem = Problem(error.file, error.problem)
        if problem not in self.problems:
            self.problems.append(problem)

    def of_dcp(self, *, trust: bool) -> None:
        checksums = self._own_files()
        metadata = StoredMetadata.read(self._path, trust=trust)
        if WRITTEN_BY in metadata.modules:
            self._try(lambda: Manifest.read(self._path))
            for file in self._of_other_length(checksums):
                self.note(CheckpointDamaged(str(file), "it has another length than when it was written"))
        else:
            checksums = None  # Plain torch has saved over what they were of.
        for name, info in metadata.tensors.items():
            self._check_cover(name, info.shape, [chunk.sizes for chunk in info.chunks], metadata)
            if overlap := first_overlap(info.chunks):
                self._wrong_metadata(f"chunks of {name!r} overlap: {overlap[0]} and {overlap[1]}")
        for problem in too_large(metadata):
            self._wrong_metadata(problem)
        sound = self._sound_files(metadata)
        chunks = {item: read for item, read in self._chunks(metadata) if item.file in sound}
        objects = {item: name for item, name in self._objects(metadata) if item.file in sound}
        self._total = sum(item.length for item in (*chunks, *objects))
        needed = {item.file for item in metadata.items.values()}
        self.unneeded += [each.name for each in sorted(self._path.glob("*.distcp")) if each.name not in needed]

        def expected(item: Item) -> int | None:
            crc = None if checksums is None else checksums.expected(*item)
            if crc is None and checksums is not None:
                raise CheckpointDamaged(str(self._path / CHECKSUMS_FILE), f"no checksum for {item}")
            return crc

        for error in check_tensors(self._path, chunks.values(), expected, lambda item: self._count(item.length)):
            self.note(error)
        for item, name in objects.items():
            self._check_object(item, name, expected)

    def of_torch_file(self, *, trust: bool) -> None:
        """Each record of the archive against its checksum, named by the values that refer to it, if that is known."""
        files = archive_records(self._path)
        names, refused = self._names_of_records(trust)
        reads = [whole_read(self._path, each, _told(each.name, names.get(each.name))) for each in files.values()]
        self._total = sum(each.length for each in files.values())
        self.num_unverified_bytes = sum(each.length for each in files.values() if each.crc is None)
        lengths = {read.item: prod(read.sizes) for read in reads}
        damage = check_tensors(self._path.parent, reads, lambda _: None, lambda item: self._count(lengths[item]))
        for error in damage or refused:
            self.note(error)
        for record in names.keys() - files.keys() if files else ():
            problem = f"no record {record!r}, which {_first(names[record])!r} needs"
            self.note(CheckpointDamaged(str(self._path), problem))
        if not files and not refused:  # torch has read all of it, and keeps no checksums in this format.
            self._total = self.num_unverified_bytes = self._path.stat().st_size
            self._count(self._total)

    def _names_of_records(self, trust: bool) -> tuple[Mapping[str, Sequence[str]], list[CheckpointDamaged]]:
        """The values that refer to each record of a file of `torch.save`, or why the file cannot be opened."""
        try:
            return TorchFile(self._path, trust=trust, verify=False).names_of_records(), []
        except CheckpointUntrusted:
            raise
        except CheckpointDamaged as error:
            return {}, [error]

    def of_safetensors(self) -> None:
        """The format keeps no checksums; opening it compares its headers with the files' sizes and the index."""
        source = SafetensorsSource(self._path)
        self._total = sum(prod(info.shape) * info.dtype.itemsize for info in source.tensors.values())
        self.num_unverified_bytes = self._total
        self._count(self._total)

    def _of_other_length(self, checksums: Checksums | None) -> Iterator[Path]:
        for file in (self._path / METADATA_FILE, self._path / MANIFEST_FILE):
            if (
                checksums is not None
                and file.is_file()
                and checksums.expected(file.name, 0, file.stat().st_size) is None
            ):
                yield file

    def _own_files(self) -> Checksums | None:
        """Checksums, where there are any, with those of the metadata and the manifest compared."""
        checksums = self._try(lambda: Checksums.of(self._path))
        for file in (METADATA_FILE, MANIFEST_FILE) if checksums is not None else ():
            content = self._try(partial(read_bytes, self._path / file)) if (self._path / file).exists() else None
            if checksums is not None and content and checksums.expected(file, 0, len(content)) is not None:
                self._try(partial(checksums.check, self._path / file, 0, content))
        return checksums

    def _check_cover(
        self, name: str, shape: tuple[int, ...], sizes: Iterable[tuple[int, ...]], metadata: StoredMetadata
    ) -> None:
        num_held, num_needed = sum(map(prod, sizes)), prod(shape)
        if num_held != num_needed:
            self._wrong_metadata(f"chunks of {num_held} of the {num_needed} elements of {name!r}")
        if name in metadata.compressed:
            self._wrong_metadata(f"{name!r} is written through an extension of DCP's writer, and cannot be checked")

    def _chunks(self, metadata: StoredMetadata) -> Iterator[tuple[Item, ItemRead]]:
        """Where the chunks of tensors lie; names that share a place share the read."""
        for name, info in metadata.tensors.items():
            for chunk in info.chunks:
                item = metadata.items.get((name, chunk.offsets))
                if item is None:
                    self._wrong_metadata(f"no place in any file for {name!r}")
                elif name not in metadata.compressed:
                    yield item, ItemRead(name=name, item=item, sizes=chunk.sizes)

    def _objects(self, metadata: StoredMetadata) -> Iterator[tuple[Item, str]]:
        for name in metadata.objects:
            item = metadata.items.get((name, None))
            if item is None:
                self._wrong_metadata(f"no place in any file for {name!r}")
            elif name not in metadata.compressed:
                yield item, name

    def _sound_files(self, metadata: StoredMetadata) -> set[str]:
        ends: dict[str, int] = {}
        for item in metadata.items.values():
            ends[item.file] = max(ends.get(item.file, 0), item.offset + item.length)
        sound = set()
        for file, end in ends.items():
            try:
                check_place(self._path, file)
                size = file_size(self._path, file)
                if size < end:
                    raise CheckpointDamaged(str(self._path / file), f"expected {end} bytes or more, got {size}")
                sound.add(file)
            except CheckpointDamaged as error:
                self.note(error)
        return sound

    def _check_object(self, item: Item, name: str, expected: Expected) -> None:
        self._try(lambda: check_object(self._path, name, item, expected))
        self._count(item.length)

    def _count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._on_progress(self.num_bytes, self._total)

    def _wrong_metadata(self, problem: str) -> None:
        self.note(CheckpointDamaged(str(self._path / METADATA_FILE), problem))


def _told(record: str, names: Sequence[str] | None) -> str:
    return f"{_first(names)} ({record})" if names else record


def _first(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
