"""`save_safetensors`: a live model, sharded or not, as a directory that Hugging Face's libraries open."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lamella_checkpoint._directories import publish, stage
from lamella_checkpoint._hf_files import copy_side_files
from lamella_checkpoint._model import LiveModel
from lamella_checkpoint._ranks import everywhere, exchange, num_ranks, on_device_of, on_rank_zero, rank
from lamella_checkpoint._safetensors_write import (
    MAX_SHARD_NBYTES,
    Blank,
    Filling,
    PlannedFile,
    make_files,
    plan_files,
    stored_dtype,
    write_index,
)
from lamella_checkpoint._shards import own_boxes


def save_safetensors(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    dtype: torch.dtype | None = None,
    max_shard_nbytes: int = MAX_SHARD_NBYTES,
    like: str | os.PathLike[str] | None = None,
) -> Path:
    """Write a model's weights as safetensors: one file, or several with an index.

    The names are those of the unsharded model. No rank holds more than its shards and no tensor is gathered: each rank
    writes its rows or columns where they belong in the files. A tied tensor is written under the first of its names
    only, as Hugging Face expects.

    The directory appears whole or not at all.

    Args:
        path: The directory, on storage that every rank sees; it must not exist, or be empty. Rank 0's counts.
        model: Sharded by `fully_shard`, wrapped by DDP, compiled or plain. Read only.
        dtype: To cast floating point to, other than float8; None keeps each tensor's own.
        max_shard_nbytes: The most that one file holds, unless a single tensor is larger.
        like: A Hugging Face directory whose other files (configuration, tokenizer) are copied. Rank 0's counts.

    Returns:
        The directory's absolute path.

    Raises:
        CheckpointFailed: Another rank failed. A rank that failed raises its own error.
        FileExistsError: `path` holds something.
        TypeError: Safetensors lack a tensor's dtype.
        ValueError: A tensor is on the meta device or still to be reduced, or ranks differ in its shape or dtype.

    Effects: collective on the default group, if there is one (six small object exchanges); every rank writes its own
        shards; copies to the host buffer by buffer; waits until the files are on the disk.
    """
    with on_device_of(model.parameters()):
        tensors = everywhere("collect its state", lambda: LiveModel.of(model).tensors)
        blanks, mine = _agree(tensors, dtype)
        files = plan_files(blanks, max_shard_nbytes)
        target, staged = on_rank_zero("make the files", lambda: _make(path, files, like))
        try:
            everywhere("write its shards", lambda: _write(staged, files, {name: tensors[name] for name in mine}))
            on_rank_zero("put the files in place", lambda: _finish(staged, target, files))
        except BaseException:
            if rank() == 0:
                shutil.rmtree(staged, ignore_errors=True)
            raise
    return target


def _agree(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> tuple[dict[str, Blank], list[str]]:
    """All ranks' tensors, in one order; and those of which this rank writes what it has.

    A plain tensor is the first rank's that has it: rank 0's, unless ranks have different parts of a model. So ranks
    tell no more than what rank 0 lacks.
    """
    blanks = {name: Blank(tuple(tensor.shape), stored_dtype(tensor.dtype, dtype)) for name, tensor in tensors.items()}
    of_zero = on_rank_zero("name its tensors", lambda: blanks)

    def differences() -> dict[str, Blank]:
        return {name: blank for name, blank in blanks.items() if of_zero.get(name) != blank}

    def unite(of_ranks: list[dict[str, Blank]]) -> list[tuple[dict[str, Blank], dict[str, int]]]:
        united, owners = dict(of_zero), dict.fromkeys(of_zero, 0)
        for index, found in enumerate(of_ranks):
            for name, blank in found.items():
                owners.setdefault(name, index)
                if united.setdefault(name, blank) != blank:
                    raise ValueError(
                        f"Expected ranks to agree on {name!r}, got {united[name]} on rank {owners[name]} and {blank} "
                        f"on rank {index}."
                    )
        return [(united, {name: owner for name, owner in owners.items() if owner})] * num_ranks()

    united, owners = exchange("agree on the tensors", differences, unite)
    mine = [name for name, tensor in tensors.items() if isinstance(tensor, DTensor) or owners.get(name, 0) == rank()]
    return united, mine


def _make(
    path: str | os.PathLike[str], files: tuple[PlannedFile, ...], like: str | os.PathLike[str] | None
) -> tuple[Path, Path]:
    target = Path(os.path.realpath(path))
    staged = stage(target, replace=False)
    try:
        make_files(staged, files)
        if like is not None:
            copy_side_files(Path(like), staged)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise
    return target, staged


def _write(staged: Path, files: tuple[PlannedFile, ...], tensors: Mapping[str, torch.Tensor]) -> None:
    with Filling(staged, files) as filling:
        for name, tensor in tensors.items():
            for chunk, values in own_boxes(tensor):
                filling.write(name, chunk, values)
        filling.sync()


def _finish(staged: Path, target: Path, files: tuple[PlannedFile, ...]) -> None:
    write_index(staged, files)
    publish(staged, target)
