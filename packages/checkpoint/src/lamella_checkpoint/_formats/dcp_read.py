"""torch DCP's file format, opened: lists tensors and objects, reads box by box; runs no stored code."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path

from lamella_checkpoint._base.manifest import MANIFEST_FILE, Manifest
from lamella_checkpoint._formats.checksums import Checksums
from lamella_files import (
    METADATA_FILE,
    WRITTEN_BY,
    CheckpointDamaged,
    Copy,
    DcpItem,
    ItemRead,
    StoredMetadata,
    TensorInfo,
    Wanted,
    file_size,
    first_overlap,
    gone,
    read_bytes,
    read_object,
    read_tensors,
)


class StoredCheckpoint:
    """A checkpoint's names and data as a `Source`; each rank opens the checkpoint alone, no collective."""

    def __init__(
        self, directory: Path, *, trust: bool = False, verify: bool = True, compared_files: slice = slice(None)
    ) -> None:
        """Read the metadata of the checkpoint in `directory`, and compare the metadata with the files.

        Args:
            directory: The directory of the checkpoint.
            trust: Allow unpickling of types beyond plain data and torch's own. **Unsafe: can execute code.**
            verify: Verify checksums while reading: the checkpoint's saved checksums, or torch's archive checksums.
            compared_files: The files, in the metadata's order, to compare with the metadata. Ranks that open a
                checkpoint together divide them: a file system would answer for each rank's file on each rank.

        Raises:
            CheckpointDamaged: A file is absent, unreadable, misplaced, or shorter than the metadata requires.
            CheckpointUntrusted: The metadata holds other types.
            FileNotFoundError: The directory was removed or replaced meanwhile; also in `read` and `read_object` (a
                replacement's files have the same names).
        """
        self.path = directory
        self._trust = trust
        self._verify = verify
        self._values: dict[DcpItem, object] = {}
        self._verified: set[DcpItem] = set()
        self._identity = _identity(directory)
        with self._unless_replaced():
            _check_directory(directory)
            self._checksums = Checksums.of(directory) if verify else None
            checksum = self._check_file(METADATA_FILE)
            self.metadata = StoredMetadata.read(directory, trust=trust)
            if not checksum and not self.is_own:
                self._checksums = None  # Plain torch has saved over the checkpoint that the checksums describe.
            _check_files(directory, self.metadata, compared_files)
            self.manifest = Manifest.read(directory) if self.is_own else None
            for file in (METADATA_FILE, MANIFEST_FILE) if self._checksums else ():
                if not self._check_file(file):
                    raise CheckpointDamaged(str(directory / file), "it has another length than when it was written")

    @property
    def save_id(self) -> str | None:
        """The identifier of this save, if the writer recorded one."""
        return self.metadata.save_id

    @property
    def is_own(self) -> bool:
        """Whether lamella's `save` wrote the checkpoint."""
        return WRITTEN_BY in self.metadata.modules

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self.metadata.tensors

    @property
    def objects(self) -> Sequence[str]:
        return self.metadata.objects

    def places(self, name: str) -> list[DcpItem | None]:
        """The places of a tensor's chunks in files. Tied names that `save` wrote have the same."""
        return [self.metadata.items.get((name, chunk.offsets)) for chunk in self.tensors[name].chunks]

    def read(self, requests: Sequence[Wanted], on_item: Callable[[DcpItem], None] = lambda _: None) -> None:
        """Fill the given memory.

        Args:
            wanted: The boxes to read, each with a destination.
            on_item: Called with each stored chunk after its read.

        Raises:
            CheckpointDamaged: A file cannot be read or differs from its checksum, or the chunks do not cover a box.
        """
        reads: dict[DcpItem, ItemRead] = {}
        for name in dict.fromkeys(request.name for request in requests):
            self._check_whole(name)
        for request in requests:
            self._add(reads, request)
        with self._unless_replaced():
            read_tensors(self.path, reads.values(), self._expected if self._verify else None, on_item)
        self._verified.update(reads)

    def read_object(self, name: str) -> object:
        """The value of an object, read once; names that share a stored place share the value."""
        self._check_whole(name)
        item = self.metadata.items[name, None]
        if item not in self._values:
            expected = self._expected if self._verify else None
            with self._unless_replaced():
                self._values[item] = read_object(self.path, name, item, expected, trust=self._trust)
        return self._values[item]

    def _check_file(self, file: str) -> bool:
        """Verify a small file's checksum; False if no checksum exists for a file of this length."""
        if self._checksums is None:
            return False
        content = read_bytes(self.path / file)
        if self._checksums.expected(file, 0, len(content)) is None:
            return False
        self._checksums.check(self.path / file, 0, content)
        return True

    def _expected(self, item: DcpItem) -> int | None:
        """The checksum of an item, if the writer kept checksums."""
        if self._checksums is None:
            return None
        crc = self._checksums.expected(*item)
        if crc is None:
            raise CheckpointDamaged(str(self.path / item.file), f"no checksum for {item.length} bytes at {item.offset}")
        return crc

    def _add(self, reads: dict[DcpItem, ItemRead], request: Wanted) -> None:
        """Add the copies that fill a box, for each stored chunk that overlaps the box.

        The target has the box's dims; DCP writes a chunk of a scalar like any other.
        """
        num_found = 0
        into = request.into.detach()
        for chunk in self.tensors[request.name].chunks:
            common = chunk.intersection(request.chunk)
            if common.numel == 0:
                continue
            num_found += common.numel
            item = self.metadata.items[request.name, chunk.offsets]
            is_verified = item in self._verified
            read = reads.setdefault(
                item, ItemRead(name=request.name, item=item, sizes=chunk.sizes, is_verified=is_verified)
            )
            target = common.relative_to(request.chunk)
            slices = tuple(slice(along.start, along.stop) for along in target.ranges)
            read.copies.append(Copy(common.relative_to(chunk), into[slices]))
        if num_found != request.chunk.numel:
            raise self._wrong_metadata(
                f"{num_found} of the {request.chunk.numel} elements at {request.chunk.offsets} of {request.name!r}"
            )

    def _check_whole(self, name: str) -> None:
        """Check that every chunk has a place and the chunks cover the tensor; DCP would leave holes unfilled."""
        if name in self.metadata.compressed:
            raise NotImplementedError(
                f"Expected data as torch.save writes it, got {name!r} of {str(self.path)!r} written through an "
                f"extension of DCP's writer. Load it with torch and save it again without."
            )
        info = self.tensors.get(name)
        indices = [None] if info is None else [chunk.offsets for chunk in info.chunks]
        if any((name, index) not in self.metadata.items for index in indices):
            raise self._wrong_metadata(f"no place in any file for {name!r}")
        if info is not None:
            num_held = sum(chunk.numel for chunk in info.chunks)
            if num_held != prod(info.shape):
                raise self._wrong_metadata(f"{num_held} of the {prod(info.shape)} elements of {name!r}")
            if overlap := first_overlap(info.chunks):
                raise self._wrong_metadata(f"chunks of {name!r} that overlap: {overlap[0]} and {overlap[1]}")

    def _wrong_metadata(self, problem: str) -> CheckpointDamaged:
        return CheckpointDamaged(str(self.path / METADATA_FILE), problem)

    @contextmanager
    def _unless_replaced(self) -> Iterator[None]:
        """Report a removed or replaced checkpoint as such, instead of the reader's secondary error."""
        try:
            yield
        finally:
            if not self.path.exists():  # Retention removes old checkpoints while others read.
                raise gone(self.path)
            if _identity(self.path) != self._identity:
                raise gone(self.path, "another checkpoint at its path")


def _identity(directory: Path) -> tuple[int, int] | None:
    """A value that changes when the checkpoint is replaced; None without metadata."""
    try:
        status = (directory / METADATA_FILE).stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _check_directory(directory: Path) -> None:
    if not directory.is_dir():
        raise CheckpointDamaged(str(directory), "not a directory")
    file_size(directory, METADATA_FILE)


def _check_files(directory: Path, metadata: StoredMetadata, compared: slice) -> None:
    """Find absent and truncated files before a load has overwritten half of the model."""
    ends: dict[str, int] = {}
    for item in metadata.items.values():
        ends[item.file] = max(ends.get(item.file, 0), item.offset + item.length)
    for file in ends:
        check_place(directory, file)
    for file, end in [*ends.items()][compared]:
        size = file_size(directory, file)
        if size < end:
            raise CheckpointDamaged(str(directory / file), f"expected {end} bytes or more, got {size}")
    if problem := next(too_large(metadata), None):
        raise CheckpointDamaged(str(directory / METADATA_FILE), problem)


def too_large(metadata: StoredMetadata) -> Iterator[str]:
    """Chunks larger than their stored bytes: readers would allocate by the metadata's sizes."""
    for name, info in metadata.tensors.items():
        for chunk in info.chunks if name not in metadata.compressed else ():
            item = metadata.items.get((name, chunk.offsets))
            if item is not None and chunk.numel * info.dtype.itemsize > item.length:
                yield f"{chunk.numel} elements of {info.dtype} in the {item.length} bytes of {name!r}"


def check_place(directory: Path, file: str) -> None:
    """Refuse a file name that leads out of the metadata's directory.

    Raises:
        CheckpointDamaged: The name leads outside.
    """
    if Path(file).name != file or file == "..":
        raise CheckpointDamaged(str(directory / METADATA_FILE), f"it leads outside, to {file!r}")
