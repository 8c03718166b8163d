"""`load`: a checkpoint read into a live model and optimizer, after all of its names have been checked."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import nn

from lamella_checkpoint._dcp_read import StoredCheckpoint
from lamella_checkpoint._directories import find
from lamella_checkpoint._errors import CheckpointMismatch, Differences, NameDifference, OptionConflict
from lamella_checkpoint._manifest import Manifest, OptimizerKind
from lamella_checkpoint._model import LiveModel
from lamella_checkpoint._optimizer import LiveOptimizer
from lamella_checkpoint._optimizer_load import OptimizerLoad
from lamella_checkpoint._ranks import everywhere, exchange, on_device_of


@dataclass(frozen=True, kw_only=True)
class PartialLoad:
    """What `load(strict=False)` found: the caller's `extra`, and what did not fit and was left as it was."""

    extra: dict[str, Any]
    left: Differences


@overload
def load(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    strict: Literal[True] = True,
) -> dict[str, Any]: ...
@overload
def load(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    strict: Literal[False],
) -> PartialLoad: ...
def load(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    strict: bool = True,
) -> dict[str, Any] | PartialLoad:
    """Read a checkpoint into a model and its optimizer, however many ranks wrote it.

    All names and shapes are checked first, on every rank alike: when they differ, nothing has been touched. No
    dummy step: the checkpoint says which state each parameter has, and that is allocated and read in place. Data
    is cast to the live tensors' dtypes. Also reads what plain torch DCP wrote under the same names
    (`{"model": ..., "optimizer": <flattened>}`).

    The metadata of a checkpoint is pickled, by torch: open only what you trust.

    Args:
        path: The checkpoint's directory. Every rank must see the same one.
        model: Sharded by `fully_shard`, wrapped by DDP, compiled or plain; on its device.
        optimizer: Over the model's parameters, stepped or not. Its options become the checkpoint's, except for how a
            step is computed (`foreach`, `fused`, `capturable`, `differentiable`), which stays. None leaves the
            checkpoint's optimizer alone.
        strict: False loads what fits, and returns the rest.

    Returns:
        The `extra` that was saved; with `strict=False` that and what was left.

    Raises:
        CheckpointDamaged: A file is absent, unreadable or truncated. The model is untouched, unless the damage shows
            only in the data of a tensor: then it is undefined.
        CheckpointFailed: Another rank failed. A rank that failed raises its own error.
        CheckpointMismatch: Names or shapes differ, or parameters of one group have different options.
        FileNotFoundError: There is no checkpoint.

    Effects: collective on the default group, if there is one (four small object exchanges); each rank reads what its
        shards need; allocates the optimizer's state where there is none.
    """
    with on_device_of(model.parameters()):
        plan = _find(path, model, optimizer, strict=strict)
        everywhere("read its state", plan.run)
    return plan.extra if strict else PartialLoad(extra=plan.extra, left=plan.differences)


def check(
    path: str | os.PathLike[str], *, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Raise what `load` would raise, and read no tensor.

    Args:
        path: The checkpoint's directory. Every rank must see the same one.
        model: As for `load`, or on the meta device: a model that nothing has been allocated for yet.
        optimizer: As for `load`.

    Returns:
        The `extra` that was saved.

    Raises:
        CheckpointDamaged: A file is absent, unreadable or truncated.
        CheckpointFailed: Another rank failed. A rank that failed raises its own error.
        CheckpointMismatch: Names or shapes differ, or parameters of one group have different options.
        FileNotFoundError: There is no checkpoint.

    Effects: collective on the default group, if there is one (three small object exchanges).
    """
    with on_device_of(model.parameters()):
        return _find(path, model, optimizer, strict=True, allow_meta=True).extra


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """A checked load: what is read where, and what does not fit."""

    stored: StoredCheckpoint
    live: LiveModel
    targets: dict[str, torch.Tensor]
    optimizer: OptimizerLoad | None
    differences: Differences
    extra: dict[str, Any]

    def run(self) -> None:
        slots = {} if self.optimizer is None else self.optimizer.targets()
        values = self.stored.read({**self.targets, **slots})
        # Everything is in place; this runs the hooks with which modules notice that their weights have changed.
        self.live.model.load_state_dict(self.live.state, strict=False)
        if self.optimizer is not None:
            self.optimizer.assign(values)


def _open(path: str | os.PathLike[str]) -> tuple[StoredCheckpoint, Manifest | None]:
    """A checkpoint that `save` wrote, or one of plain DCP's, which has no manifest."""
    stored = StoredCheckpoint(find(Path(os.path.realpath(path))))
    return stored, Manifest.read(stored.directory) if stored.is_own else None


def _check_same_everywhere(stored: StoredCheckpoint) -> None:
    """Refuse ranks that have opened different checkpoints, as after a listing that had not reached all hosts."""

    def compare(opened: list[tuple[str, str | None]]) -> list[None]:
        for rank, (directory, save_id) in enumerate(opened):
            if save_id != opened[0][1]:
                raise RuntimeError(
                    f"Expected every rank to open the same checkpoint, got {opened[0][0]!r} on rank 0 and "
                    f"{directory!r} on rank {rank}, from another save. Let rank 0 choose the path."
                )
        return [None] * len(opened)

    exchange("open the same checkpoint", lambda: (str(stored.directory), stored.save_id), compare)


def _find(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    strict: bool,
    allow_meta: bool = False,
) -> _Plan:
    """A load that fits, on every rank. Effects: collective; reads options and no tensor."""
    stored, manifest = everywhere("open the checkpoint", lambda: _open(path))
    _check_same_everywhere(stored)
    return everywhere(
        "find its state in the checkpoint",
        lambda: _plan(stored, manifest, LiveModel.of(model, allow_meta=allow_meta), optimizer, strict),
    )


def _plan(
    stored: StoredCheckpoint,
    manifest: Manifest | None,
    live: LiveModel,
    optimizer: torch.optim.Optimizer | None,
    strict: bool,
) -> _Plan:
    targets, names = _match_model(stored, live)
    unfit = frozenset(difference.name.removeprefix("model.") for difference in names)
    load: OptimizerLoad | None = None
    conflicts: tuple[OptionConflict, ...] = ()
    kinds: tuple[str, str] | None = None
    if optimizer is not None:
        found = OptimizerLoad.find(stored, LiveOptimizer.of(optimizer, live), live.all_names())
        names += found.differences()
        conflicts = tuple(found.conflicts())
        kinds = _different_kinds(manifest, optimizer)
        load = None if kinds else found.without(unfit)
    differences = Differences(names=tuple(names), conflicts=conflicts, kinds=kinds)
    if strict and differences:
        raise CheckpointMismatch(str(stored.directory), differences)
    extra = {} if manifest is None else dict(manifest.extra)
    return _Plan(stored=stored, live=live, targets=targets, optimizer=load, differences=differences, extra=extra)


def _match_model(stored: StoredCheckpoint, live: LiveModel) -> tuple[dict[str, torch.Tensor], list[NameDifference]]:
    """Tensors to fill by their names in the checkpoint, and what differs, in the model's order."""
    targets: dict[str, torch.Tensor] = {}
    differences: list[NameDifference] = []
    for name, names in live.all_names().items():
        tensor = live.tensors[name]
        found = next((f"model.{each}" for each in names if f"model.{each}" in stored), None)
        saved, here = found and _shape(stored, found), str(tuple(tensor.shape))
        if found is not None and saved == here:
            targets[found] = tensor.detach()
        else:
            differences.append(NameDifference(f"model.{name}", saved, here))
    differences += _unexpected(stored, live)
    return targets, differences


def _unexpected(stored: StoredCheckpoint, live: LiveModel) -> Iterator[NameDifference]:
    for name in stored.names("model"):
        if name not in live.tensors and name not in live.aliases:
            yield NameDifference(f"model.{name}", _shape(stored, f"model.{name}"), None)


def _shape(stored: StoredCheckpoint, full_name: str) -> str:
    entry = stored.tensor(full_name)
    return "an object" if entry is None else str(tuple(entry.size))


def _different_kinds(manifest: Manifest | None, optimizer: torch.optim.Optimizer) -> tuple[str, str] | None:
    saved = None if manifest is None else manifest.optimizer
    here = OptimizerKind.of(optimizer)
    if saved is None or saved.can_resume(here):
        return None
    return saved.class_name, here.class_name
