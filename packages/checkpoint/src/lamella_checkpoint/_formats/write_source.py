"""Checkpoints of other formats, written from a source by one process, piece by piece.

Each function writes into a directory or a file that nobody sees yet, and waits until what it wrote is on the disk.
`dtypes` says which tensors are written, in which order and as what.

Note [An archive that is filled]
    `torch.save` can leave the bytes of tensors out (`skip_data`) and pickle tensors that have no memory (fake ones).
    What that makes is a whole archive, sparse, in which every element has its place; those are filled box by box. The
    CRC-32 of its tensors is written last, for which they are read once more: torch's readers do not compare it, those
    of this package do.
"""

import errno
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, BinaryIO, Final, Self, cast

import torch
from torch._subclasses import FakeTensorMode
from torch.serialization import skip_data

from lamella_checkpoint._base.file_boxes import Stored, write_box
from lamella_checkpoint._base.manifest import Manifest
from lamella_checkpoint._base.names import is_of_model, own_name
from lamella_checkpoint._base.source import Source
from lamella_checkpoint._base.stream import BUFFER_NBYTES, OnBytes, Piece, stream
from lamella_checkpoint._formats.checksums import ChecksumStream, Span
from lamella_checkpoint._formats.dcp_write import Placed, complete, without_archive_checksums, write_metadata
from lamella_checkpoint._formats.safetensors_write import (
    MAX_SHARD_NBYTES,
    Blank,
    Filling,
    PlannedFile,
    make_files,
    plan_file,
    plan_files,
    write_index,
)
from lamella_checkpoint._formats.torch_zip import seal

_NO_ALIASES: Final[Mapping[str, str]] = {}


class _FakeOnCpu(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Tensors without memory, on the CPU.

    Where torch could use GPUs and finds none, its own mode puts eight that do not exist in their place, for good:
    autograd then has threads for them, and cannot run in forks of this process.
    """

    @property
    def avoid_device_init(self) -> bool:
        return False


def write_safetensors(
    source: Source,
    dtypes: Mapping[str, torch.dtype],
    directory: Path,
    *,
    max_shard_nbytes: int = MAX_SHARD_NBYTES,
    buffer_nbytes: int = BUFFER_NBYTES,
    on_bytes: OnBytes = lambda _: None,
) -> None:
    """Write tensors as Hugging Face has them.

    Raises:
        CheckpointDamaged: As `Source.read`.
        TypeError: Safetensors lack a dtype.
        ValueError: There are no tensors.
    """
    files = plan_files(_blanks(source, dtypes), max_shard_nbytes)
    _fill_files(source, dtypes, directory, files, buffer_nbytes, on_bytes)
    write_index(directory, files)


def write_safetensors_file(source: Source, dtypes: Mapping[str, torch.dtype], file: Path) -> None:
    """Write tensors as one safetensors file, of any size, that is not there yet.

    Raises:
        CheckpointDamaged: As `Source.read`.
        TypeError: Safetensors lack a dtype.
    """
    files = (plan_file(file.name, _blanks(source, dtypes)),)
    _fill_files(source, dtypes, file.parent, files, BUFFER_NBYTES, lambda _: None)


def _blanks(source: Source, dtypes: Mapping[str, torch.dtype]) -> dict[str, Blank]:
    return {name: Blank(source.tensors[name].shape, dtype) for name, dtype in dtypes.items()}


def _fill_files(
    source: Source,
    dtypes: Mapping[str, torch.dtype],
    directory: Path,
    files: Sequence[PlannedFile],
    buffer_nbytes: int,
    on_bytes: OnBytes,
) -> None:
    make_files(directory, files)
    with Filling(directory, files) as filling:
        for piece in stream(source, dtypes, buffer_nbytes):
            filling.write(*piece)
            on_bytes(piece.values.nbytes)
        filling.sync()


def write_dcp(
    source: Source,
    dtypes: Mapping[str, torch.dtype],
    directory: Path,
    *,
    aliases: Mapping[str, str] = _NO_ALIASES,
    manifest: Manifest | None = None,
    path_of: Callable[[str], tuple[str, ...]] | None = None,
    max_file_nbytes: int = MAX_SHARD_NBYTES,
    buffer_nbytes: int = BUFFER_NBYTES,
    on_bytes: OnBytes = lambda _: None,
) -> None:
    """Write tensors and all objects as torch DCP has them, large tensors in chunks.

    Args:
        source: What to write, under the names that it has.
        dtypes: Which tensors.
        directory: Exists, and is empty.
        aliases: Further names of tensors; both name the same place.
        manifest: Makes it a checkpoint of this package, with checksums. None for one of other writers.
        path_of: The keys of the nested dicts that torch makes of a name, where that is not a section and the rest of
            the name. Not with `manifest`.
        max_file_nbytes: About how much a file holds.
        buffer_nbytes: What is held of tensors.
        on_bytes: Progress.

    Raises:
        CheckpointDamaged: As `Source.read`.
    """
    # Without a manifest there are no checksums but those of the archives.
    checksums = nullcontext() if manifest is None else without_archive_checksums()
    with _DcpFiles(directory, max_file_nbytes) as files, checksums:
        names = _names(dtypes, aliases)
        places = []
        for piece in stream(source, dtypes, buffer_nbytes):
            places.append(files.save_piece(piece, names[piece.name], source.tensors[piece.name].shape))
            on_bytes(piece.values.nbytes)
        places += [files.save_object(value, same) for same, value in _objects(source)]
    if manifest is not None:
        complete(directory, [places], manifest)
    elif path_of is not None:
        write_metadata(directory, places, path_of=path_of, written_by=())
    else:
        write_metadata(directory, places, written_by=())


def write_torch(
    source: Source,
    dtypes: Mapping[str, torch.dtype],
    file: Path,
    *,
    aliases: Mapping[str, str] = _NO_ALIASES,
    buffer_nbytes: int = BUFFER_NBYTES,
    on_bytes: OnBytes = lambda _: None,
) -> None:
    """Write tensors and all objects as one file of `torch.save`.

    Native names become nested dicts, as `torch.distributed.checkpoint.state_dict` has them: `{"model": {name: tensor},
    "optimizer": {"state": {name: {slot: tensor}}, "param_groups": [{"params": [name, ...], option: value}]}}`. A model
    alone is its state dict. Tied tensors share their memory.

    Args:
        source: What to write, under native names.
        dtypes: Which tensors.
        file: Does not exist.
        aliases: Further names of tensors.
        buffer_nbytes: What is held of tensors.
        on_bytes: Progress.

    Raises:
        CheckpointDamaged: As `Source.read`.
        OSError: The file cannot be written.

    Effects: as Note [An archive that is filled].
    """
    with _FakeOnCpu():
        blanks = {name: torch.empty(source.tensors[name].shape, dtype=dtype) for name, dtype in dtypes.items()}
    ties = {alias: blanks[name] for alias, name in aliases.items() if name in blanks}
    objects = {name: value for names, value in _objects(source) for name in names}
    contents = _nested({**blanks, **ties, **objects})
    try:
        with skip_data(materialize_fake_tensors=True):
            torch.save(contents, file)
    except RuntimeError as error:  # Of torch's writer, which keeps what the file system said to itself.
        reason = str(error).partition("\n")[0]
        raise OSError(errno.EIO, f"Expected torch to write an archive, got {reason!r}", str(file)) from error
    starts = _starts(contents, file)
    with file.open("r+b") as opened:
        for piece in stream(source, dtypes, buffer_nbytes):
            blank = blanks[piece.name]
            stored = Stored(starts[id(blank)], tuple(blank.shape), blank.dtype)
            write_box(opened.fileno(), stored, piece.chunk, piece.values)
            on_bytes(piece.values.nbytes)
        seal(opened)
        opened.flush()
        os.fsync(opened.fileno())


def _starts(contents: object, file: Path) -> dict[int, int]:
    """By the id of a tensor that was saved, the byte of the file at which its elements start."""
    with _FakeOnCpu():
        loaded = torch.load(file, weights_only=True)
    return {
        id(saved): cast(int, tensor.untyped_storage()._checkpoint_offset) for saved, tensor in _pairs(contents, loaded)
    }


def _pairs(saved: Any, loaded: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The tensors at the same places of two equal structures."""
    if isinstance(saved, torch.Tensor):
        yield saved, loaded
    elif isinstance(saved, dict):
        for key, value in saved.items():
            yield from _pairs(value, loaded[key])


def _nested(values: Mapping[str, object]) -> dict[str, Any]:
    """Values by native names, as torch nests them."""
    if all(map(is_of_model, values)):
        return {own_name(name): value for name, value in values.items()}
    nested: dict[str, Any] = {}
    options: dict[str, dict[str, object]] = {}
    for name, value in values.items():
        section, _, rest = name.partition(".")
        kind, _, entry = rest.partition(".")
        owner, _, last = entry.rpartition(".")
        if section == "model":
            nested.setdefault("model", {})[rest] = value
        elif (section, kind) == ("optimizer", "state"):
            nested.setdefault("optimizer", {}).setdefault("state", {}).setdefault(owner, {})[last] = value
        elif (section, kind) == ("optimizer", "param_groups"):
            options.setdefault(owner, {})[last] = value
        else:
            nested[name] = value
    if options:
        nested.setdefault("optimizer", {})["param_groups"] = _groups(options)
    return nested


def _groups(options: Mapping[str, Mapping[str, object]]) -> list[dict[str, object]]:
    """Parameters with equal options together."""
    groups: dict[bytes, dict[str, Any]] = {}
    for param, mine in options.items():
        group = groups.setdefault(pickle.dumps(sorted(mine.items())), {"params": [], **mine})
        group["params"].append(param)
    return list(groups.values())


class _DcpFiles:
    """Files `__0_<n>.distcp`, one after another."""

    def __init__(self, directory: Path, max_nbytes: int) -> None:
        self._directory, self._max_nbytes = directory, max_nbytes
        self._open: BinaryIO | None = None
        self._stream: ChecksumStream | None = None
        self._num_files = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._close()

    def save_piece(self, piece: Piece, names: tuple[str, ...], shape: tuple[int, ...]) -> Placed:
        """Append a chunk of a tensor of some names and shape."""
        file, span, checksum = self._save(piece.values)
        return Placed(
            names=names, shape=shape, chunk=piece.chunk, dtype=piece.values.dtype,
            file=file, span=span, checksum=checksum,
        )  # fmt: skip

    def save_object(self, value: object, names: tuple[str, ...]) -> Placed:
        """Append an object of some names."""
        file, span, checksum = self._save(value)
        return Placed(names=names, shape=None, chunk=None, dtype=None, file=file, span=span, checksum=checksum)

    def _save(self, value: object) -> tuple[str, Span, int]:
        """Append an item. Returns its file's name, its place and its checksum."""
        if self._stream is None or self._open is None or self._open.tell() >= self._max_nbytes:
            self._close()
            self._open = (self._directory / f"__0_{self._num_files}.distcp").open("xb", buffering=1 << 20)
            self._stream = ChecksumStream(self._open)
            self._num_files += 1
        try:
            torch.save(value, cast(BinaryIO, self._stream))
        except RuntimeError as error:  # torch's writer says of a full disk that its position is not what it should be.
            raise self._stream.error or error from error
        return f"__0_{self._num_files - 1}.distcp", *self._stream.end_item()

    def _close(self) -> None:
        if self._open is not None:
            with self._open as file:
                file.flush()
                os.fsync(file.fileno())
            self._open = None


def _names(dtypes: Mapping[str, torch.dtype], aliases: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """All names of each tensor that is written."""
    names: dict[str, tuple[str, ...]] = {name: (name,) for name in dtypes}
    for alias, name in aliases.items():
        if name in names:
            names[name] = (*names[name], alias)
    return names


def _objects(source: Source) -> Iterator[tuple[tuple[str, ...], object]]:
    """The objects of a source, equal ones once with all of their names."""
    names: dict[bytes, list[str]] = {}
    for name in source.objects:
        names.setdefault(pickle.dumps(source.read_object(name)), []).append(name)
    for same in names.values():
        yield tuple(same), source.read_object(same[0])
