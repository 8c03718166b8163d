"""Directories of Megatron and Megatron-Bridge: the newest checkpoint, and the files beside it.

`args` is a pickled object of Megatron's. Only the numbers are needed, and are read without constructing the object: see
Note [Nothing runs].
"""

import io
import os
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, cast

import torch

from lamella_checkpoint.extending import StoredCheckpoint
from lamella_convert._formats.torch_file import TorchFile
from lamella_convert._translation.megatron import Dialect, dialect_of, read_fsdp_dtensor
from lamella_convert._translation.megatron_args import Counters, counters, sizes_of_args
from lamella_convert._translation.torch_dist import read_torch_dist
from lamella_files import (
    CheckpointDamaged,
    FileSlice,
    Inert,
    Record,
    Renamed,
    Wanted,
    WithObjects,
    file_size,
    read_json,
    read_pickle,
    read_record,
    read_text,
    records,
    short,
    stored_tensor,
    whole_box,
)

TRACKER: Final = "latest_checkpointed_iteration.txt"
BRIDGE_TRACKER: Final = "latest_train_state.pt"
TRAIN_STATE: Final = "train_state.pt"
RUN_CONFIG: Final = "run_config.yaml"
FORMAT: Final = "metadata.json"
COMMON: Final = "common.pt"
COMMON_OBJECT: Final = "common_state/"

_MAX_TRACKER_NBYTES: Final = 1 << 10


@dataclass(frozen=True, kw_only=True)
class MegatronCheckpoint:
    """A checkpoint of Megatron, in a format of named tensors.

    Attributes:
        format: The format of its files.
        dialect: The dialect of `fsdp_dtensor`, if the names determine one.
        counters: The progress of training, and missing counters.
        sizes: The sizes for reading rank-major tensors.
        recorded_ranks: The number of tensor-parallel ranks that wrote, as the files tell; None if they do not.
        make_source: Makes `source`.
    """

    format: Literal["fsdp_dtensor", "torch_dist"]
    dialect: Dialect | None
    counters: Counters
    sizes: Mapping[str, int]
    recorded_ranks: int | None
    make_source: Callable[[], Renamed]

    @cached_property
    def source(self) -> Renamed:
        """The checkpoint under canonical names.

        Raises:
            ValueError: The conditions of `read_fsdp_dtensor`. Stored names can be listed without the sizes.
        """
        return self.make_source()


def open_megatron(
    path: Path, *, sizes: Mapping[str, int] | None = None, trust: bool = False, verify: bool = True
) -> MegatronCheckpoint:
    """Open a checkpoint of Megatron-LM, Megatron-Bridge or one of their converters.

    Args:
        path: The directory of one iteration, or of several with a file naming the newest.
        sizes: The sizes of the parts of rank-major tensors, where neither `args` nor Bridge's `run_config.yaml` has
            them. Given sizes take precedence over both.
        trust: Allow unpickling of types beyond plain data and torch's own. **Unsafe: can execute code.**
        verify: Verify checksums while reading, if there are any.

    Raises:
        CheckpointDamaged: A file is absent or unreadable.

    Effects: reads metadata and small files; no collective.
    """
    stored = StoredCheckpoint(iteration_directory(path), trust=trust, verify=verify)
    return megatron_checkpoint(stored, sizes=sizes)


def megatron_checkpoint(stored: StoredCheckpoint, *, sizes: Mapping[str, int] | None = None) -> MegatronCheckpoint:
    """As `open_megatron`, from loaded metadata."""
    common = _common(stored)
    trained = train_state(stored.path)
    args = _plain_object(stored, "args") if common is None else common.get("args")
    recorded_sizes = {**run_config_sizes(stored.path), **(sizes_of_args(args) if isinstance(args, dict) else {})}
    all_sizes = {**recorded_sizes, **(sizes or {})}
    make_source: Callable[[], Renamed]
    if common is None:
        # As a dict of plain values, `args` can be read without trust.
        plain = stored if args is None else WithObjects(stored, {"args": args})
        make_source = partial(read_fsdp_dtensor, plain, sizes=all_sizes)
    else:
        make_source = partial(read_torch_dist, stored, common)
    return MegatronCheckpoint(
        format="fsdp_dtensor" if common is None else "torch_dist",
        dialect=dialect_of(stored) if common is None else None,
        counters=counters(WithObjects(stored, common or {}), trained),
        sizes=all_sizes,
        recorded_ranks=recorded_sizes.get("tp"),
        make_source=make_source,
    )


def is_torch_dist(stored: StoredCheckpoint) -> bool:
    """Whether a DCP checkpoint is Megatron's `torch_dist`.

    Raises:
        CheckpointDamaged: The format's marker file cannot be read.
    """
    if _is_there(stored.path, COMMON) or any(name.startswith(COMMON_OBJECT) for name in stored.objects):
        return True
    format_record = read_json(stored.path / FORMAT) if _is_there(stored.path, FORMAT) else None
    return isinstance(format_record, dict) and format_record.get("sharded_backend") == "torch_dist"


def iteration_directory(path: Path) -> Path:
    """The directory of the newest iteration, if a file in `path` names one; else `path`.

    Raises:
        CheckpointDamaged: The named iteration is absent, or a link leads outside.
    """
    if _is_there(path, TRACKER):
        file, iteration_text = TRACKER, read_text(path / TRACKER, _MAX_TRACKER_NBYTES).strip()
    elif _is_there(path, BRIDGE_TRACKER):
        file, iteration_text = BRIDGE_TRACKER, str(train_state(path, BRIDGE_TRACKER).get("step", 0))
    else:
        return path
    if iteration_text != "release" and not re.fullmatch(r"[0-9]{1,18}", iteration_text):
        raise CheckpointDamaged(str(path / file), f"expected an iteration, got {short(iteration_text)}")
    name = iteration_text if iteration_text == "release" else f"iter_{int(iteration_text):07d}"
    if not (path / name).is_dir():
        raise CheckpointDamaged(str(path), f"its newest iteration is {name!r}, which is not there")
    if (path / name).resolve().parent != path.resolve():
        raise CheckpointDamaged(
            str(path / name), f"it leads outside, to {str((path / name).resolve())!r}; open that if it is yours"
        )
    return path / name


def train_state(directory: Path, file: str = TRAIN_STATE) -> dict[str, Any]:
    """Megatron-Bridge's counters; empty without its file.

    Raises:
        CheckpointDamaged: The file is no archive of plain data.
    """
    if not _is_there(directory, file):
        return {}
    source = TorchFile(directory / file)
    values = {name: torch.zeros((), dtype=info.dtype) for name, info in source.tensors.items() if prod(info.shape) == 1}
    source.read(
        [
            Wanted(name, whole_box(source.tensors[name].shape), into.view(source.tensors[name].shape))
            for name, into in values.items()
        ]
    )
    plain: dict[str, Any] = {name: value.item() for name, value in values.items()}
    plain |= {name: source.read_object(name) for name in source.objects}
    return {name: value for name, value in plain.items() if isinstance(value, bool | int | float | str)}


def run_config_sizes(directory: Path) -> dict[str, int]:
    """Sizes in Megatron-Bridge's `run_config.yaml`; empty without the file.

    Only whole numbers under the names of `args` are read; a name with two values is ignored.
    """
    if not _is_there(directory, RUN_CONFIG):
        return {}
    versions: dict[str, set[int]] = {}
    text = read_text(directory / RUN_CONFIG)
    for name, value in re.findall(r"^[ \t]*(\w+):[ \t]*(\d{1,18})[ \t]*$", text, flags=re.MULTILINE):
        versions.setdefault(name, set()).add(int(value))
    return sizes_of_args({name: values.pop() for name, values in versions.items() if len(values) == 1})


def plain_contents(file: Path | BinaryIO, name: str | None = None) -> dict[str, Any]:
    """Nested plain data from a file of `torch.save`.

    Objects are dicts of their attributes, tensors of one element are numbers, and other tensors are None.

    Args:
        file: An archive of `torch.save`.
        name: The name for messages; None for the file's own.

    Raises:
        CheckpointDamaged: The file is no archive of `torch.save`.
    """
    try:
        with file.open("rb") if isinstance(file, Path) else nullcontext(file) as archive:
            files = records(archive)
            content = read_record(archive, files["data.pkl"])
            plain = _plain(read_pickle(content, knows=lambda *_: True), partial(_number, archive, files))
    except Exception as error:  # Unpickling garbage can raise any exception.
        raise CheckpointDamaged(name or str(file), f"{type(error).__name__}: {error}") from error
    if isinstance(plain, list | tuple) and len(plain) == 1:
        (plain,) = plain  # megatron-core's sharded objects are lists of one rank's value.
    return plain if isinstance(plain, dict) else {}


def _plain(value: object, number: Callable[[Inert], object]) -> object:
    if isinstance(value, Inert):
        return {key: _plain(inner, number) for key, inner in value.fields.items()} or number(value)
    if isinstance(value, dict):
        return {key: _plain(inner, number) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(inner, number) for inner in value)
    return value


def _number(archive: BinaryIO, files: Mapping[str, Record], value: Inert) -> object:
    """The number in a stored tensor of one element (a step of torch's optimizers); None for another object."""
    tensor = stored_tensor(value, files)
    if tensor is None or prod(tensor.shape) != 1:
        return None
    element = read_record(archive, tensor.span.record)
    return tensor.view(torch.frombuffer(bytearray(element), dtype=tensor.dtype)).item()


def _common(stored: StoredCheckpoint) -> dict[str, Any] | None:
    """The unsharded values of `torch_dist`, from a file or an object; None for other formats."""
    if _is_there(stored.path, COMMON):
        return plain_contents(stored.path / COMMON)
    common_objects = [name for name in stored.objects if name.startswith(COMMON_OBJECT)]
    if common_objects:
        return _plain_object(stored, common_objects[0])
    return {} if is_torch_dist(stored) else None


def _plain_object(stored: StoredCheckpoint, name: str) -> dict[str, Any] | None:
    """The plain values in an object; None if the checkpoint has no object of this name."""
    if name not in stored.objects:
        return None
    item = stored.metadata.items[name, None]
    with (stored.path / item.file).open("rb") as stream:
        content = io.BufferedReader(FileSlice(stream.fileno(), item.offset, item.length))
        return plain_contents(cast(BinaryIO, content), f"{stored.path}: {name}")


def _is_there(directory: Path, file: str) -> bool:
    """Whether a directory has a file.

    Raises:
        CheckpointDamaged: The name belongs to no regular file, or to a link out of the directory.
    """
    if not os.path.lexists(directory / file):
        return False
    file_size(directory, file)
    return True
