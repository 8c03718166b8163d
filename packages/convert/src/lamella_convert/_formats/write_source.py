"""Checkpoints of other formats, written from a source by one process, piece by piece.

Each function writes into a staged directory or file, invisible to readers, and waits until the contents are on the
disk. `dtypes` selects the tensors to write, with order and dtypes.
"""

import pickle
from bisect import bisect_right
from collections.abc import Container, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

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
from lamella_files import (
    GROUP_SIZES,
    Source,
    WriteOptions,
    group_sizes,
    is_of_model,
    objects_once,
    own_name,
    stream,
)

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
    has the parameters with equal options; an optimizer that only counted its parameters keeps numbers and groups. A
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
    objects = {name: value for names, value in objects_once(source) for name in names if name != GROUP_SIZES}
    with TorchArchive(file, _nested({**blanks, **ties, **objects}, group_sizes(source))) as archive:
        for piece in stream(source, dtypes, options.buffer_nbytes):
            archive.write(blanks[piece.name], piece.chunk, piece.values)
            options.on_bytes(piece.values.nbytes)


def _nested(values: Mapping[str, object], sizes: Sequence[int] | None) -> dict[str, Any]:
    """Values by native names, nested as torch does; with numbers for parameters in groups of some sizes."""
    if all(map(is_of_model, values)):
        return {own_name(name): value for name, value in values.items()}
    nested: dict[str, Any] = {}
    options: dict[str | int, dict[str, object]] = {}
    params = {own_name(name) for name in values if is_of_model(name)} if sizes is None else None
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
        optimizer["param_groups"] = _groups(options, sizes or ())
    return nested


def _owner(entry: str, params: Container[str] | None) -> tuple[str | int, str]:
    """`<parameter>.<slot>` as the parameter, by name or number, and the slot; a slot's name may have dots.

    Args:
        entry: The name of a slot or an option.
        params: The names of parameters; None where parameters have numbers.
    """
    if params is None:
        number, _, slot = entry.partition(".")
        return int(number) if number.isdecimal() else number, slot
    ends = (position for position, character in enumerate(entry) if character == ".")
    end = next((end for end in ends if entry[:end] in params), None)
    return (entry[:end], entry[end + 1 :]) if end is not None else (*entry.rpartition(".")[::2],)


def _groups(options: Mapping[str | int, Mapping[str, object]], sizes: Sequence[int]) -> list[dict[str, object]]:
    """Groups of parameters with equal options; of the given sizes where parameters have numbers, which are places."""
    ends = [*accumulate(sizes)]
    groups: dict[tuple[bytes, int], dict[str, Any]] = {}
    names = [param for param in options if isinstance(param, str)]
    params: list[str | int] = [*sorted(param for param in options if isinstance(param, int)), *names]
    for param in params:
        place = bisect_right(ends, param) if isinstance(param, int) else -1
        key = pickle.dumps(sorted(options[param].items()))
        group = groups.setdefault((key, place), {"params": [], **options[param]})
        group["params"].append(param)
    return list(groups.values())
