"""Checkpoints of other formats, written from a source by one process, piece by piece.

Each function writes into a directory or a file that nobody sees yet, and waits until what it wrote is on the disk.
`dtypes` says which tensors are written, in which order and as what.

Note [An archive that is filled]
    `torch.save` can leave the bytes of tensors out (`skip_data`) and pickle tensors that have no memory (fake ones).
    The result is a whole archive, sparse, in which every element has its place; boxes are filled one by one. The
    CRC-32 of its tensors is written last, for which they are read once more: torch's readers do not compare it, those
    of this package do.
"""

import errno
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch._subclasses import FakeTensorMode
from torch.serialization import skip_data

from lamella_checkpoint import Source
from lamella_checkpoint.archives import seal
from lamella_checkpoint.files import Stored, write_box
from lamella_checkpoint.sources import BUFFER_NBYTES, OnBytes, is_of_model, objects_once, own_name, stream
from lamella_convert._formats.safetensors_write import (
    MAX_SHARD_NBYTES,
    Blank,
    Filling,
    PlannedFile,
    make_files,
    plan_file,
    plan_files,
    write_index,
)

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
    objects = {name: value for names, value in objects_once(source) for name in names}
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
