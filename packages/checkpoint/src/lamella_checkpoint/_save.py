"""`save`: a model and its optimizer, written whole or not at all."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from lamella_checkpoint._dcp_write import Section, write
from lamella_checkpoint._directories import publish, stage
from lamella_checkpoint._manifest import Manifest, OptimizerKind, check_extra
from lamella_checkpoint._model import LiveModel
from lamella_checkpoint._optimizer import LiveOptimizer
from lamella_checkpoint._ranks import everywhere, num_ranks, on_device_of, on_rank_zero, rank

_Contents = tuple[dict[str, Section], dict[str, Mapping[str, str]]]


def save(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    extra: Mapping[str, object] | None = None,
) -> Path:
    """Write a checkpoint that any number of ranks can load, and plain torch DCP too.

    The names in it are those of the unsharded model: `model.<name>`, `optimizer.state.<name>.<slot>`,
    `optimizer.param_groups.<name>.<option>`. A tied tensor is stored once and found under all of its names.

    A reader never sees half a checkpoint: it is written beside `path` and renamed when every rank has finished and
    all of it is on the disk. A checkpoint at `path` is replaced, and stays if this save fails or is killed.

    Args:
        path: The checkpoint's directory, on storage that every rank sees. Rank 0's counts.
        model: Sharded by `fully_shard`, wrapped by DDP, compiled or plain. Read only.
        optimizer: Over the model's parameters. None leaves the optimizer out.
        extra: What else resuming takes: the step, random states, the data loader's position. Kept as JSON, where
            tuples become lists. Rank 0's counts.

    Returns:
        The checkpoint's absolute path.

    Raises:
        CheckpointFailed: Another rank failed. A rank that failed raises its own error.
        FileExistsError: `path` holds something else than a checkpoint.
        NotImplementedError: The optimizer keeps state that is neither a tensor nor plain data (LBFGS does).
        ValueError: A parameter of the optimizer is not the model's, or a tensor is on the meta device.

    Effects: collective on the default group, if there is one (five small object exchanges); every rank writes its own
        shards; copies to the host piece by piece; waits until the files are on the disk.
    """
    with on_device_of(model.parameters()):
        sections, aliases = everywhere("collect its state", lambda: _contents(model, optimizer, extra or {}))
        target, staged = on_rank_zero("make the checkpoint's directory", lambda: _stage(path))
        kind = None if optimizer is None else OptimizerKind.of(optimizer)
        manifest = Manifest(extra=extra or {}, num_ranks=num_ranks(), optimizer=kind)
        try:
            write(staged, sections, aliases)
            on_rank_zero("put the checkpoint in place", lambda: _finish(manifest, staged, target))
        except BaseException:
            if rank() == 0:
                shutil.rmtree(staged, ignore_errors=True)
            raise
    return target


def _contents(model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: Mapping[str, object]) -> _Contents:
    check_extra(extra)
    live = LiveModel.of(model)
    sections: dict[str, Section] = {"model": live.tensors}
    aliases: dict[str, Mapping[str, str]] = {"model": live.aliases}
    if optimizer is not None:
        sections["optimizer"], aliases["optimizer"] = LiveOptimizer.of(optimizer, live).entries()
    return sections, aliases


def _stage(path: str | os.PathLike[str]) -> tuple[Path, Path]:
    target = Path(os.path.realpath(path))
    return target, stage(target)


def _finish(manifest: Manifest, staged: Path, target: Path) -> None:
    manifest.write(staged)
    publish(staged, target)
