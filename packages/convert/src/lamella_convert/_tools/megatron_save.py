"""`save_fsdp_dtensor`, `save_torch_dist`: a live model of Megatron in Megatron's own formats, each rank its parts.

Note [Places of a rank]
    `torch_dist` stores tensors under keys that a model's modules choose: equal layers stacked on a first dim, experts
    on a second, norms under the name of the layer that fuses them elsewhere. megatron-core tells the places of a
    rank's own parts alone, so a rank's parts are cut by a table of this rank, and the metadata shows whether the
    ranks' parts together form whole tensors.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, overload

import torch
from torch import nn

from lamella_checkpoint import AsyncSaver, SaveHandle
from lamella_checkpoint.extending import (
    Encoded,
    Item,
    SavePart,
    Share,
    StateContents,
    WithoutManifest,
    on_device_of,
    rank,
    recut,
    save_part,
)
from lamella_convert._formats.megatron_files import COMMON, FORMAT
from lamella_convert._translation.megatron import RELEASE_0_19, Dialect, keys_of, stored_names
from lamella_convert._translation.megatron_model import from_megatron_model, global_expert
from lamella_convert._translation.torch_dist import key_of
from lamella_files import (
    MODEL,
    STATE,
    Correspondence,
    box_of,
    carried,
    is_of_model,
    longest_known,
    meetings,
    own_name,
    split_section,
)
from lamella_layout import Chunk

_TORCH_DIST: Final = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}


@dataclass(frozen=True)
class StoredPart:
    """A box of a live tensor, and its place in a stored tensor: Note [Places of a rank].

    Attributes:
        box: The box in the live tensor of global shape.
        key: The key of the stored tensor.
        shape: The shape of the stored tensor.
        chunk: The chunk in the stored tensor; of the box's sizes but for sizes of 1.
    """

    box: Chunk
    key: str
    shape: tuple[int, ...]
    chunk: Chunk


@overload
def save_fsdp_dtensor(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    sizes: Mapping[str, int],
    first_expert: int = 0,
    dialect: Dialect = RELEASE_0_19,
    objects: Mapping[str, object] | None = None,
    saver: None = None,
) -> Path: ...
@overload
def save_fsdp_dtensor(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    sizes: Mapping[str, int],
    first_expert: int = 0,
    dialect: Dialect = RELEASE_0_19,
    objects: Mapping[str, object] | None = None,
    saver: AsyncSaver,
) -> SaveHandle: ...
def save_fsdp_dtensor(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    sizes: Mapping[str, int],
    first_expert: int = 0,
    dialect: Dialect = RELEASE_0_19,
    objects: Mapping[str, object] | None = None,
    saver: AsyncSaver | None = None,
) -> Path | SaveHandle:
    """Write a live model of Megatron as `fsdp_dtensor`, which Megatron-Core and `open_checkpoint` read.

    No tensor is gathered: every rank writes the boxes of its own shards, and a part of the values held by several
    ranks. The directory appears whole or not at all; a checkpoint at `path` is replaced.

    Args:
        path: The checkpoint's directory, on storage that every rank sees. Rank 0's counts.
        model: With the model's own names, and tensors of global shapes: tensor-parallel parts are DTensors of whole
            tensors. Read only.
        optimizer: Over the model's parameters. None leaves the optimizer out.
        sizes: The sizes by name that `from_megatron_model` takes for the model's fused tensors.
        first_expert: The global number of this rank's first expert.
        dialect: The dialect of the reader.
        objects: Further entries of the checkpoint, by name, plain data (`args`, `iteration`, `opt_param_scheduler`); a
            dict becomes an entry for each key. Rank 0's counts.
        saver: Writes in the background: see `AsyncSaver.save` for the state that is saved, and later errors. Every
            rank's `path` counts then, and must be the same. None writes before the call returns.

    Returns:
        The checkpoint's absolute path; with `saver` a handle for the outcome.

    Raises:
        CheckpointFailed: Another rank failed. A failed rank raises its own error. With `saver` also: the previous save
            failed, and nothing has begun.
        FileExistsError: `path` holds something else than a checkpoint.
        NotImplementedError: The optimizer keeps state that is neither a tensor nor plain data.
        SizeUnknown: A fused tensor needs a size that `sizes` lacks.
        ValueError: A parameter of the optimizer is not the model's; or the ranks' parts do not form one model.

    Effects: collective on the default group, if any (two exchanges of small objects). Copies to the host item by item;
        waits until the files are on the disk. With `saver` one exchange, no wait, and the effects of `AsyncSaver.save`.
    """

    def collect() -> SavePart:
        contents = StateContents.of(model, optimizer, None)
        shapes = _model_shapes(contents)
        parts = from_megatron_model(shapes, sizes=sizes, dialect=dialect, first_expert=first_expert)
        # Options have the model's names: Note [Options go by the model's names].
        correspondences = [
            Correspondence.rename(global_expert(name, first_expert), name, shape) for name, shape in shapes.items()
        ]
        share = recut(Share.of(contents, rank()), parts, options=correspondences)
        renamed = _renamed(
            share, stored_names(dialect, tuple(name for correspondence in parts for name in correspondence.left))
        )
        rank_zero_objects = dict(_flat(objects or {})) if rank() == 0 else {}
        return SavePart(
            share=_with(renamed, rank_zero_objects), form=WithoutManifest(path_of=keys_of), steady=contents.steady
        )

    return _write(path, model, collect, saver)


@overload
def save_torch_dist(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    parts: Mapping[str, Sequence[StoredPart]],
    objects: Mapping[str, object] | None = None,
    common: Mapping[str, object] | None = None,
    saver: None = None,
) -> Path: ...
@overload
def save_torch_dist(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    parts: Mapping[str, Sequence[StoredPart]],
    objects: Mapping[str, object] | None = None,
    common: Mapping[str, object] | None = None,
    saver: AsyncSaver,
) -> SaveHandle: ...
def save_torch_dist(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    parts: Mapping[str, Sequence[StoredPart]],
    objects: Mapping[str, object] | None = None,
    common: Mapping[str, object] | None = None,
    saver: AsyncSaver | None = None,
) -> Path | SaveHandle:
    """Write a live model of Megatron as `torch_dist`, for `megatron.core.dist_checkpointing` and `open_checkpoint`.

    Slots of an optimizer's state with the parameter's shape are stored as `optimizer.state.<slot>.<key>`; the options
    of parameter groups are not. The step is in `common.pt`.

    Args:
        path: The checkpoint's directory, on storage that every rank sees. Rank 0's counts.
        model: A model with names of its own and tensors of global shapes, as `save_fsdp_dtensor` takes. Read only.
        optimizer: Over the model's parameters. None leaves the optimizer out.
        parts: By the model's own names, the places of this rank's parts. A tensor without places is left out.
        objects: Values of this rank by stored name, as megatron-core stores objects of modules.
        common: The contents of `common.pt`. Rank 0's counts.
        saver: A saver that writes in the background; None writes before the call returns.

    Returns:
        As `save_fsdp_dtensor`.

    Raises:
        CheckpointFailed: The conditions of `save_fsdp_dtensor`.
        FileExistsError: `path` holds something else than a checkpoint.
        NotImplementedError: The optimizer keeps state of another shape than the parameter's, and no number.
        ValueError: A parameter of the optimizer is not the model's; parameters were stepped a different number of
            times; or the ranks' parts do not form whole tensors.

    Effects: as `save_fsdp_dtensor`.
    """
    shared = dict(common or {})

    def collect() -> SavePart:
        contents = StateContents.of(model, optimizer, None)
        share = Share.of(contents, rank())
        if optimizer is not None:
            shared.setdefault("optimizer", _steps(optimizer))
        stored_items = {
            ranks: tuple(new for item in items for new in _placed(item, parts))
            for ranks, items in share.items_by_ranks.items()
        }
        stored = replace(share, items_by_ranks=stored_items)
        placed = _with(stored, {name: [value] for name, value in (objects or {}).items()})
        files = {COMMON: Encoded.of(shared).content, FORMAT: json.dumps(_TORCH_DIST).encode()}
        return SavePart(share=placed, form=WithoutManifest(path_of=key_of, files=files), steady=contents.steady)

    return _write(path, model, collect, saver)


def _placed(item: Item, parts: Mapping[str, Sequence[StoredPart]]) -> Iterator[Item]:
    """A box under the keys of stored tensors; nothing for options and numbers beside parameters."""
    section, suffix = split_section(item.names[0])
    name, slot = (suffix, "") if section == MODEL else longest_known(suffix, parts)
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
    steps = {float(count["step"]) for count in counts if "step" in count}
    if len(steps) > 1:
        raise ValueError(
            f"Expected all parameters to have been stepped alike, got {sorted(steps)!r} steps: torch_dist has one "
            "number. Save as fsdp_dtensor."
        )
    return {"step": steps.pop()} if steps else {}


def _model_shapes(contents: StateContents) -> dict[str, tuple[int, ...]]:
    return {
        own_name(name): tuple(value.shape)
        for name, value in contents.values.items()
        if is_of_model(name) and isinstance(value, torch.Tensor)
    }


def _renamed(share: Share, name: Callable[[str], str]) -> Share:
    stored_items = {
        ranks: tuple(replace(item, names=tuple(map(name, item.names))) for item in items)
        for ranks, items in share.items_by_ranks.items()
    }
    return replace(share, items_by_ranks=stored_items)


def _with(share: Share, objects: Mapping[str, object]) -> Share:
    """A share with values that this rank alone writes, as they are now."""
    return share.with_own((name, Encoded.of(value)) for name, value in objects.items())


def _flat(objects: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in objects.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _write(
    path: str | os.PathLike[str], model: nn.Module, collect: Callable[[], SavePart], saver: AsyncSaver | None
) -> Path | SaveHandle:
    with on_device_of(model.parameters()):
        return save_part(path, collect) if saver is None else saver.save_part(path, collect)
