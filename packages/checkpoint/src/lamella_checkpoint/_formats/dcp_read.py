"""torch DCP's file format, opened: which tensors and objects a directory holds, read box by box; nothing in it runs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path

from lamella_checkpoint._base.boxes import first_overlap
from lamella_checkpoint._base.directories import METADATA_FILE
from lamella_checkpoint._base.errors import CheckpointDamaged
from lamella_checkpoint._base.manifest import MANIFEST_FILE, Manifest
from lamella_checkpoint._base.small_files import file_size, read_bytes
from lamella_checkpoint._base.source import TensorInfo, Wanted
from lamella_checkpoint._formats.checksums import Checksums
from lamella_checkpoint._formats.items import Copy, ItemRead, read_object, read_tensors
from lamella_checkpoint._formats.metadata import WRITTEN_BY, Item, StoredMetadata


class StoredCheckpoint:
    """A checkpoint's names and where their data lies, as a `Source`; opened by each rank for itself, no collective."""

    def __init__(self, directory: Path, *, trust: bool = False, verify: bool = True) -> None:
        """Read the metadata of the checkpoint in `directory`, and hold it against its files.

        Args:
            directory: Of the checkpoint.
            trust: Whether types are made that are neither plain data nor torch's own, which can run anything.
            verify: Whether what is read is held against its checksum: the one that was saved beside it, or the one in
                torch's archive.

        Raises:
            CheckpointDamaged: A file is absent, unreadable, elsewhere, or shorter than the metadata says.
            CheckpointUntrusted: The metadata holds other types.
        """
        self.path = directory
        self._trust = trust
        self._verify = verify
        self._values: dict[Item, object] = {}
        self._verified: set[Item] = set()
        self._identity = _identity(directory)
        _check_directory(directory)
        with self._unless_replaced():
            self._checksums = Checksums.of(directory) if verify else None
            known = self._check_file(METADATA_FILE)
            self.metadata = StoredMetadata.read(directory, trust=trust)
            if not known and not self.is_own:
                self._checksums = None  # Plain torch has saved over what they were of.
            _check_files(directory, self.metadata)
            self.manifest = Manifest.read(directory) if self.is_own else None
            for file in (METADATA_FILE, MANIFEST_FILE) if self._checksums else ():
                if not self._check_file(file):
                    raise CheckpointDamaged(str(directory / file), "it has another length than when it was written")

    @property
    def save_id(self) -> str | None:
        """What tells this save from every other, if the writer left it."""
        return self.metadata.save_id

    @property
    def is_own(self) -> bool:
        """Whether `save` wrote it."""
        return WRITTEN_BY in self.metadata.modules

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self.metadata.tensors

    @property
    def objects(self) -> Sequence[str]:
        return self.metadata.objects

    def read(self, wanted: Sequence[Wanted], on_item: Callable[[Item], None] = lambda _: None) -> None:
        """Fill the given memory.

        Args:
            wanted: What to read, and where to.
            on_item: Is told of each stored chunk that has been read.

        Raises:
            CheckpointDamaged: A file cannot be read or differs from its checksum, or the chunks do not cover a box, or
                another checkpoint took this one's place meanwhile (its files have the same names).
        """
        reads: dict[Item, ItemRead] = {}
        for name in dict.fromkeys(each.name for each in wanted):
            self._check_whole(name)
        for each in wanted:
            self._add(reads, each)
        with self._unless_replaced():
            read_tensors(self.path, reads.values(), self._expected if self._verify else None, on_item)
        self._verified.update(reads)

    def read_object(self, name: str) -> object:
        """The value of an object; names that share a place share the value, and it is read once."""
        self._check_whole(name)
        item = self.metadata.items[name, None]
        if item not in self._values:
            expected = self._expected if self._verify else None
            with self._unless_replaced():
                self._values[item] = read_object(self.path, name, item, expected, trust=self._trust)
        return self._values[item]

    def _check_file(self, file: str) -> bool:
        """Hold a small file against its checksum; False where there is none for a file of this length."""
        if self._checksums is None:
            return False
        content = read_bytes(self.path / file)
        if self._checksums.expected(file, 0, len(content)) is None:
            return False
        self._checksums.check(self.path / file, 0, content)
        return True

    def _expected(self, item: Item) -> int | None:
        """The checksum of an item, if its writer kept any."""
        if self._checksums is None:
            return None
        crc = self._checksums.expected(*item)
        if crc is None:
            raise CheckpointDamaged(str(self.path / item.file), f"no checksum for {item.length} bytes at {item.offset}")
        return crc

    def _add(self, reads: dict[Item, ItemRead], wanted: Wanted) -> None:
        """Add what a box takes of each stored chunk that it meets.

        The target's dims are the box's; DCP writes a chunk of a scalar like any other.
        """
        num_found = 0
        into = wanted.into.detach()
        for chunk in self.tensors[wanted.name].chunks:
            common = chunk.intersection(wanted.chunk)
            if common.numel == 0:
                continue
            num_found += common.numel
            item = self.metadata.items[wanted.name, chunk.offsets]
            is_verified = item in self._verified
            read = reads.setdefault(
                item, ItemRead(name=wanted.name, item=item, sizes=chunk.sizes, is_verified=is_verified)
            )
            target = common.relative_to(wanted.chunk)
            slices = tuple(slice(along.start, along.stop) for along in target.ranges)
            read.copies.append(Copy(common.relative_to(chunk), into[slices]))
        if num_found != wanted.chunk.numel:
            raise self._wrong_metadata(
                f"{num_found} of the {wanted.chunk.numel} elements at {wanted.chunk.offsets} of {wanted.name!r}"
            )

    def _check_whole(self, name: str) -> None:
        """Every chunk has a place, and together they are the tensor; DCP would leave holes as they are."""
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
        """Say that the checkpoint was replaced, whatever else that looked like to the reader."""
        try:
            yield
        finally:
            if _identity(self.path) != self._identity:
                raise CheckpointDamaged(str(self.path), "it was replaced while it was being read")


def _identity(directory: Path) -> tuple[int, int] | None:
    """What a replacement of the checkpoint changes; None where there is no metadata."""
    try:
        status = (directory / METADATA_FILE).stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _check_directory(directory: Path) -> None:
    if not directory.is_dir():
        raise CheckpointDamaged(str(directory), "not a directory")
    file_size(directory, METADATA_FILE)


def _check_files(directory: Path, metadata: StoredMetadata) -> None:
    """Find absent and truncated files now, not after half of the model has been overwritten."""
    ends: dict[str, int] = {}
    for item in metadata.items.values():
        ends[item.file] = max(ends.get(item.file, 0), item.offset + item.length)
    for file, end in ends.items():
        check_place(directory, file)
        size = file_size(directory, file)
        if size < end:
            raise CheckpointDamaged(str(directory / file), f"expected {end} bytes or more, got {size}")
    if problem := next(too_large(metadata), None):
        raise CheckpointDamaged(str(directory / METADATA_FILE), problem)


def too_large(metadata: StoredMetadata) -> Iterator[str]:
    """Chunks that are larger than what is stored of them: readers make room by the sizes that the metadata says."""
    for name, info in metadata.tensors.items():
        for chunk in info.chunks if name not in metadata.compressed else ():
            item = metadata.items.get((name, chunk.offsets))
            if item is not None and chunk.numel * info.dtype.itemsize > item.length:
                yield f"{chunk.numel} elements of {info.dtype} in the {item.length} bytes of {name!r}"


def check_place(directory: Path, file: str) -> None:
    """Refuse a name that leads out of the directory whose metadata has it.

    Raises:
        CheckpointDamaged: It does.
    """
    if Path(file).name != file or file == "..":
        raise CheckpointDamaged(str(directory / METADATA_FILE), f"it leads outside, to {file!r}")
