"""Optimizers built before `fully_shard`, or while units are unsharded, continue with the sharded parameters."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lamella_engine.extending import ShardedParameter, held_by, shard_like, sharded_originals
from lamella_optim._installation import install, step_hook

Opt = TypeVar("Opt", bound=Optimizer)


def shard_optimizer(optimizer: Opt) -> Opt:
    """Let an optimizer built before `fully_shard`, or while units are unsharded, continue with the sharded parameters.

    Each original parameter, and each parameter that was listed while its unit was unsharded, is replaced by its sharded
    parameter at the same place of its param group; options stay. State of the parameter's shape becomes DTensors with
    the parameter's placements, in the main weights' dtype where the state had the parameter's dtype; single values
    (`step`) stay. Parameters outside of all units stay, and an optimizer of shards stays unchanged.

    After `install` the first `step()` of a `torch.optim` optimizer does the same by itself. Call this function if other
    code reads the optimizer's parameters before the step (`GradScaler`, clipping by param group, checkpoints), or to
    save memory: until then the optimizer holds the unsharded parameters, and unsharded state.

    Args:
        optimizer: Any optimizer whose state is the same on every rank, as the parameters were.

    Returns:
        `optimizer`, changed. Gradients of the unsharded parameters are lost.

    Raises:
        ValueError: The optimizer holds a parameter in both forms, or has state that cannot be sharded (statistics of
            rows, lists of directions, quantised blocks). The optimizer is unchanged.

    Effects: allocates shards of the state on the current stream and frees the unsharded state; not a collective.
        Calls `install`.
    """
    replaced = sharded_originals(held_by(optimizer))
    if not replaced:
        return optimizer
    install()
    _check_single(optimizer, replaced)
    for original, parameter in replaced.items():
        _check_state(original, parameter, optimizer.state.get(original, {}))
    for group in optimizer.param_groups:
        on_device = bool(group.get("fused") or group.get("capturable"))
        for i, original in enumerate(group["params"]):
            if original in replaced:
                group["params"][i] = replaced[original].sharded
                _move_state(optimizer, original, replaced[original], on_device)
    return optimizer


def _check_single(optimizer: Optimizer, replaced: dict[torch.Tensor, ShardedParameter]) -> None:
    optimized = set(held_by(optimizer))
    for parameter in replaced.values():
        if parameter.sharded in optimized:
            raise ValueError(
                f"Expected {parameter.name!r} once in {type(optimizer).__name__}, got it both unsharded and sharded. "
                "Build the optimizer from one of them; either will do."
            )


def _check_state(original: torch.Tensor, parameter: ShardedParameter, state: dict[str, Any]) -> None:
    """Refuse state tensors with neither the parameter's shape nor a single value."""
    for key, value in state.items():
        for tensor in pytree.tree_leaves(value):
            if isinstance(tensor, torch.Tensor) and not _is_single(tensor) and not _lies_alike(tensor, original):
                raise ValueError(
                    f"Expected state of shape {tuple(original.shape)}, or single values, for {parameter.name!r}, which "
                    f"was sharded after the optimizer had stepped, got {key!r} of shape {tuple(tensor.shape)}. Build "
                    "the optimizer after fully_shard, or clear its state."
                )


def _is_single(tensor: torch.Tensor) -> bool:
    return tensor.ndim == 0


def _lies_alike(tensor: torch.Tensor, original: torch.Tensor) -> bool:
    placements = [getattr(candidate, "placements", None) for candidate in (tensor, original)]
    return tensor.shape == original.shape and placements[0] == placements[1]


def _move_state(optimizer: Optimizer, original: torch.Tensor, parameter: ShardedParameter, on_device: bool) -> None:
    if original not in optimizer.state:
        return

    def shard(tensor: torch.Tensor) -> torch.Tensor:
        if _is_single(tensor):
            return tensor.to(parameter.shard.device) if on_device else tensor
        dtype = parameter.sharded.dtype if tensor.dtype == original.dtype else tensor.dtype
        return shard_like(parameter, tensor, dtype)

    with torch.no_grad():
        state = pytree.tree_map_only(torch.Tensor, shard, optimizer.state.pop(original))
    optimizer.state[parameter.sharded] = state


@step_hook("originals")
@_disable_dynamo
def exchange_originals(optimizer: Optimizer, *_: object) -> None:
    """Give an optimizer built before `fully_shard` the sharded parameters."""
    shard_optimizer(optimizer)
