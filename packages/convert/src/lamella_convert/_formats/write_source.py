"""Checkpoints of other formats, written from a source by one process, piece by piece.

Each function writes into a staged directory or file, invisible to readers, and waits until the contents are on the
disk. `dtypes` selects the tensors to write, with order and dtypes.
"""

import pickle
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeGuard

import torch

from lamella_convert._formats.safetensors_write import (
    Blank,
    FileFilling,
    PlannedFile,
    make_files,
    plan_file,
    plan_files,
    write_index,
)
from lamella_convert._formats.torch_archive import BlankTensor, TorchArchive
from lamella_files import Source, WriteOptions, is_of_model, objects_once, own_name, stream

_NO_ALIASES: Final[Mapping[str, str]] = {}
_DEFAULTS: Final = WriteOptions()


def write_safetensors(
    source: Source,
    dtypes: Mapping[str, torch.dtype],
    directory: Path,
    *,
    options: WriteOptions = _DEFAULTS,
) -> None:
    """Write tensors as a Hugging Face directory.

    Raises:
        CheckpointDamaged: The conditions of `Source.read`.
        TypeError: Safetensors lack a dtype.
        ValueError: No tensors.
    """
    files = plan_files(_blanks(source, dtypes), options.max_file_nbytes)
    _fill_files(source, dtypes, directory, files, options)
    write_index(directory, files)


def write_safetensors_file(source: Source, dtypes: Mapping[str, torch.dtype], file: Path) -> None:
    """Write tensors as one new safetensors file, of any size.

    Raises:
        CheckpointDamaged: The conditions of `Source.read`.
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
    with FileFilling(directory, files) as filling:
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
    "optimizer": {"state": {name: {slot: tensor}}, "param_groups": [{"params": [name, ...], option: value}]}}`. A group
    has the parameters with equal options. Numbers of an optimizer that only counted its parameters stay numbers. A
    model alone is its state dict. Tied tensors share their memory.

    Args:
        source: The values, under native names.
        dtypes: The tensors to write, with their dtypes.
        file: Does not exist.
        aliases: Further names of tensors.
        options: Buffer and progress.

    Raises:
        CheckpointDamaged: The conditions of `Source.read`.
        OSError: The file cannot be written.

    Effects: as Note [Filling an archive].
    """
    blanks = {name: BlankTensor(source.tensors[name].shape, dtype) for name, dtype in dtypes.items()}
    ties = {alias: blanks[name] for alias, name in aliases.items() if name in blanks}
    objects = {name: value for names, value in objects_once(source) for name in names}
    with TorchArchive(file, _nested({**blanks, **ties, **objects})) as archive:
        for piece in stream(source, dtypes, options.buffer_nbytes):
            archive.write(blanks[piece.name], piece.chunk, piece.values)
            options.on_bytes(piece.values.nbytes)


def _nested(values: Mapping[str, object]) -> dict[str, Any]:
    """Values by native names, nested as torch does."""
    if all(map(is_of_model, values)):
        return {own_name(name): value for name, value in values.items()}
    nested: dict[str, Any] = {}
    options: dict[str | int, dict[str, object]] = {}
    params = {own_name(name) for name in values if is_of_model(name)}
    for name, value in values.items():
        section, _, suffix = name.partition(".")
        kind, _, entry = suffix.partition(".")
        owner, last = _owner(entry, params)
        if section == "model":
            nested.setdefault("model", {})[suffix] = value
        elif (section, kind) == ("optimizer", "state"):
            nested.setdefault("optimizer", {}).setdefault("state", {}).setdefault(owner, {})[last] = value
        elif (section, kind) == ("optimizer", "param_groups"):
            options.setdefault(owner, {})[last] = value
        else:
            nested[name] = value
    if options:
        optimizer = nested.setdefault("optimizer", {})
        optimizer.setdefault("state", {})  # Before a first step too: torch asks for the key.
        optimizer["param_groups"] = _groups(options)
    return nested


def _owner(entry: str, params: Container[str]) -> tuple[str | int, str]:
    """`<parameter>.<slot>` as the parameter, by name or number, and the slot; a slot's name may have dots."""
    ends = (position for position, character in enumerate(entry) if character == ".")
    end = next((end for end in ends if entry[:end] in params), None)
    owner, slot = (entry[:end], entry[end + 1 :]) if end is not None else (*entry.rpartition(".")[::2],)
    return int(owner) if owner.isdecimal() and owner not in params else owner, slot


def _groups(options: Mapping[str | int, Mapping[str, object]]) -> list[dict[str, object]]:
    """Groups of parameters with equal options; of neighbours alone where parameters have numbers, which are places."""
    groups: dict[tuple[bytes, int], dict[str, Any]] = {}
    run, previous = 0, b""
    for param in [*sorted(filter(_is_number, options)), *(param for param in options if not _is_number(param))]:
        key = pickle.dumps(sorted(options[param].items()))
        run += _is_number(param) and key != previous
        previous = key
        group = groups.setdefault((key, run), {"params": [], **options[param]})
        group["params"].append(param)
    return list(groups.values())


def _is_number(param: str | int) -> TypeGuard[int]:
    return isinstance(param, int)
