"""`save_safetensors`: a live model, sharded or not, as a directory for Hugging Face's libraries."""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from lamella_checkpoint.extending import (
    Item,
    Share,
    StateContents,
    differing,
    everywhere,
    exchange,
    num_ranks,
    on_device_of,
    on_rank_zero,
    rank,
)
from lamella_convert._formats.float8 import BLOCK, blocks_of, left_alone, linear_weights, quantised_config, scale_name
from lamella_convert._formats.hf_files import copy_side_files, read_config, write_config
from lamella_convert._formats.safetensors_float8 import (
    Scaled,
    Which,
    agree_on_scales,
    chosen_of,
    quantised_pieces,
    with_scales,
)
from lamella_convert._formats.safetensors_write import (
    MAX_SHARD_NBYTES,
    Blank,
    FileFilling,
    PlannedFile,
    make_files,
    plan_files,
    stored_dtype,
    write_index,
)
from lamella_files import check_vacant, naming_target, own_name, publish, stage


def save_safetensors(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    dtype: torch.dtype | None = None,
    float8: bool | Which = False,
    max_shard_nbytes: int = MAX_SHARD_NBYTES,
    like: str | os.PathLike[str] | None = None,
) -> Path:
    """Write a model's weights as safetensors: one file, or several with an index.

    The names are the unsharded model's. No rank holds more than its shards and no tensor is gathered: each rank
    writes its rows or columns in place in the files. A tied tensor is written under its first name
    only, as Hugging Face expects.

    The directory appears whole or not at all.

    Args:
        path: The directory, on storage that every rank sees; absent, or empty. Rank 0's counts.
        model: Sharded by `fully_shard`, wrapped by DDP, compiled or plain. Read only.
        dtype: The dtype of floating-point weights, except float8; None keeps each tensor's own.
        float8: True writes the weights of linear layers in float8 with a scale for each block of 128 by 128, from the
            live values; a function of name and `TensorInfo` selects weights. Equal to the result of `convert`
            on a checkpoint of the same model. The configuration from `like` records the encoding.
        max_shard_nbytes: Size limit of one file, unless a single tensor is larger.
        like: A Hugging Face directory whose other files (configuration, tokenizer) are copied. Rank 0's counts.

    Returns:
        The directory's absolute path.

    Raises:
        CheckpointDamaged: A link in `like` leads outside.
        CheckpointFailed: Another rank failed. A failed rank raises its own error.
        FileExistsError: `path` is occupied.
        TypeError: Safetensors lack a tensor's dtype.
        ValueError: A tensor is on the meta device or still to be reduced, or ranks differ in its shape or dtype. A
            tensor selected for float8 is no matrix, or holds infinities or NaNs.

    Effects: collective on the default group, if any (four small object exchanges; with float8 two more, the
        second of 12 bytes for each block shared between ranks); every rank writes its own shards, and a part of the
        values held by several ranks; copies to the host buffer by buffer; waits until the files are on the disk.
    """
    with on_device_of(model.parameters()):
        blanks, items = _agree(model, dtype)
        choose_weights = linear_weights if float8 is True else float8 or None
        chosen = (
            frozenset[str]()
            if choose_weights is None
            else everywhere("choose", lambda: chosen_of(blanks, choose_weights))
        )
        scaled = agree_on_scales(items, chosen) if choose_weights is not None else {}
        stored = {own_name(name): blank for name, blank in with_scales(blanks, chosen).items()}
        files = plan_files(stored, max_shard_nbytes)
        plain = None if choose_weights is None else left_alone(_shapes_of(blanks), set(map(own_name, chosen)))
        target, staged = on_rank_zero("make the files", lambda: _make(path, files, like, plain))

        def write() -> None:
            with naming_target(staged, target):
                _write(staged, files, items, scaled)

        try:
            exchange("write its shards", write, lambda _: _finish(staged, target, files))
        except BaseException:
            if rank() == 0:
                shutil.rmtree(staged, ignore_errors=True)
            raise
    return target


def _agree(model: nn.Module, dtype: torch.dtype | None) -> tuple[Mapping[str, Blank], list[Item]]:
    """The contents of the files, in one order on all ranks; and this rank's items to write.

    Ranks have the same names, unless they hold different parts of a model: then each reports its additional names.
    """
    mine: list[tuple[dict[str, Blank], Share]] = []

    def collect() -> dict[str, Blank]:
        contents = StateContents.of(model, None, None)
        mine.append((_blanks(contents, dtype), Share.of(contents, rank())))
        return mine[0][0] if rank() == 0 else {}  # Rank 0's names alone are compared with, below.

    rank_zero_state = exchange("collect its state", collect, lambda rank_states: [rank_states[0]] * num_ranks())
    blanks, share = mine[0]

    def difference() -> tuple[dict[str, Blank], dict[str, str]]:
        return {name: blank for name, blank in blanks.items() if rank_zero_state.get(name) != blank}, share.digests

    def unite(
        rank_blanks: list[tuple[dict[str, Blank], dict[str, str]]],
    ) -> list[tuple[dict[str, Blank], frozenset[str]]]:
        united = _united(rank_zero_state, [lacking for lacking, _ in rank_blanks])
        return [(united, differing([digests for _, digests in rank_blanks]))] * num_ranks()

    united, apart = exchange("agree on the tensors", difference, unite)
    return united, share.items(apart)


def _blanks(contents: StateContents, dtype: torch.dtype | None) -> dict[str, Blank]:
    return {
        name: Blank(tuple(value.shape), stored_dtype(value.dtype, dtype))
        for name, value in contents.values.items()
        if isinstance(value, torch.Tensor)
    }


def _united(first: Mapping[str, Blank], other_blanks: Sequence[Mapping[str, Blank]]) -> dict[str, Blank]:
    united = dict(first)
    for index, blanks in enumerate(other_blanks):
        for name, blank in blanks.items():
            if united.setdefault(name, blank) != blank:
                raise ValueError(
                    f"Expected ranks to agree on {name!r}, got {blank} on rank {index} and {united[name]} before it."
                )
    return united


def _shapes_of(blanks: Mapping[str, Blank]) -> dict[str, tuple[int, ...]]:
    return {own_name(name): blank.shape for name, blank in blanks.items()}


def _make(
    path: str | os.PathLike[str],
    files: tuple[PlannedFile, ...],
    like: str | os.PathLike[str] | None,
    plain: tuple[str, ...] | None,
) -> tuple[Path, Path]:
    """Make the directory and its files. `plain` are the unquantised modules; None without quantisation."""
    target = Path(os.path.realpath(path))
    staged = stage(target, check=check_vacant)
    try:
        with naming_target(staged, target):
            make_files(staged, files)
            if like is not None:
                copy_side_files(Path(like), staged)
                config = None if plain is None else read_config(staged)
                if config is not None and plain is not None:
                    write_config(staged, quantised_config(config, plain))
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise
    return target, staged


def _write(
    staged: Path, files: Sequence[PlannedFile], items: Sequence[Item], scaled: Mapping[str, Sequence[Scaled]]
) -> None:
    with FileFilling(staged, files) as filling:
        for name, boxes in scaled.items():
            for box in boxes:
                for chunk, values in quantised_pieces(box):
                    filling.write(own_name(name), chunk, values)
                # Ranks that share a block agreed on the scale, so the duplicate writes are equal.
                filling.write(scale_name(own_name(name)), blocks_of(box.chunk, BLOCK), box.scales)
        for item in items:
            if item.names[0] in scaled:
                continue
            if isinstance(item.value, torch.Tensor) and item.chunk is not None:
                filling.write(own_name(item.names[0]), item.chunk, item.value)
        filling.sync()


def _finish(staged: Path, target: Path, files: Sequence[PlannedFile]) -> list[None]:
    with naming_target(staged, target):
        write_index(staged, files)
        publish(staged, target)
    return [None] * num_ranks()
