"""The engine's part in every `torch.optim` step: one hook before the step and one after it, in a written order.

Hooks that modules register on their own run in the order of their imports, and so in the order of file names. The two
tuples below are the order instead. Each function takes a hook's arguments (optimizer, args, kwargs), and may return
other arguments for the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lamella_engine._context import refuse_before_finalization, wait_for_offloaded_shards
from lamella_engine._delayed import refuse_without_delayed_gradients
from lamella_engine._local_steps import refuse_kernels_on_dtensors
from lamella_engine._optimizers import exchange_originals
from lamella_engine._overlapping import finish_late_reductions
from lamella_engine._plain_steps import step_on_plain_tensors
from lamella_engine._staleness import note_step

Hook = Callable[[Optimizer, Any, Any], tuple[Any, Any] | None]

BEFORE_STEP: tuple[Hook, ...] = (
    # All others look the optimizer's parameters up among the sharded ones, and find none of the originals there.
    exchange_originals,
    # An error must leave gradients, streams and the step's arguments as they were.
    refuse_kernels_on_dtensors,
    refuse_before_finalization,
    refuse_without_delayed_gradients,
    # The step reads gradients and writes shards: both must be there.
    wait_for_offloaded_shards,
    finish_late_reductions,
    # Hooks that follow would be given the view and not the optimizer.
    step_on_plain_tensors,
)
AFTER_STEP: tuple[Hook, ...] = (note_step,)


def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Run `BEFORE_STEP`.

    Returns:
        The arguments that the step is called with, if one of the functions returned some.

    Raises:
        RuntimeError: Gradients of the optimizer's parameters are still to come: delayed ones, or those of a backward
            that is finalized by hand.
        TypeError: The optimizer's kernels write beside the shards of DTensors.
        ValueError: The optimizer was built before `fully_shard`, and its state cannot be sharded.

    Effects: the current stream, and the host for shards on the CPU, wait for gradients and gathers in flight.
    """
    changed = None
    for hook in BEFORE_STEP:
        if (returned := hook(optimizer, args, kwargs)) is not None:
            args, kwargs = changed = returned
    return changed


def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Run `AFTER_STEP`."""
    for hook in AFTER_STEP:
        hook(optimizer, args, kwargs)


register_optimizer_step_pre_hook(before_step)
register_optimizer_step_post_hook(after_step)
