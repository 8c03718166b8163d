"""torch DCP's file format, written and read through its planners, with names that share data and files that are told.

Note [Names that share data]
    DCP's metadata maps a name to its chunks, and each chunk to a place in a file. Nothing says that two names cannot
    map to one place. A tied tensor is written once and found under each of its names, and an option that all
    parameters of a group share is written once and found under each parameter's name, by plain DCP too.
"""

import io
import pickle
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from lamella_checkpoint._directories import METADATA_FILE
from lamella_checkpoint._errors import CheckpointDamaged
from lamella_checkpoint._ranks import exchange, rank

WRITTEN_BY: Final = "lamella_checkpoint"
"""What a checkpoint's metadata carries if it should hold `lamella.json` as well."""

Section = Mapping[str, object]
"""A part of a checkpoint: values by name. A value is a tensor, or plain data that is written as an object."""


def write(directory: Path, sections: Mapping[str, Section], aliases: Mapping[str, Mapping[str, str]]) -> None:
    """Write each section's values under `<section>.<name>`, and let aliases share their places.

    Args:
        directory: The same, existing directory on every rank.
        sections: This rank's values. Names that only some ranks hold are written too.
        aliases: By section, further names of values; rank 0's count.

    Effects: collective on the default group (two exchanges); copies what is on an accelerator to the host piece by
        piece; waits until the files are on the disk.
    """
    planner = DefaultSavePlanner()
    tensors = [value for values in sections.values() for value in values.values() if isinstance(value, torch.Tensor)]
    writer = _Writer(directory, aliases, from_host=all(tensor.device.type == "cpu" for tensor in tensors))
    metadata: list[Metadata] = []  # rank 0's

    def plan_mine() -> SavePlan:
        planner.set_up_planner(dict(sections), writer.storage_meta(), is_coordinator=rank() == 0)
        writer.set_up_storage_writer(rank() == 0, rank=rank())
        return writer.prepare_local_plan(planner.create_local_plan())

    def plan_all(plans: list[SavePlan]) -> list[SavePlan]:
        plans, all_metadata = planner.create_global_plan(plans)
        metadata.append(all_metadata)
        return writer.prepare_global_plan(plans)

    plan = exchange("plan the checkpoint's files", plan_mine, plan_all)

    def write_mine() -> list[WriteResult]:
        return writer.write_data(planner.finish_plan(plan), planner).wait()

    def finish(results: list[list[WriteResult]]) -> list[None]:
        writer.finish(metadata[0], results)
        return [None] * len(results)

    exchange("write the checkpoint's files", write_mine, finish)


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


class _Writer(FileSystemWriter):
    """DCP's writer, with Note [Names that share data]."""

    def __init__(self, directory: Path, aliases: Mapping[str, Mapping[str, str]], *, from_host: bool) -> None:
        # Copying ahead takes a stream: on a machine with a GPU that would wake it for a model that is not on it, and
        # then no process forked from here could use it.
        super().__init__(directory, sync_files=True, per_thread_copy_ahead=0 if from_host else 10_000_000)
        self._aliases = [(section, alias, name) for section, names in aliases.items() for alias, name in names.items()]

    def storage_meta(self) -> StorageMeta:
        # No checkpoint_id: it would be the staging directory's path, which no longer exists when somebody reads it.
        return StorageMeta(save_id=self.save_id, modules=[WRITTEN_BY])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        by_name: dict[str, list[WriteResult]] = {}
        for result in (result for of_rank in results for result in of_rank):
            by_name.setdefault(result.index.fqn, []).append(result)
        shared: list[WriteResult] = []
        for section, alias, name in self._aliases:
            full_alias, full_name = f"{section}.{alias}", f"{section}.{name}"
            metadata.state_dict_metadata[full_alias] = metadata.state_dict_metadata[full_name]
            metadata.planner_data[full_alias] = (section, alias)
            shared += [replace(result, index=replace(result.index, fqn=full_alias)) for result in by_name[full_name]]
        super().finish(metadata, [*results, shared])


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
