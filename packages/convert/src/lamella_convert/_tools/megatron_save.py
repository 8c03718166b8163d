"""`save_fsdp_dtensor`: a live model of Megatron in Megatron's own format, each rank its parts."""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from lamella_checkpoint import Correspondence
from lamella_checkpoint.dcp_writer import Placed, complete_without_manifest, write_items
from lamella_checkpoint.files import publish, stage
from lamella_checkpoint.live import (
    Contents,
    Item,
    Ranks,
    Share,
    differing,
    exchange,
    num_ranks,
    on_device_of,
    rank,
    recut,
)
from lamella_checkpoint.sources import is_of_model, own_name
from lamella_convert._translation.megatron import RELEASE_0_19, Dialect, keys_of, stored_names
from lamella_convert._translation.megatron_model import from_megatron_model, global_expert


def save_fsdp_dtensor(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    sizes: Mapping[str, int],
    first_expert: int = 0,
    dialect: Dialect = RELEASE_0_19,
    objects: Mapping[str, object] | None = None,
) -> Path:
    """Write a live model of Megatron as `fsdp_dtensor`, which Megatron-Core and `open_checkpoint` read.

    No tensor is gathered: every rank writes the boxes of its own shards, and a part of the values held by several
    ranks. The directory appears whole or not at all; a checkpoint at `path` is replaced.

    Args:
        path: The checkpoint's directory, on storage that every rank sees. Rank 0's counts.
        model: With the model's own names, and tensors of global shapes: tensor-parallel parts are DTensors of whole
            tensors. Read only.
        optimizer: Over the model's parameters. None leaves the optimizer out.
        sizes: As for `from_megatron_model`.
        first_expert: As for `from_megatron_model`.
        dialect: Of the reader.
        objects: Further entries of the checkpoint, by name, plain data (`args`, `iteration`, `opt_param_scheduler`); a
            dict becomes an entry for each key. Rank 0's counts.

    Returns:
        The checkpoint's absolute path.

    Raises:
        CheckpointFailed: Another rank failed. A failed rank raises its own error.
        FileExistsError: `path` holds something else than a checkpoint.
        NotImplementedError: The optimizer keeps state that is neither a tensor nor plain data.
        SizeUnknown: A fused tensor needs a size that `sizes` lacks.
        ValueError: A parameter of the optimizer is not the model's; or the ranks' parts do not form one model.

    Effects: collective on the default group, if any (two exchanges of small objects). Copies to the host item by item;
        waits until the files are on the disk.
    """

    def collect() -> Share:
        contents = Contents.of(model, optimizer, None)
        shapes = _model_shapes(contents)
        parts = from_megatron_model(shapes, sizes=sizes, dialect=dialect, first_expert=first_expert)
        # Options have the model's names: Note [Options go by the model's names].
        whole = [
            Correspondence.rename(global_expert(name, first_expert), name, shape) for name, shape in shapes.items()
        ]
        share = recut(Share.of(contents, rank()), parts, options=whole)
        return _renamed(share, stored_names(dialect, tuple(name for each in parts for name in each.left)))

    with on_device_of(model.parameters()):
        return _write(path, collect, dict(_flat(objects or {})))


def _model_shapes(contents: Contents) -> dict[str, tuple[int, ...]]:
    return {
        own_name(name): tuple(value.shape)
        for name, value in contents.values.items()
        if is_of_model(name) and isinstance(value, torch.Tensor)
    }


def _renamed(share: Share, name: Callable[[str], str]) -> Share:
    held = {
        ranks: tuple(replace(item, names=tuple(map(name, item.names))) for item in items)
        for ranks, items in share.held.items()
    }
    return replace(share, held=held)


def _flat(objects: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in objects.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _write(path: str | os.PathLike[str], collect: Callable[[], Share], objects: Mapping[str, object]) -> Path:
    """Write each rank's share, and rank 0's objects, as a checkpoint of torch DCP without a manifest."""
    mine: list[Share] = []

    def begin() -> dict[Ranks, str]:
        mine.append(collect())
        return mine[0].digests

    def make_room(digests: list[dict[Ranks, str]]) -> list[tuple[Path, Path, frozenset[Ranks]]]:
        target = Path(os.path.realpath(path))
        return [(target, stage(target), differing(digests))] * num_ranks()

    target, staged, apart = exchange("collect its state", begin, make_room)

    def write() -> list[Placed]:
        beside = [Item(names=(name,), value=value) for name, value in objects.items()] if rank() == 0 else []
        return write_items(staged, rank(), [*beside, *mine[0].items(apart)], archive_checksums=True)

    def finish(parts: Sequence[Sequence[Placed]]) -> list[None]:
        complete_without_manifest(staged, parts, keys_of)
        publish(staged, target)
        return [None] * num_ranks()

    try:
        exchange("write the checkpoint's files", write, finish)
    except BaseException:
        if rank() == 0:
            shutil.rmtree(staged, ignore_errors=True)
        raise
    return target
