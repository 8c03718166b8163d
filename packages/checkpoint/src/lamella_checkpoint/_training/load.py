"""`load`: a checkpoint read into a live model and optimizer, after a check of all names."""

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import nn

from lamella_checkpoint._base.live_boxes import local_boxes
from lamella_checkpoint._base.manifest import Manifest
from lamella_checkpoint._base.opened import ForLive, Opened
from lamella_checkpoint._base.ranks import everywhere, exchange, num_ranks, on_device_of
from lamella_checkpoint._base.ranks import rank as this_rank
from lamella_checkpoint._base.sections import LiveNames
from lamella_checkpoint._formats.dcp_open import open_dcp
from lamella_checkpoint._state.model import LiveModel
from lamella_checkpoint._state.optimizer import LiveOptimizer, kind_of
from lamella_checkpoint._state.optimizer_load import OptimizerLoad
from lamella_checkpoint._training.copies import await_copies
from lamella_checkpoint._training.model_match import match_model, tied_differences
from lamella_files import CheckpointMismatch, Differences, OptionConflict, Source, Translate, Wanted

Openable = str | os.PathLike[str] | Source | Callable[[], Source]
"""The path of a DCP checkpoint, an open checkpoint of any format, or a function that opens a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class PartialLoad:
    """Result of `load(strict=False)`: the caller's `extra`, and the differences left untouched.

    `kept` names unchanged options of parameters, absent from the checkpoint: an older release of the optimizer had
    none, say. `stripped` are keys and prefixes of the stored names that the model's names lack: added by another
    program's wrappers.
    """

    extra: dict[str, Any]
    left: Differences
    kept: tuple[str, ...] = ()
    stripped: tuple[str, ...] = ()


@overload
def load(
    source: Openable,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    strict: Literal[True] = True,
    trust: bool = False,
    verify: bool = True,
    translate: Translate | None = None,
) -> dict[str, Any]: ...
@overload
def load(
    source: Openable,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    strict: Literal[False],
    trust: bool = False,
    verify: bool = True,
    translate: Translate | None = None,
) -> PartialLoad: ...
def load(
    source: Openable,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    strict: bool = True,
    trust: bool = False,
    verify: bool = True,
    translate: Translate | None = None,
) -> dict[str, Any] | PartialLoad:
    """Read a checkpoint into a model and its optimizer, however many ranks wrote it.

    All names and shapes are checked first, on every rank alike: when they differ, nothing has been touched. No
    dummy step: the checkpoint lists each parameter's state, which is allocated and read in place. Data
    is cast to the live tensors' dtypes, where torch allows the cast: complex numbers are not made real, nor fractions
    integers. Float8 and int8 values with a scale beside them, in a tensor that the model lacks, are a difference too.

    A checkpoint of plain torch DCP is read too, if its names are the model's: with the optimizer by name or by number,
    wrappers' prefixes or none. Any other format is opened by `lamella_convert.open_checkpoint`, and passed as `source`.
    Names of another family take that family's rules, as `translate`.

    A checkpoint is untrusted data. Pickles are read as data, and no code in them runs.

    Args:
        source: The directory of a DCP checkpoint, the same on every rank; or an open checkpoint of any format. An
            opening function is called by `load`, and if the call fails on one rank, all ranks raise.
        model: Sharded by `fully_shard`, wrapped by DDP, compiled or plain; on its device.
        optimizer: Over the model's parameters, stepped or not. Options become the checkpoint's, except for the
            implementation of a step (`foreach`, `fused`, `capturable`, `differentiable`), which stays. None leaves the
            checkpoint's optimizer alone.
        strict: False loads every match, and returns the rest. A tied tensor gets the values of its first name; other
            values stored under its further names are among the differences.
        trust: Allow unpickling of types that torch does not know as plain data, where this load needs such values.
            **Unsafe: can execute code.**
        verify: False skips checksums, and reads only the needed part of large chunks.
        translate: Maps the checkpoint's names to the model's: an adapter's rules.

    Returns:
        The saved `extra`, with this rank's values; with `strict=False` a `PartialLoad`. On another number of ranks than
        saved, ranks below the saved number get the values of the same rank, and others None for each key whose values
        differed between ranks; rank 0 warns.

    Raises:
        CheckpointDamaged: A file is absent, unreadable or truncated; raised on every rank, also by a file that one rank
            reads. The model is untouched, unless the damage shows only in a tensor's data: then the model is undefined.
        CheckpointFailed: Another rank failed in another way. A failed rank raises its own error.
        CheckpointMismatch: Names or shapes differ, names tied in the model have different values, or parameters of one
            group have different options.
        CheckpointUntrusted: A pickle holds more than plain data.
        FileNotFoundError: No checkpoint at the path, or it was removed or replaced during the read.
        FormatUnknown: The path is not a DCP checkpoint.
        ValueError: `trust` or `verify` comes with an open checkpoint, which was given its own; elements of a tensor of
            the model share memory (`expand`); or the model was made in inference mode, which has ended.

    Effects: collective on the default group, if any (five small object exchanges); each rank reads its
        shards' bytes; allocates missing optimizer state. Waits for the copies of saves in the
        background.
    """
    await_copies()  # A save in flight still copies the tensors: overwritten now, the saved state would be torn.
    with on_device_of(model.parameters()):
        plan = _find(
            _LoadRequest(
                source=source,
                model=model,
                optimizer=optimizer,
                strict=strict,
                trust=trust,
                verify=verify,
                translate=translate,
            )
        )
        everywhere("read its state", plan.run)
    if strict:
        return plan.extra
    return PartialLoad(extra=plan.extra, left=plan.differences, kept=plan.unchanged_options, stripped=plan.stripped)


def check(
    source: Openable,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    trust: bool = False,
    translate: Translate | None = None,
    compare_tied: bool = False,
) -> dict[str, Any]:
    """Raise the errors of `load`, without reading a tensor unless asked to.

    Args:
        source: The directory of a DCP checkpoint, an open checkpoint, or a function that opens one.
        model: The model to load into, on its device, or on the meta device without allocated memory.
        optimizer: An optimizer over the model's parameters; None leaves the checkpoint's optimizer alone.
        trust: Allow unpickling of types that torch does not know as plain data. **Unsafe: can execute code.**
        translate: A map from the checkpoint's names to the model's: an adapter's rules.
        compare_tied: Read tensors that are tied in the model and stored under several names, and compare their values.

    Returns:
        The saved `extra`.

    Raises:
        CheckpointDamaged: A file is absent, unreadable or truncated; raised on every rank.
        CheckpointFailed: Another rank failed in another way. A failed rank raises its own error.
        CheckpointMismatch: Names or shapes differ, or parameters of one group have different options; with
            `compare_tied`, or names tied in the model have different values.
        CheckpointUntrusted: A pickle holds more than plain data.
        FileNotFoundError: No checkpoint at the path, or it was removed or replaced during the read.
        FormatUnknown: The path is not a DCP checkpoint.
        ValueError: The conditions of `load`.

    Effects: collective on the default group, if any (four small object exchanges).
    """
    with on_device_of(model.parameters()):
        return _find(
            _LoadRequest(
                source=source,
                model=model,
                optimizer=optimizer,
                trust=trust,
                translate=translate,
                allow_meta=True,
                compare_tied=compare_tied,
            )
        ).extra


@dataclass(frozen=True, kw_only=True)
class _LoadPlan:
    """A checked load: the reads into live tensors, and the differences."""

    source: Source
    live: LiveModel
    targets: dict[str, torch.Tensor]
    optimizer: OptimizerLoad | None
    differences: Differences
    extra: dict[str, Any]
    unchanged_options: tuple[str, ...]
    stripped: tuple[str, ...]

    def run(self) -> None:
        slots = {} if self.optimizer is None else self.optimizer.targets()
        requests = [Wanted(name, *box) for name, target in self.targets.items() for box in local_boxes(target)]
        self.source.read([*requests, *(self.optimizer.reads(slots) if self.optimizer is not None else ())])
        # All data is in place; `load_state_dict` runs the hooks that tell modules of changed weights (stale copies).
        self.live.model.load_state_dict(self.live.state, strict=False)
        if self.optimizer is not None:
            self.optimizer.assign(slots)


def _check_writable(live: LiveModel) -> None:
    """Refuse expanded views, and inference tensors outside of inference mode.

    Copies into either fail, and would be taken for damage of a file.

    Raises:
        ValueError: A tensor is one of them.
    """
    for name, tensor in live.tensors.items():
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise ValueError(
                f"Expected torch.inference_mode() around the load of a model that was made in it, got the inference "
                f"tensor {name!r} outside. Load inside, or make the model outside."
            )
        if tensor.layout is not torch.strided:
            continue
        if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise ValueError(
                f"Expected each element of {name!r} to have memory of its own to load into, got shape "
                f"{tuple(tensor.shape)} with strides {tensor.stride()}, as `expand` makes. Register the tensor's "
                "`clone()`, or pass persistent=False to register_buffer; the checkpoint may stay as it is."
            )


def _check_same_everywhere(opened: Opened) -> None:
    """Refuse ranks with different checkpoints, as after a directory listing that had not reached all hosts."""

    def compare(rank_messages: list[tuple[str, str | None]]) -> list[None]:
        for rank, (path, identity) in enumerate(rank_messages):
            if identity != rank_messages[0][1]:
                raise RuntimeError(
                    f"Expected every rank to open the same checkpoint, got {rank_messages[0][0]!r} on rank 0 and "
                    f"{path!r} on rank {rank}, from another save. Let rank 0 choose the path."
                )
        return [None] * len(rank_messages)

    exchange("open the same checkpoint", lambda: (str(opened.path), opened.identity), compare)


def _warn_of_other_ranks(manifest: Manifest | None) -> None:
    """Warn, on rank 0, of values of `extra` that another number of ranks saved, each its own."""
    if manifest is None or not manifest.extra_by_rank or manifest.num_ranks == num_ranks() or this_rank() != 0:
        return
    saved, present = manifest.num_ranks, num_ranks()
    outcome = "ranks from {} on get None" if present > saved else "values of ranks from {} on are left out"
    warnings.warn(
        f"Expected {saved} ranks, each with its own {', '.join(map(repr, manifest.extra_by_rank))} in the saved "
        f"`extra`, got {present}: {outcome.format(min(saved, present))}.",
        stacklevel=2,
    )


class _Live(NamedTuple):
    """The named model and optimizer to load into."""

    model: LiveModel
    optimizer: LiveOptimizer | None

    @classmethod
    def of(cls, model: nn.Module, optimizer: torch.optim.Optimizer | None, *, allow_meta: bool) -> "_Live":
        named = LiveModel.of(model, allow_meta=allow_meta)
        _check_writable(named)
        return cls(named, None if optimizer is None else LiveOptimizer.of(optimizer, named))

    @property
    def names(self) -> LiveNames:
        return LiveNames(model={*self.model.tensors, *self.model.aliases})


@dataclass(frozen=True, kw_only=True)
class _LoadRequest:
    """The arguments of `load`, or of `check` (`allow_meta`: the model may have no memory yet)."""

    source: Openable
    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    strict: bool = True
    trust: bool = False
    verify: bool = True
    translate: Translate | None = None
    allow_meta: bool = False
    compare_tied: bool = True

    def live(self) -> _Live:
        """The names of the model and the optimizer."""
        return _Live.of(self.model, self.optimizer, allow_meta=self.allow_meta)


def _find(request: _LoadRequest) -> _LoadPlan:
    """A checked load, on every rank. Effects: collective; reads options and no tensor."""
    live = everywhere("name its state", request.live)
    opened = everywhere("open the checkpoint", lambda: _open(request, live.names))
    _check_same_everywhere(opened)
    return everywhere("find its state in the checkpoint", lambda: _plan(opened, live, request))


def _open(request: _LoadRequest, live: LiveNames) -> Opened:
    source, trust, verify = request.source, request.trust, request.verify
    if isinstance(source, str | os.PathLike):
        compared_files = slice(this_rank(), None, num_ranks())
        return open_dcp(source, trust=trust, verify=verify, live=live, compared_files=compared_files)
    if trust or not verify:
        raise ValueError(
            f"Expected `trust` and `verify` with a path only, got trust={trust} and verify={verify} with an open "
            f"checkpoint. Pass them where it is opened."
        )
    opened = source() if callable(source) else source
    return opened.for_live(live) if isinstance(opened, ForLive) else Opened(source=opened)


def _plan(opened: Opened, live: _Live, request: _LoadRequest) -> _LoadPlan:
    _warn_of_other_ranks(opened.manifest)  # Inside an exchange: filters may turn the warning into an error.
    source = opened.source
    if request.translate is not None:
        source = request.translate(source)
    targets, names = match_model(source, live.model)
    unfit = frozenset(difference.name.removeprefix("model.") for difference in names)
    load: OptimizerLoad | None = None
    way_out = opened.way_out
    conflicts: tuple[OptionConflict, ...] = ()
    kinds: tuple[str, str] | None = None
    if live.optimizer is not None:
        local_slots = _local_slots(opened.manifest, live.optimizer.optimizer)
        is_kind_known = opened.manifest is not None and opened.manifest.optimizer is not None
        optimizer_load = OptimizerLoad.find(
            source, live.optimizer, live.model.all_names(), local_slots, is_kind_known=is_kind_known
        )
        names += optimizer_load.differences()
        way_out = optimizer_load.way_out or way_out
        conflicts = tuple(optimizer_load.conflicts())
        kinds = _different_kinds(opened.manifest, live.optimizer.optimizer)
        load = None if kinds else optimizer_load.without(unfit)
    differences = Differences(names=tuple(names), conflicts=conflicts, kinds=kinds)
    if request.compare_tied and not (request.strict and any(difference.live is not None for difference in names)):
        tied = tied_differences(source, live.model, targets)
        differences = replace(differences, names=(*differences.names, *tied))
    if request.strict and differences:
        raise CheckpointMismatch(str(opened.path), differences, way_out)
    return _LoadPlan(
        source=source,
        live=live.model,
        targets=targets,
        optimizer=load,
        differences=differences,
        extra=opened.extra,
        unchanged_options=() if load is None else tuple(load.unchanged_options()),
        stripped=opened.stripped,
    )


def _local_slots(manifest: Manifest | None, optimizer: torch.optim.Optimizer) -> frozenset[str]:
    """Slots that a saved optimizer of the same class kept as plain tensors of a rank's elements."""
    saved = None if manifest is None else manifest.optimizer
    is_same = saved is not None and saved.class_name == kind_of(optimizer).class_name
    return saved.local_slots if saved is not None and is_same else frozenset()


def _different_kinds(manifest: Manifest | None, optimizer: torch.optim.Optimizer) -> tuple[str, str] | None:
    saved = None if manifest is None else manifest.optimizer
    live_kind = kind_of(optimizer)
    if saved is None or saved.can_resume(live_kind):
        return None
    return saved.class_name, live_kind.class_name
