"""`save`: a model and its optimizer, written whole or not at all, while training waits."""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from lamella_checkpoint._base.correspondence import Correspondence
from lamella_checkpoint._base.directories import publish, stage
from lamella_checkpoint._base.manifest import Manifest
from lamella_checkpoint._base.ranks import exchange, num_ranks, on_device_of, rank
from lamella_checkpoint._formats.dcp_write import Placed, complete, write_items
from lamella_checkpoint._state.contents import Contents, Ranks
from lamella_checkpoint._state.recut import recut
from lamella_checkpoint._state.shares import Share, differing


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
        extra: Other resume state: the step, random states, the data loader's position. Kept as JSON, where
            tuples become lists. Rank 0's counts.
        correspondences: Rules whose left side is the checkpoint's form and right side the model's, as to store fused
            tensors by component. The same on every rank. `load` takes the way back as `translate`.

    Returns:
        The checkpoint's absolute path.

    Raises:
        CheckpointFailed: Another rank failed. A failed rank raises its own error.
        FileExistsError: `path` holds something else than a checkpoint.
        NotImplementedError: The optimizer keeps state that is neither a tensor nor plain data (LBFGS does).
        ValueError: A parameter of the optimizer is not the model's, a slot has another number of elements than its
            parameter and than this rank's part of the parameter, or a tensor is on the meta device; or the ranks' parts
            do not form one model.

    Effects: collective on the default group, if any: two exchanges of small objects, the first without tensor
        names and the second with each item's place. Every rank determines its own items and writes them; values held
        by several ranks are divided between these ranks. Copies to the host item by item; waits until
        the files are on the disk.
    """
    with on_device_of(model.parameters()):
        begun = _begin(path, model, optimizer, extra, correspondences)
        try:
            exchange("write the checkpoint's files", begun.write, begun.finish)
        except BaseException:
            if rank() == 0:
                shutil.rmtree(begun.staged, ignore_errors=True)
            raise
    return begun.target


@dataclass(frozen=True, kw_only=True)
class _Begun:
    """A save begun on all ranks: directories, manifest, and this rank's part.

    `apart`: groups of ranks whose shared lists differ; each such rank writes its whole list.
    """

    target: Path
    staged: Path
    manifest: Manifest
    share: Share
    apart: frozenset[Ranks]

    def write(self) -> list[Placed]:
        return write_items(self.staged, rank(), self.share.items(self.apart))

    def finish(self, parts: Sequence[Sequence[Placed]]) -> list[None]:
        complete(self.staged, parts, self.manifest)
        publish(self.staged, self.target)
        return [None] * len(parts)


def _begin(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    extra: Mapping[str, object] | None,
    correspondences: Sequence[Correspondence],
) -> _Begun:
    """Collect each rank's state, and create the staged directory. Effects: collective, one exchange."""
    mine: list[tuple[Contents, Share]] = []

    def collect() -> dict[Ranks, str]:
        contents = Contents.of(model, optimizer, extra)
        mine.append((contents, recut(Share.of(contents, rank()), correspondences)))
        return mine[0][1].digests

    def make_room(digests: list[dict[Ranks, str]]) -> list[tuple[Path, Path, frozenset[Ranks]]]:
        target = Path(os.path.realpath(path))
        return [(target, stage(target), differing(digests))] * num_ranks()

    target, staged, apart = exchange("collect its state", collect, make_room)
    [(contents, share)] = mine
    return _Begun(target=target, staged=staged, manifest=contents.manifest, share=share, apart=apart)
