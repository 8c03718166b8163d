"""Whether a checkpoint of torch DCP is whole: bytes against checksums, chunks against tensors and files."""

import os
from collections.abc import Iterable, Iterator
from functools import partial
from math import prod
from pathlib import Path

from lamella_checkpoint._base.manifest import MANIFEST_FILE, Manifest
from lamella_checkpoint._formats.checksums import CHECKSUMS_FILE, Checksums
from lamella_checkpoint._formats.dcp_open import dcp_directory
from lamella_checkpoint._formats.dcp_read import check_place, too_large
from lamella_files import (
    METADATA_FILE,
    WRITTEN_BY,
    CheckpointDamaged,
    CheckpointUntrusted,
    DcpItem,
    Expected,
    Findings,
    ItemRead,
    OnProgress,
    StoredMetadata,
    Verification,
    check_object,
    check_tensors,
    file_size,
    first_overlap,
    read_bytes,
    verification,
)


def verify(
    path: str | os.PathLike[str], *, trust: bool = False, on_progress: OnProgress = lambda done, total: None
) -> Verification:
    """Read all of a DCP checkpoint and list every problem; no stored code runs.

    Args:
        path: The checkpoint's directory; `lamella_convert.verify` takes any format.
        trust: Allow other types than torch's own in the metadata. **Unsafe: can execute code.**
        on_progress: Called with the bytes read so far, and all.

    Raises:
        CheckpointUntrusted: The metadata holds other types, without `trust`, and no checksum tells that it is damaged.
        FileNotFoundError: `path` does not exist, or was removed or replaced meanwhile.
        FormatUnknown: `path` is not torch DCP.

    Effects: reads every stored chunk, several at a time, and holds 16 MiB of each; no collective, no accelerator.
    """
    directory = dcp_directory(path)
    return verification(directory, on_progress, lambda findings: _Dcp(findings).check(trust=trust))


class _Dcp:
    """The checks of one DCP checkpoint."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._path = findings.path

    def check(self, *, trust: bool) -> None:
        checksums = self._own_files()
        try:
            metadata = StoredMetadata.read(self._path, trust=trust)
        except CheckpointUntrusted:
            if self._has_problem(METADATA_FILE):  # A flipped bit in a type's name makes another type.
                return
            raise
        if WRITTEN_BY in metadata.modules:
            self._findings.attempt(lambda: Manifest.read(self._path))
            for file in self._files_of_wrong_length(checksums):
                self._findings.note(CheckpointDamaged(str(file), "it has another length than when it was written"))
        else:
            checksums = None  # Plain torch has saved over the checkpoint that the checksums describe.
        for name, info in metadata.tensors.items():
            self._check_cover(name, info.shape, [chunk.sizes for chunk in info.chunks], metadata)
            if overlap := first_overlap(info.chunks):
                self._wrong_metadata(f"chunks of {name!r} overlap: {overlap[0]} and {overlap[1]}")
        for problem in too_large(metadata):
            self._wrong_metadata(problem)
        sound = self._sound_files(metadata)
        chunks = {item: read for item, read in self._chunks(metadata) if item.file in sound}
        objects = {item: name for item, name in self._objects(metadata) if item.file in sound}
        self._findings.total = sum(item.length for item in (*chunks, *objects))
        needed = {item.file for item in metadata.items.values()}
        self._findings.unneeded += [
            file.name for file in sorted(self._path.glob("*.distcp")) if file.name not in needed
        ]

        def expected(item: DcpItem) -> int | None:
            crc = None if checksums is None else checksums.expected(*item)
            if crc is None and checksums is not None:
                raise CheckpointDamaged(str(self._path / CHECKSUMS_FILE), f"no checksum for {item}")
            return crc

        for error in check_tensors(
            self._path, chunks.values(), expected, lambda item: self._findings.count(item.length)
        ):
            self._findings.note(error)
        for item, name in objects.items():
            self._check_object(item, name, expected)

    def _files_of_wrong_length(self, checksums: Checksums | None) -> Iterator[Path]:
        for file in (self._path / METADATA_FILE, self._path / MANIFEST_FILE):
            if (
                checksums is not None
                and file.is_file()
                and checksums.expected(file.name, 0, file.stat().st_size) is None
            ):
                yield file

    def _own_files(self) -> Checksums | None:
        """The checksums, if any, after a check of the metadata and the manifest."""
        checksums = self._findings.attempt(lambda: Checksums.of(self._path))
        for file in (METADATA_FILE, MANIFEST_FILE) if checksums is not None else ():
            content = (
                self._findings.attempt(partial(read_bytes, self._path / file)) if (self._path / file).exists() else None
            )
            if checksums is not None and content and checksums.expected(file, 0, len(content)) is not None:
                self._findings.attempt(partial(checksums.check, self._path / file, 0, content))
        return checksums

    def _check_cover(
        self, name: str, shape: tuple[int, ...], sizes: Iterable[tuple[int, ...]], metadata: StoredMetadata
    ) -> None:
        num_held, num_needed = sum(map(prod, sizes)), prod(shape)
        if num_held != num_needed:
            self._wrong_metadata(f"chunks of {num_held} of the {num_needed} elements of {name!r}")
        if name in metadata.compressed:
            self._wrong_metadata(f"{name!r} is written through an extension of DCP's writer, and cannot be checked")

    def _chunks(self, metadata: StoredMetadata) -> Iterator[tuple[DcpItem, ItemRead]]:
        """The places of the tensors' chunks; names that share a place share the read."""
        for name, info in metadata.tensors.items():
            for chunk in info.chunks:
                item = metadata.items.get((name, chunk.offsets))
                if item is None:
                    self._wrong_metadata(f"no place in any file for {name!r}")
                elif name not in metadata.compressed:
                    yield item, ItemRead(name=name, item=item, sizes=chunk.sizes)

    def _objects(self, metadata: StoredMetadata) -> Iterator[tuple[DcpItem, str]]:
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
                self._findings.note(error)
        return sound

    def _check_object(self, item: DcpItem, name: str, expected: Expected) -> None:
        self._findings.attempt(lambda: check_object(self._path, name, item, expected))
        self._findings.count(item.length)

    def _has_problem(self, file: str) -> bool:
        return any(problem.file == str(self._path / file) for problem in self._findings.problems)

    def _wrong_metadata(self, problem: str) -> None:
        self._findings.note(CheckpointDamaged(str(self._path / METADATA_FILE), problem))
