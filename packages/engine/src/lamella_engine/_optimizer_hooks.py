"""The engine's part in every `torch.optim` step: one hook before the step and one after it, in a written order.

Hooks registered module by module would run in the order of imports, and so in the order of file names. The two mappings
below are the order instead. A package above the engine replaces entries by name (`replace_step_hook`), at their places.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._compile import _disable_dynamo
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lamella_engine._context import finish_left, refuse_before_finalization, wait_for_offloaded_shards
from lamella_engine._delayed import refuse_without_delayed_gradients
from lamella_engine._ragged import dtensor_over
from lamella_engine._sharded_parameter import sharded_originals
from lamella_engine._sharding import local_of
from lamella_engine._staleness import note_step
from lamella_engine._step_hooks import held_by, is_compiled

# Their kernels take the address of a DTensor's shard and the size of the whole, and write past the shard's end.
_LIBRARIES_OF_KERNELS = {"apex", "transformer_engine"}

StepHook = Callable[[Optimizer, Any, Any], tuple[Any, Any] | None]
"""A function of a hook's arguments (optimizer, args, kwargs), which may return other arguments for the step."""


@_disable_dynamo
def refuse_originals(optimizer: Optimizer, *_: object) -> None:
    """Refuse an optimizer with parameters from before `fully_shard`: its step would train no model.

    Raises:
        RuntimeError: The optimizer holds the original of a sharded parameter whose unit is alive.
    """
    names = [parameter.name for parameter in sharded_originals(held_by(optimizer)).values()]
    if names:
        raise RuntimeError(
            f"Expected {type(optimizer).__name__} to hold sharded parameters, got {len(names)} from before "
            f"fully_shard, {names[0]!r} among them. Build the optimizer after fully_shard; or install lamella-optim "
            "and `import lamella_optim`: then it goes on with the shards."
        )


def refuse_kernels_on_dtensors(optimizer: Optimizer, *_: object) -> None:
    """Refuse DTensors to optimizers whose kernels take the address of a shard and the size of the whole.

    Raises:
        TypeError: The optimizer is Transformer Engine's or apex's, and holds a DTensor.
    """
    library = type(optimizer).__module__.partition(".")[0]
    if library not in _LIBRARIES_OF_KERNELS:
        return
    if any(isinstance(parameter, DTensor) for parameter in held_by(optimizer)):
        raise TypeError(
            f"Expected {library}'s {type(optimizer).__name__} to be given plain tensors, all that its kernels know, "
            "got DTensors, beside whose shards it would write. Call lamella_optim.step_on_local_shards(optimizer) once."
        )


@_disable_dynamo
def finish_reductions(optimizer: Optimizer, *_: object) -> None:
    """Order the current stream after all reductions still under way."""
    finish_left()


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


def step_on_dtensors(optimizer: Optimizer, *_: object) -> None:
    """Let the step see the optimizer as it is."""


BEFORE_STEP: dict[str, StepHook] = {
    # All later entries look the optimizer's parameters up among the sharded ones, and miss originals.
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
        name: "originals": parameters from before `fully_shard`. "kernels": optimizers whose kernels know no DTensors.
            "gradients": reductions that are still under way. "view": the arguments that the step is called with.
            "staleness": units whose main weights the step may have changed.
        hook: Called with a hook's arguments (optimizer, args, kwargs) at every step of every `torch.optim` optimizer.

    Raises:
        ValueError: No entry has this name, or it is the engine's own.
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
        RuntimeError: The optimizer was built before `fully_shard`; or gradients of its parameters are still to come:
            delayed ones, or those of a backward that is finalized by hand.
        TypeError: The optimizer's kernels write beside the shards of DTensors.

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


register_optimizer_step_pre_hook(before_step)
register_optimizer_step_post_hook(after_step)
