"""`save_safetensors`: a live model, sharded or not, as a directory that Hugging Face's libraries open."""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from lamella_checkpoint._contents import Contents, Ranks
from lamella_checkpoint._directories import check_vacant, publish, stage
from lamella_checkpoint._hf_files import copy_side_files
from lamella_checkpoint._ranks import exchange, num_ranks, on_device_of, on_rank_zero, rank
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
from lamella_checkpoint._shares import Item, Share, differing


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
        CheckpointDamaged: A link in `like` leads outside it.
        CheckpointFailed: Another rank failed. A rank that failed raises its own error.
        FileExistsError: `path` holds something.
        TypeError: Safetensors lack a tensor's dtype.
        ValueError: A tensor is on the meta device or still to be reduced, or ranks differ in its shape or dtype.

    Effects: collective on the default group, if there is one (four small object exchanges); every rank writes its own
        shards, and a part of what several have alike; copies to the host buffer by buffer; waits until the files are on
        the disk.
    """
    with on_device_of(model.parameters()):
        blanks, items = _agree(model, dtype)
        files = plan_files({_own_name(name): blank for name, blank in blanks.items()}, max_shard_nbytes)
        target, staged = on_rank_zero("make the files", lambda: _make(path, files, like))
        try:
            exchange("write its shards", lambda: _write(staged, files, items), lambda _: _finish(staged, target, files))
        except BaseException:
            if rank() == 0:
                shutil.rmtree(staged, ignore_errors=True)
            raise
    return target


def _agree(model: nn.Module, dtype: torch.dtype | None) -> tuple[Mapping[str, Blank], list[Item]]:
    """What the files hold, in one order on all ranks; and what this rank writes into them.

    Ranks have the same names, unless they have different parts of a model: they tell rank 0 what it lacks.
    """
    mine: list[tuple[dict[str, Blank], Share]] = []

    def collect() -> dict[str, Blank]:
        contents = Contents.of(model, None, None)
        mine.append((_blanks(contents, dtype), Share.of(contents, rank())))
        return mine[0][0]

    of_zero = exchange("collect its state", collect, lambda of_ranks: [of_ranks[0]] * num_ranks())
    blanks, share = mine[0]

    def difference() -> tuple[dict[str, Blank], dict[Ranks, str]]:
        return {name: blank for name, blank in blanks.items() if of_zero.get(name) != blank}, share.digests

    def unite(
        of_ranks: list[tuple[dict[str, Blank], dict[Ranks, str]]],
    ) -> list[tuple[dict[str, Blank], frozenset[Ranks]]]:
        united = _united(of_zero, [lacking for lacking, _ in of_ranks])
        return [(united, differing([digests for _, digests in of_ranks]))] * num_ranks()

    united, apart = exchange("agree on the tensors", difference, unite)
    return united, share.items(apart)


def _blanks(contents: Contents, dtype: torch.dtype | None) -> dict[str, Blank]:
    return {
        name: Blank(tuple(value.shape), stored_dtype(value.dtype, dtype))
        for name, value in contents.values.items()
        if isinstance(value, torch.Tensor)
    }


def _united(first: Mapping[str, Blank], others: Sequence[Mapping[str, Blank]]) -> dict[str, Blank]:
    united = dict(first)
    for index, blanks in enumerate(others):
        for name, blank in blanks.items():
            if united.setdefault(name, blank) != blank:
                raise ValueError(
                    f"Expected ranks to agree on {name!r}, got {blank} on rank {index} and {united[name]} before it."
                )
    return united


def _make(
    path: str | os.PathLike[str], files: tuple[PlannedFile, ...], like: str | os.PathLike[str] | None
) -> tuple[Path, Path]:
    target = Path(os.path.realpath(path))
    staged = stage(target, check=check_vacant)
    try:
        make_files(staged, files)
        if like is not None:
            copy_side_files(Path(like), staged)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise
    return target, staged


def _write(staged: Path, files: Sequence[PlannedFile], items: Sequence[Item]) -> None:
    with Filling(staged, files) as filling:
        for item in items:
            if isinstance(item.value, torch.Tensor) and item.chunk is not None:
                filling.write(_own_name(item.names[0]), item.chunk, item.value)
        filling.sync()


def _own_name(name: str) -> str:
    """The model's name for what a checkpoint calls `model.<name>`."""
    return name.removeprefix("model.")


def _finish(staged: Path, target: Path, files: Sequence[PlannedFile]) -> list[None]:
    write_index(staged, files)
    publish(staged, target)
    return [None] * num_ranks()
