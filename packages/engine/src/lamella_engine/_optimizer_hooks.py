"""The engine's part in every `torch.optim` step: one hook before the step and one after it, in a written order.

Hooks registered module by module would run in the order of imports, and so in the order of file names. The two mappings
below fix the order. The mappings are the process's, as torch's hooks for all optimizers are. A package above the engine
replaces entries by name (`replace_step_hook`), in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._compile import _disable_dynamo
from torch.compiler import is_dynamo_compiling
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lamella_engine._parameters.sharded_parameter import is_sharded, sharded_originals
from lamella_engine._parameters.sharding import local_of
from lamella_engine._ragged.dtensor import dtensor_over
from lamella_engine._scaling.events import WeightsChange
from lamella_engine._tree.tree import finish_deferred, living_trees
from lamella_engine._unit.unit import Unit

# Kernels of these libraries take the address of a DTensor's shard and the size of the whole, and write past the shard.
_LIBRARIES_OF_KERNELS = {"apex", "transformer_engine"}

StepHook = Callable[[Optimizer, Any, Any], tuple[Any, Any] | None]
"""A function of a hook's arguments (optimizer, args, kwargs), which may return other arguments for the step."""


def held_by(optimizer: Optimizer) -> list[torch.Tensor]:
    """The parameters of all groups, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def is_compiled() -> bool:
    """Whether a compiler traces the caller, or will trace the step after. Not for calls with Dynamo disabled."""
    # Dynamo answers the first question while tracing. A frame without operators is left out of the trace, and Dynamo's
    # callback is still set for the frame of the step.
    return is_dynamo_compiling() or get_eval_frame_callback() is not None


@_disable_dynamo
def refuse_originals(optimizer: Optimizer, *_: object) -> None:
    """Refuse an optimizer with parameters from before `fully_shard`, or unsharded forms: its step would train no model.

    Raises:
        RuntimeError: The optimizer holds the original or the unsharded form of a parameter whose unit is alive.
    """
    names = {tensor: parameter.full_name for tensor, parameter in sharded_originals(held_by(optimizer)).items()}
    if not names:
        return
    unsharded = [name for tensor, name in names.items() if isinstance(tensor, nn.Parameter) and is_sharded(tensor)]
    if unsharded:
        raise RuntimeError(
            f"Expected {type(optimizer).__name__} to hold sharded parameters, got {len(unsharded)} that were listed "
            f"while their unit was unsharded, {unsharded[0]!r} among them. Build the optimizer before the first "
            "forward, or after reshard() of each unit; or install lamella-optim and call lamella_optim.install(): "
            "then it goes on with the shards."
        )
    raise RuntimeError(
        f"Expected {type(optimizer).__name__} to hold sharded parameters, got {len(names)} from before fully_shard, "
        f"{next(iter(names.values()))!r} among them. Build the optimizer after fully_shard; or install lamella-optim "
        "and call lamella_optim.install(): then it goes on with the shards."
    )


def refuse_kernels_on_dtensors(optimizer: Optimizer, *_: object) -> None:
    """Refuse units' DTensors to optimizers that would write past a shard, or end in an error of DTensor's dispatch.

    Kernels take the address of a shard and the size of the whole. DTensors of other engines are their own affair:
    Megatron-FSDP gives its own to Transformer Engine's optimizers.

    Raises:
        NotImplementedError: The optimizer is torch's Adafactor and holds a unit's parameter that is cut, or torch's
            LBFGS and holds one that is cut unevenly.
        TypeError: The optimizer is Transformer Engine's or apex's, and holds a unit's DTensor.
    """
    if (unfit := _UNFIT.get(type(optimizer))) is not None:
        _refuse_first_unfit(optimizer, *unfit)
    library = type(optimizer).__module__.partition(".")[0]
    if library not in _LIBRARIES_OF_KERNELS:
        return
    if next(_sharded(optimizer), None) is not None:
        raise TypeError(
            f"Expected {library}'s {type(optimizer).__name__} to be given plain tensors, all that its kernels know, "
            "got DTensors, beside whose shards it would write. Call lamella_optim.step_on_local_shards(optimizer) once."
        )


def _sharded(optimizer: Optimizer) -> Iterator[DTensor]:
    """The units' DTensors of an optimizer."""
    for parameter in held_by(optimizer):
        if isinstance(parameter, nn.Parameter) and isinstance(parameter, DTensor) and is_sharded(parameter):
            yield parameter


@_disable_dynamo
def _refuse_first_unfit(optimizer: Optimizer, is_unfit: Callable[[DTensor], bool], needs: str) -> None:
    for parameter in _sharded(optimizer):
        if is_unfit(parameter):
            raise NotImplementedError(
                f"Expected {type(optimizer).__name__} to hold {needs}, got one of shape {tuple(parameter.shape)} with "
                f"placements {parameter.placements} on {parameter.device_mesh.size()} ranks. Use an optimizer that "
                "updates each element by itself, such as torch.optim.AdamW, for the sharded parameters."
            )


def _is_cut(parameter: DTensor) -> bool:
    return not all(placement.is_replicate() for placement in parameter.placements)


def _cannot_be_flattened(parameter: DTensor) -> bool:
    try:
        parameter.detach().view(-1)
    except (NotImplementedError, RuntimeError):
        return True
    return False


# torch's optimizers that look beyond an element. LBFGS fails in DTensor's dispatch, and so does Adafactor for matrices;
# the update of a vector would be scaled by norms of each rank's own rows, without an error.
_UNFIT: dict[type[Optimizer], tuple[Callable[[DTensor], bool], str]] = {
    torch.optim.Adafactor: (_is_cut, "parameters that are not cut, of which it takes norms"),
    torch.optim.LBFGS: (_cannot_be_flattened, "parameters of as many rows on each rank, which flatten into one vector"),
}


@_disable_dynamo
def refuse_before_finalization(optimizer: Optimizer, *_: object) -> None:
    """Refuse a step whose gradients wait for `finalize_backward`.

    Raises:
        RuntimeError: A backward was not finalized, of units with some of the optimizer's parameters.
    """
    unfinalized = [tree for tree in living_trees() if tree.step_end.is_unfinalized]
    parameter_ids = set(map(id, held_by(optimizer))) if unfinalized else ()
    for tree in unfinalized:
        if any(id(parameter) in parameter_ids for unit in tree.units for parameter in unit.parameters.trained):
            raise RuntimeError(
                "Expected finalize_backward() before the optimizer's step, got none since the last backward: "
                "set_manual_backward_finalization(True) leaves gradients unreduced until then. Call it on the "
                "outermost unit, or reset_iter_state() after an exception."
            )


@_disable_dynamo
def refuse_without_delayed_gradients(optimizer: Optimizer, *_: object) -> None:
    """Refuse a step while delayed gradients of the optimizer's parameters are missing.

    Raises:
        RuntimeError: Delayed gradients are missing.
    """
    late = [unit.gradients.delayed for tree in living_trees() for unit in tree.units if unit.gradients.delayed.num_due]
    parameter_ids = set(map(id, held_by(optimizer))) if late else ()
    missing = [
        name
        for delayed in late
        if any(id(p.sharded) in parameter_ids for p in delayed.parameters)
        for name in delayed.missing
    ]
    if missing:
        raise RuntimeError(
            f"Expected every delayed gradient before the optimizer's step, got none yet for {sorted(missing)}. Compute "
            "them, and call the callback that `delay_gradient` gave for each."
        )


@_disable_dynamo
def wait_for_offloaded_shards(optimizer: Optimizer, *_: object) -> None:
    """Let the host wait for gathers that read shards on the CPU: a forward may have come after the last backward.

    Effects: a host sync if the optimizer holds parameters on the CPU, gathered since the last host sync.
    """
    reading = [tree for tree in living_trees() if tree.streams.reads_shards]
    if reading and any(isinstance(p, DTensor) and p.device.type == "cpu" for p in held_by(optimizer)):
        for tree in reading:
            tree.streams.wait_for_shards()


@_disable_dynamo
def note_step(optimizer: Optimizer, *_: object) -> None:
    """Make every unit with some of the optimizer's parameters stale: the step may have changed main weights."""
    for unit in _units_of(optimizer):
        unit.weights.note_update()


def forget_measured(optimizer: Optimizer) -> None:
    """Drop the amaxes that evaluations have measured of an optimizer's units, before a replay of a captured step.

    Effects: those of `WeightScaling.weights_changed`.
    """
    for unit in _units_of(optimizer):
        for listener in unit.parameters.listeners:
            listener.weights_changed(unit.weights, WeightsChange.REPLAYED)


def _units_of(optimizer: Optimizer) -> Iterator[Unit]:
    """The units with some of the optimizer's parameters."""
    updated = {id(p): p for p in held_by(optimizer) if isinstance(p, DTensor)}
    if not updated:
        return
    # An unknown DTensor may share memory with a unit's DTensor: then every unit counts as written.
    is_known = all([isinstance(parameter, nn.Parameter) and is_sharded(parameter) for parameter in updated.values()])
    for tree in living_trees():
        for unit in tree.units:
            if not is_known or unit.parameters.holds_any(updated):
                yield unit


@_disable_dynamo
def finish_reductions(optimizer: Optimizer, *_: object) -> None:
    """Order the current stream after all reductions still under way."""
    finish_deferred()


def prepare_for_compiler(optimizer: Optimizer, *_: object) -> None:
    """Give gradients storage offsets that Dynamo can trace, before a compiled step."""
    if is_compiled():
        _with_their_own_offsets(optimizer)


@_disable_dynamo
def _with_their_own_offsets(optimizer: Optimizer) -> None:
    """Make gradients anew: Dynamo expects a DTensor to have its local tensor's storage offset."""
    for parameter in held_by(optimizer):
        if isinstance(gradient := parameter.grad, DTensor):
            parameter.grad = dtensor_over(local_of(gradient), gradient._spec)


@_disable_dynamo
def step_on_dtensors(optimizer: Optimizer, *_: object) -> None:
    """Let the step see the optimizer as it is; refuse complex parameters of which the step would change copies.

    Raises:
        NotImplementedError: An optimizer of torch's that sees complex parameters as real numbers holds a unit's, with a
            gradient and with uneven shards of the last dim.
    """
    if not isinstance(optimizer, _OVER_REAL_NUMBERS):
        return
    for parameter in _sharded(optimizer):
        if parameter.is_complex() and parameter.grad is not None and _is_gathered_as_real(parameter):
            raise NotImplementedError(
                f"Expected complex parameters with as many elements on each rank for {type(optimizer).__name__}, got "
                f"shape {tuple(parameter.shape)} with placements {parameter.placements} on "
                f"{parameter.device_mesh.size()} ranks, of which torch would update a copy. Install lamella-optim, and "
                "call lamella_optim.install() once, or lamella_optim.step_on_local_shards(optimizer) for a subclass."
            )


_OVER_REAL_NUMBERS = (
    *(torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax),
    *(torch.optim.ASGD, torch.optim.LBFGS, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop),
    torch.optim.Rprop,
)
"""Optimizers whose steps call `view_as_real`. DTensor's is a gathered copy where the last dim is cut unevenly."""


def _is_gathered_as_real(parameter: DTensor) -> bool:
    last, mesh = parameter.ndim - 1, parameter.device_mesh
    cuts = [mesh.size(axis) for axis, placement in enumerate(parameter.placements) if placement.is_shard(last)]
    return parameter.shape[last] % math.prod(cuts) != 0


BEFORE_STEP: dict[str, StepHook] = {
    # Later entries look the optimizer's parameters up among sharded parameters, and would miss originals.
    "originals": refuse_originals,
    # An error must leave gradients, streams and the step's arguments unchanged.
    "kernels": refuse_kernels_on_dtensors,
    "finalization": refuse_before_finalization,
    "delayed gradients": refuse_without_delayed_gradients,
    # The step reads gradients and writes shards: transfers of both must be over.
    "offloaded shards": wait_for_offloaded_shards,
    "gradients": finish_reductions,
    "compiler": prepare_for_compiler,
    # Later hooks would get the view and not the optimizer.
    "view": step_on_dtensors,
}
AFTER_STEP: dict[str, StepHook] = {"staleness": note_step}
_REPLACEABLE = ("originals", "kernels", "gradients", "view", "staleness")


def replace_step_hook(name: str, hook: StepHook) -> None:
    """Put a function in the place of an entry of `BEFORE_STEP` or `AFTER_STEP`: the order stays as written.

    Args:
        name: "originals": parameters from before `fully_shard`, and unsharded forms. "kernels": optimizers whose
            kernels know no DTensors. "gradients": reductions that are still under way. "view": the arguments that the
            step is called with; a step on DTensors needs `step_on_dtensors` first. "staleness": units whose main
            weights the step may have changed.
        hook: Called with a hook's arguments (optimizer, args, kwargs) at every step of every `torch.optim` optimizer.

    Raises:
        ValueError: No entry has the name, or the engine keeps the entry.
    """
    if name not in _REPLACEABLE:
        raise ValueError(f"Expected the name of a step hook that may be replaced, {_REPLACEABLE}, got {name!r}.")
    hooks = BEFORE_STEP if name in BEFORE_STEP else AFTER_STEP
    hooks[name] = hook


def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Run `BEFORE_STEP`.

    Returns:
        The arguments that the step is called with, if one of the functions returned some.

    Raises:
        RuntimeError: The optimizer was built before `fully_shard`, or over unsharded parameters; or gradients of its
            parameters are missing: delayed gradients, or gradients of a backward not finalized by hand yet.
        TypeError: The optimizer's kernels write beside the shards of DTensors.
        NotImplementedError: The optimizer looks beyond an element of cut parameters, or would change copies of complex
            ones.

    Effects: the current stream, and the host for shards on the CPU, wait for gradients and gathers in flight.
    """
    changed = None
    for hook in BEFORE_STEP.values():
        if (returned := hook(optimizer, args, kwargs)) is not None:
            args, kwargs = changed = returned
    return changed


def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Run `AFTER_STEP`."""
    for hook in AFTER_STEP.values():
        hook(optimizer, args, kwargs)


# The process's: torch's handles of the two hooks; empty until the first `fully_shard`.
_handles: list[RemovableHandle] = []


def register_step_hooks() -> None:
    """Let every `torch.optim` step run `BEFORE_STEP` and `AFTER_STEP`; a second call changes nothing.

    Called by `fully_shard`: a program that imports the engine and shards nothing steps as without it.

    Effects: registers two hooks for all optimizers of the process.
    """
    if not _handles:
        _handles.append(register_optimizer_step_pre_hook(before_step))
        _handles.append(register_optimizer_step_post_hook(after_step))
