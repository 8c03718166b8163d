"""`save`: a model and its optimizer, written whole or not at all, while training waits."""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from lamella_checkpoint._base.ranks import exchange, num_ranks, on_device_of, rank
from lamella_checkpoint._formats.dcp_write import Form, WithManifest, write_items
from lamella_checkpoint._formats.extra_by_rank import texts
from lamella_checkpoint._formats.placed import Placed
from lamella_checkpoint._state.contents import StateContents
from lamella_checkpoint._state.recut import recut
from lamella_checkpoint._state.shares import Share, Tables, differing
from lamella_files import Correspondence, naming_target, publish, save_id_of, stage


def save(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    extra: Mapping[str, object] | None = None,
    correspondences: Sequence[Correspondence] = (),
) -> Path:
    """Write a checkpoint that any number of ranks can load, and plain torch DCP too.

    Stored names are those of the unsharded model: `model.<name>`, `optimizer.state.<name>.<slot>`,
    `optimizer.param_groups.<name>.<option>`. A tied tensor is stored once and found under all of its names. A slot may
    be a DTensor, or a plain tensor of the rank's elements of its parameter, in any shape.

    A reader never sees half a checkpoint: files are written beside `path` and renamed when every rank has finished and
    all data is on the disk. A checkpoint at `path` is replaced, and stays if this save fails or is killed.

    Args:
        path: The checkpoint's directory, on storage that every rank sees. Rank 0's counts.
        model: Sharded by `fully_shard`, wrapped by DDP, compiled or plain. Read only.
        optimizer: Over the model's parameters. None leaves the optimizer out.
        extra: Other resume state: the step, `random_states()`, a scheduler's `state_dict()`, the data loader's
            position. Plain data of any types of Python's, tensors and NumPy's arrays and scalars come back as they
            were, tensors on the host; up to 16 MiB each. Each rank gets its own values back. A key that a rank does
            not give, or None in place of all, stands for rank 0's value.
        correspondences: Rules whose left side is the checkpoint's form and right side the model's, as to store fused
            tensors by component. The same on every rank. `load` takes the way back as `translate`.

    Returns:
        The checkpoint's absolute path.

    Raises:
        CheckpointFailed: Another rank failed. A failed rank raises its own error.
        FileExistsError: `path` holds something else than a checkpoint.
        FileNotFoundError: Another save to `path` began meanwhile, and removed this one's files.
        NotImplementedError: The optimizer keeps state that is neither a tensor nor plain data (LBFGS does); or a tensor
            is sparse, or of a class that no load would read (quantised weights, 8-bit optimizer state).
        TypeError: A value of `extra` would not come back; the error names its key.
        ValueError: A parameter of the optimizer is not the model's, a slot has another number of elements than its
            parameter and than this rank's part of the parameter, or a tensor is on the meta device; or the ranks' parts
            do not form one model.

    Effects: collective on the default group, if any: two exchanges of small objects, the first without tensor
        names and the second with each item's place. Every rank determines its own items and writes them; values held
        by several ranks are divided between these ranks. Copies to the host item by item; waits until
        the files are on the disk.
    """
    with on_device_of(model.parameters()):
        return save_part(path, lambda: SavePart.of(model, optimizer, extra, correspondences))


@dataclass(frozen=True, kw_only=True)
class SavePart:
    """This rank's part of a save, in a format's names and boxes.

    Attributes:
        share: The items.
        form: The format's. Rank 0's counts.
        steady: The live tensors that an optimizer's step alone changes, by any name.
    """

    share: Share
    form: Form
    steady: Mapping[str, torch.Tensor]

    @classmethod
    def of(
        cls,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        extra: Mapping[str, object] | None,
        correspondences: Sequence[Correspondence],
        tables: Tables | None = None,
    ) -> "SavePart":
        """The part of a checkpoint in lamella's own form: arguments of `save`, and `tables` as of `Share.of`."""
        contents = StateContents.of(model, optimizer, extra)
        share = recut(Share.of(contents, rank(), tables), correspondences)
        if num_ranks() > 1:
            share = share.with_own(texts(contents.manifest.extra, rank()))
        return cls(share=share, form=WithManifest(contents.manifest), steady=contents.steady)


def save_part(path: str | os.PathLike[str], collect: Callable[[], SavePart]) -> Path:
    """Write a checkpoint, of any form, from each rank's part.

    Args:
        path: The checkpoint's directory, on storage that every rank sees. Rank 0's counts.
        collect: Called once on each rank, inside the first exchange, where an error reaches all ranks. No collective.

    Returns:
        The checkpoint's absolute path.

    Raises:
        CheckpointFailed: Another rank failed. A failed rank raises its own error.
        FileExistsError: The conditions of `save`.

    Effects: as `save`, on the current device.
    """
    parts: list[SavePart] = []

    def begin() -> dict[str, str]:
        parts.append(collect())
        return parts[0].share.digests

    def make_room(digests: list[dict[str, str]]) -> list[tuple[Path, Path, frozenset[str]]]:
        target = Path(os.path.realpath(path))
        return [(target, stage(target), differing(digests))] * num_ranks()

    target, staged, apart = exchange("collect its state", begin, make_room)
    [part] = parts

    def write() -> list[Placed]:
        items, form = part.share.items(apart), part.form
        with naming_target(staged, target):
            return write_items(staged, rank(), items, archive_checksums=form.archive_checksums)

    def finish(placed: Sequence[Sequence[Placed]]) -> list[None]:
        with naming_target(staged, target):
            part.form.complete(staged, placed, save_id_of(staged))
            publish(staged, target)
        return [None] * num_ranks()

    try:
        exchange("write the checkpoint's files", write, finish)
    except BaseException:
        if rank() == 0:
            shutil.rmtree(staged, ignore_errors=True)
        raise
    return target
