"""torch DCP's file format, read through its planners: files that are told, and nothing that runs."""

import io
import pickle
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from lamella_checkpoint._dcp_write import WRITTEN_BY
from lamella_checkpoint._directories import METADATA_FILE
from lamella_checkpoint._errors import CheckpointDamaged


class StoredCheckpoint:
    """A checkpoint's names and where their data lies; opened by each rank for itself, with no collective."""

    def __init__(self, directory: Path) -> None:
        """Read the metadata of the checkpoint in `directory`, and hold it against its files.

        Raises:
            CheckpointDamaged: A file is absent, unreadable or shorter than the metadata says.
        """
        self.directory = directory
        self._identity = _identity(directory)
        self._metadata = _read_metadata(directory)
        _check_files(directory, self._metadata)

    @property
    def save_id(self) -> str | None:
        """What tells this save from every other, if the writer left it."""
        meta = self._metadata.storage_meta
        return None if meta is None else meta.save_id

    @property
    def is_own(self) -> bool:
        """Whether `write` wrote it."""
        meta = self._metadata.storage_meta
        return meta is not None and WRITTEN_BY in meta.modules

    def names(self, section: str) -> Iterator[str]:
        """The names in a section, without its prefix."""
        prefix = f"{section}."
        for name in self._metadata.state_dict_metadata:
            if name.startswith(prefix):
                yield name.removeprefix(prefix)

    def __contains__(self, name: str) -> bool:
        return name in self._metadata.state_dict_metadata

    def tensor(self, name: str) -> TensorStorageMetadata | None:
        """The shape and dtype of a tensor; None for an object."""
        entry = self._metadata.state_dict_metadata[name]
        return entry if isinstance(entry, TensorStorageMetadata) else None

    def read(self, targets: Mapping[str, torch.Tensor | None]) -> dict[str, object]:
        """Fill tensors in place, and read objects (whose target is None) that are plain data.

        Args:
            targets: By full name. A tensor must have the stored one's global shape; a DTensor takes its shard. The
                data is cast to its dtype.

        Returns:
            The targets, with the objects that were read in place of the None.

        Raises:
            CheckpointDamaged: A file cannot be read, or the chunks do not cover a tensor, or another checkpoint took
                this one's place meanwhile (its files have the same names).

        Effects: no collective; reads only files that hold chunks of this rank's shards.
        """
        for name in targets:
            self._check_whole(name)
        values: dict[str, object] = dict(targets)
        reader = _Reader(self.directory, self._metadata)
        planner = _PlainDataPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(values, self._metadata, is_coordinator=True)
        reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        with torch.no_grad():
            reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
        if _identity(self.directory) != self._identity:
            raise CheckpointDamaged(str(self.directory), "it was replaced while it was being read")
        return values

    def read_objects(self, names: Iterable[str]) -> dict[str, Any]:
        """Read plain data, each place once however many names share it."""
        firsts: dict[object, str] = {}
        places = {name: self._place(name) for name in names}
        for name, place in places.items():
            firsts.setdefault(place, name)
        values = self.read({name: self._blank(name) for name in firsts.values()})
        return {name: values[firsts[place]] for name, place in places.items()}

    def _place(self, name: str) -> object:
        self._check_whole(name)
        if self.tensor(name) is not None:
            return name
        info = self._metadata.storage_data[MetadataIndex(name)]
        return info.relative_path, info.offset

    def _blank(self, name: str) -> torch.Tensor | None:
        entry = self.tensor(name)
        return None if entry is None else torch.empty(entry.size, dtype=entry.properties.dtype)

    def _check_whole(self, name: str) -> None:
        """Every chunk has a place, and together they are the tensor; DCP would leave holes as they are."""
        entry = self.tensor(name)
        chunks = [] if entry is None else entry.chunks
        indices = [MetadataIndex(name, chunk.offsets) for chunk in chunks] if entry else [MetadataIndex(name)]
        if any(index not in self._metadata.storage_data for index in indices):
            raise CheckpointDamaged(str(self.directory / METADATA_FILE), f"no place in any file for {name!r}")
        num_held, num_needed = sum(prod(chunk.sizes) for chunk in chunks), prod(entry.size) if entry else 0
        if num_held < num_needed:
            raise CheckpointDamaged(
                str(self.directory / METADATA_FILE), f"{num_held} of the {num_needed} elements of {name!r}"
            )


class _Reader(FileSystemReader):
    """DCP's reader, naming the file that it could not read."""

    def __init__(self, directory: Path, metadata: Metadata) -> None:
        super().__init__(directory)
        self._metadata = metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for file, items in by_file.items():
            try:
                super().read_data(replace(plan, items=items), planner)
            except torch.OutOfMemoryError:
                raise
            except (OSError, EOFError, RuntimeError, AssertionError, pickle.UnpicklingError) as error:
                raise _damaged(Path(self.path) / file, error) from error
        done: Future[None] = Future()
        done.set_result(None)
        return done


class _PlainDataPlanner(DefaultLoadPlanner):
    """DCP's planner, reading objects as plain data: nothing pickled in a checkpoint's files runs."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, map_location="cpu", weights_only=True)


def _identity(directory: Path) -> tuple[int, int] | None:
    """What a replacement of the checkpoint changes; None where there is no metadata."""
    try:
        status = (directory / METADATA_FILE).stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _read_metadata(directory: Path) -> Metadata:
    """Unpickle `.metadata`, which can run code: open checkpoints that you trust.

    An allow-list of the types in it is still to come.
    """
    if not directory.is_dir():
        raise CheckpointDamaged(str(directory), "not a directory")
    try:
        return FileSystemReader(directory).read_metadata()
    except Exception as error:  # Unpickling garbage raises whatever it stumbles on.
        raise _damaged(directory / METADATA_FILE, error) from error


def _check_files(directory: Path, metadata: Metadata) -> None:
    """Find absent and truncated files now, not after half of the model has been overwritten."""
    ends: dict[str, int] = {}
    for info in metadata.storage_data.values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for file, end in ends.items():
        if Path(file).name != file:
            raise CheckpointDamaged(str(directory / METADATA_FILE), f"it leads outside, to {file!r}")
        try:
            size = (directory / file).stat().st_size
        except OSError as error:
            raise _damaged(directory / file, error) from error
        if size < end:
            raise CheckpointDamaged(str(directory / file), f"expected {end} bytes or more, got {size}")


def _damaged(file: Path, error: Exception) -> CheckpointDamaged:
    return CheckpointDamaged(str(file), f"{type(error).__name__}: {error}")
