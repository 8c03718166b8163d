"""`save_fsdp_dtensor`, `save_torch_dist`: a live model of Megatron in Megatron's own formats, each rank its parts.

Note [Places of a rank]
    `torch_dist` stores tensors under keys that a model's modules choose: equal layers stacked on a first dim, experts
    on a second, norms under the name of the layer that fuses them elsewhere. megatron-core tells the places of a
    rank's own parts alone, so a rank's parts are cut by a table of this rank, and the metadata shows whether the
    ranks' parts together form whole tensors.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

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
from lamella_checkpoint.sources import (
    MODEL,
    STATE,
    box_of,
    carried,
    is_of_model,
    longest_known,
    meetings,
    own_name,
    split_section,
)
from lamella_convert._formats.megatron_files import COMMON, FORMAT
from lamella_convert._translation.megatron import RELEASE_0_19, Dialect, keys_of, stored_names
from lamella_convert._translation.megatron_model import from_megatron_model, global_expert
from lamella_layout import Chunk

_TORCH_DIST: Final = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}


@dataclass(frozen=True)
class StoredPart:
    """A box of a live tensor, and its place in a stored tensor: Note [Places of a rank].

    Attributes:
        box: In the live tensor of global shape.
        key: Of the stored tensor.
        shape: Of the stored tensor.
        chunk: In the stored tensor; of the box's sizes but for sizes of 1.
    """

    box: Chunk
    key: str
    shape: tuple[int, ...]
    chunk: Chunk


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
        return _write(path, collect, dict(_flat(objects or {})), keys_of)


def save_torch_dist(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    parts: Mapping[str, Sequence[StoredPart]],
    objects: Mapping[str, object] | None = None,
    common: Mapping[str, object] | None = None,
) -> Path:
    """Write a live model of Megatron as `torch_dist`, for `megatron.core.dist_checkpointing` and `open_checkpoint`.

    Slots of an optimizer's state with the parameter's shape are stored as `optimizer.state.<slot>.<key>`; the options
    of parameter groups are not. The step is in `common.pt`.

    Args:
        path: As for `save_fsdp_dtensor`.
        model: As for `save_fsdp_dtensor`.
        optimizer: Over the model's parameters. None leaves the optimizer out.
        parts: By the model's own names, the places of this rank's parts. A tensor without places is left out.
        objects: Values of this rank by stored name, as megatron-core stores objects of modules.
        common: The contents of `common.pt`. Rank 0's counts.

    Returns:
        The checkpoint's absolute path.

    Raises:
        CheckpointFailed: Another rank failed. A failed rank raises its own error.
        FileExistsError: `path` holds something else than a checkpoint.
        NotImplementedError: The optimizer keeps state of another shape than the parameter's, and no number.
        ValueError: A parameter of the optimizer is not the model's; parameters were stepped a different number of
            times; or the ranks' parts do not form whole tensors.

    Effects: as `save_fsdp_dtensor`.
    """
    shared = dict(common or {})

    def collect() -> Share:
        share = Share.of(Contents.of(model, optimizer, None), rank())
        if optimizer is not None:
            shared.setdefault("optimizer", _steps(optimizer))
        held = {
            ranks: tuple(new for item in items for new in _placed(item, parts)) for ranks, items in share.held.items()
        }
        mine = tuple(Item(names=(name,), value=[value]) for name, value in (objects or {}).items())
        held[rank(),] = (*held.get((rank(),), ()), *mine)
        return replace(share, held=held)

    def beside(staged: Path) -> None:
        with (staged / COMMON).open("xb") as file:
            torch.save(shared, file)
            file.flush()
            os.fsync(file.fileno())
        with (staged / FORMAT).open("x", encoding="utf-8") as text:
            json.dump(_TORCH_DIST, text)
            text.flush()
            os.fsync(text.fileno())

    with on_device_of(model.parameters()):
        return _write(path, collect, {}, lambda name: (name,), beside)


def _placed(item: Item, parts: Mapping[str, Sequence[StoredPart]]) -> Iterator[Item]:
    """A box under the keys of stored tensors; nothing for options and numbers beside parameters."""
    section, rest = split_section(item.names[0])
    name, slot = (rest, "") if section == MODEL else longest_known(rest, parts)
    if section not in (MODEL, STATE) or item.chunk is None or not isinstance(item.value, torch.Tensor):
        return
    prefix = f"{STATE}{slot}." if section == STATE else ""
    mine = parts.get(name or "", ())
    if section == STATE and not item.shape:
        return
    if mine and len(mine[0].box.sizes) != len(item.chunk.sizes):
        raise NotImplementedError(
            f"Expected optimizer state of the parameter's shape, got {item.names[0]!r} of shape {item.shape!r}: "
            "torch_dist has no place for it. Save as fsdp_dtensor."
        )
    for index, _, shared in meetings([part.box for part in mine], [item.chunk]):
        part = mine[index]
        chunk = carried(shared, part.box, part.chunk)
        values = box_of(item.value, shared.relative_to(item.chunk))
        yield Item(names=(f"{prefix}{part.key}",), value=values.view(chunk.sizes), shape=part.shape, chunk=chunk)


def _steps(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """The one number of steps of all parameters, as an entry of `common.pt`."""
    counts = [*optimizer.state.values(), *optimizer.param_groups]  # fused optimizers count in groups
    steps = {float(each["step"]) for each in counts if "step" in each}
    if len(steps) > 1:
        raise ValueError(
            f"Expected all parameters to have been stepped alike, got {sorted(steps)!r} steps: torch_dist has one "
            "number. Save as fsdp_dtensor."
        )
    return {"step": steps.pop()} if steps else {}


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


def _write(
    path: str | os.PathLike[str],
    collect: Callable[[], Share],
    objects: Mapping[str, object],
    path_of: Callable[[str], tuple[str, ...]],
    beside: Callable[[Path], None] = lambda _: None,
) -> Path:
    """Write each rank's share, and rank 0's objects, as a checkpoint of torch DCP without a manifest.

    `beside` writes further files, on rank 0.
    """
    mine: list[Share] = []

    def begin() -> dict[Ranks, str]:
        mine.append(collect())
        return mine[0].digests

    def make_room(digests: list[dict[Ranks, str]]) -> list[tuple[Path, Path, frozenset[Ranks]]]:
        target = Path(os.path.realpath(path))
        return [(target, stage(target), differing(digests))] * num_ranks()

    target, staged, apart = exchange("collect its state", begin, make_room)

    def write() -> list[Placed]:
        of_zero = [Item(names=(name,), value=value) for name, value in objects.items()] if rank() == 0 else []
        return write_items(staged, rank(), [*of_zero, *mine[0].items(apart)], archive_checksums=True)

    def finish(parts: Sequence[Sequence[Placed]]) -> list[None]:
        beside(staged)
        complete_without_manifest(staged, parts, path_of)
        publish(staged, target)
        return [None] * num_ranks()

    try:
        exchange("write the checkpoint's files", write, finish)
    except BaseException:
        if rank() == 0:
            shutil.rmtree(staged, ignore_errors=True)
        raise
    return target
