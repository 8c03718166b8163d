"""Checkpoints of other formats, written from a source by one process, piece by piece.

Each function writes into a staged directory or file, invisible to readers, and waits until the contents are on the
disk. `dtypes` selects the tensors to write, with order and dtypes.

Note [Filling an archive]
    `torch.save` can omit the bytes of tensors (`skip_data`) and pickle tensors without memory (fake tensors).
    The result is a whole archive, sparse, with a place for every element; boxes are filled one by one. The
    CRC-32 of its tensors is written last, after a second read: torch's readers ignore the CRC-32, this package's
    readers compare it.
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
from lamella_checkpoint.sources import WriteOptions, is_of_model, objects_once, own_name, stream
from lamella_convert._formats.safetensors_write import (
    Blank,
    Filling,
    PlannedFile,
    make_files,
    plan_file,
    plan_files,
    write_index,
)

_NO_ALIASES: Final[Mapping[str, str]] = {}
_DEFAULTS: Final = WriteOptions()


class _FakeOnCpu(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Tensors without memory, on the CPU.

    On a torch build with CUDA but without GPUs, the base mode pretends eight GPUs, permanently:
    autograd then starts threads for them, and cannot run in forks of this process.
    """

    @property
    def avoid_device_init(self) -> bool:
        return False


def write_safetensors(
    source: Source,
    dtypes: Mapping[str, torch.dtype],
    directory: Path,
    *,
    options: WriteOptions = _DEFAULTS,
) -> None:
    """Write tensors as a Hugging Face directory.

    Raises:
        CheckpointDamaged: As `Source.read`.
        TypeError: Safetensors lack a dtype.
        ValueError: No tensors.
    """
    files = plan_files(_blanks(source, dtypes), options.max_file_nbytes)
    _fill_files(source, dtypes, directory, files, options)
    write_index(directory, files)


def write_safetensors_file(source: Source, dtypes: Mapping[str, torch.dtype], file: Path) -> None:
    """Write tensors as one new safetensors file, of any size.

    Raises:
        CheckpointDamaged: As `Source.read`.
        TypeError: Safetensors lack a dtype.
    """
    files = (plan_file(file.name, _blanks(source, dtypes)),)
    _fill_files(source, dtypes, file.parent, files, _DEFAULTS)


def _blanks(source: Source, dtypes: Mapping[str, torch.dtype]) -> dict[str, Blank]:
    return {name: Blank(source.tensors[name].shape, dtype) for name, dtype in dtypes.items()}


def _fill_files(
    source: Source,
    dtypes: Mapping[str, torch.dtype],
    directory: Path,
    files: Sequence[PlannedFile],
    options: WriteOptions,
) -> None:
    make_files(directory, files)
    with Filling(directory, files) as filling:
        for piece in stream(source, dtypes, options.buffer_nbytes):
            filling.write(*piece)
            options.on_bytes(piece.values.nbytes)
        filling.sync()


def write_torch(
    source: Source,
    dtypes: Mapping[str, torch.dtype],
    file: Path,
    *,
    aliases: Mapping[str, str] = _NO_ALIASES,
    options: WriteOptions = _DEFAULTS,
) -> None:
    """Write tensors and all objects as one file of `torch.save`.

    Native names become nested dicts, as in `torch.distributed.checkpoint.state_dict`: `{"model": {name: tensor},
    "optimizer": {"state": {name: {slot: tensor}}, "param_groups": [{"params": [name, ...], option: value}]}}`. A model
    alone is its state dict. Tied tensors share their memory.

    Args:
        source: The values, under native names.
        dtypes: The tensors to write, with their dtypes.
        file: Does not exist.
        aliases: Further names of tensors.
        options: Buffer and progress.

    Raises:
        CheckpointDamaged: As `Source.read`.
        OSError: The file cannot be written.

    Effects: as Note [Filling an archive].
    """
    with _FakeOnCpu():
        blanks = {name: torch.empty(source.tensors[name].shape, dtype=dtype) for name, dtype in dtypes.items()}
    ties = {alias: blanks[name] for alias, name in aliases.items() if name in blanks}
    objects = {name: value for names, value in objects_once(source) for name in names}
    contents = _nested({**blanks, **ties, **objects})
    try:
        with skip_data(materialize_fake_tensors=True):
            torch.save(contents, file)
    except RuntimeError as error:  # torch's writer does not pass on the file system's own error.
        reason = str(error).partition("\n")[0]
        raise OSError(errno.EIO, f"Expected torch to write an archive, got {reason!r}", str(file)) from error
    starts = _starts(contents, file)
    with file.open("r+b") as opened:
        for piece in stream(source, dtypes, options.buffer_nbytes):
            blank = blanks[piece.name]
            # Fake tensors have no data pointer: the archive's place is found by the tensor's id.
            stored = Stored(starts[id(blank)], tuple(blank.shape), blank.dtype)
            write_box(opened.fileno(), stored, piece.chunk, piece.values)
            options.on_bytes(piece.values.nbytes)
        seal(opened)
        opened.flush()
        os.fsync(opened.fileno())


def _starts(contents: object, file: Path) -> dict[int, int]:
    """The first byte of each saved tensor's elements in the file, by the tensor's id."""
    with _FakeOnCpu():
        loaded = torch.load(file, weights_only=True)
    return {
        id(saved): cast(int, tensor.untyped_storage()._checkpoint_offset) for saved, tensor in _pairs(contents, loaded)
    }


def _pairs(saved: Any, loaded: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The tensors at equal positions of two equal structures."""
    if isinstance(saved, torch.Tensor):
        yield saved, loaded
    elif isinstance(saved, dict):
        for key, value in saved.items():
            yield from _pairs(value, loaded[key])


def _nested(values: Mapping[str, object]) -> dict[str, Any]:
    """Values by native names, nested as torch does."""
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
    """Groups of parameters with equal options."""
    groups: dict[bytes, dict[str, Any]] = {}
    for param, mine in options.items():
        group = groups.setdefault(pickle.dumps(sorted(mine.items())), {"params": [], **mine})
        group["params"].append(param)
    return list(groups.values())
