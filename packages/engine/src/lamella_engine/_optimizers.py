"""An optimizer that was built before its parameters were sharded goes on with the shards."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lamella_engine._sharded_parameter import ShardedParameter, any_sharded_originals, shard_like, sharded_from
from lamella_engine._step_hooks import held_by

Opt = TypeVar("Opt", bound=Optimizer)


def shard_optimizer(optimizer: Opt) -> Opt:
    """Let an optimizer go on with the sharded parameters, if it was built before `fully_shard`.

    Every parameter that was sharded is replaced by what it became, in its place in its param group; options stay. Of
    its state, tensors of its shape become DTensors that lie as it does, in the main weights' dtype where they were in
    the parameter's own; single values (`step`) stay. Parameters that no unit took are left alone, and nothing
    happens to an optimizer that was built afterwards.

    The first `step()` of a `torch.optim` optimizer does this by itself. Call it where something looks at the
    optimizer's parameters before that (`GradScaler`, clipping by param group, checkpoints), or for the memory: until
    then the optimizer holds the unsharded parameters, and its own unsharded state.

    Args:
        optimizer: Its state must be the same on every rank, as the parameters were.

    Returns:
        `optimizer`, changed. Gradients that were on the unsharded parameters are lost.

    Raises:
        ValueError: It holds a parameter in both forms, or has state for a sharded one that cannot be cut as it was
            (statistics of rows, lists of directions, quantised blocks). Nothing has changed then.

    Effects: allocates the shards of the state on the current stream and frees what was unsharded; not a collective.
    """
    replaced = _replaced(optimizer)
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


def _replaced(optimizer: Optimizer) -> dict[torch.Tensor, ShardedParameter]:
    """The parameters that became something else."""
    return {held: became for held in held_by(optimizer) if (became := sharded_from(held)) is not None}


def _check_single(optimizer: Optimizer, replaced: dict[torch.Tensor, ShardedParameter]) -> None:
    held = set(held_by(optimizer))
    for parameter in replaced.values():
        if parameter.sharded in held:
            raise ValueError(
                f"Expected {parameter.name!r} once in {type(optimizer).__name__}, got it both unsharded, from before "
                "fully_shard, and sharded. Build the optimizer from one of them; either will do."
            )


def _check_state(original: torch.Tensor, parameter: ShardedParameter, state: dict[str, Any]) -> None:
    """Refuse what has another shape than the parameter, and is no single value."""
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
    placements = [getattr(each, "placements", None) for each in (tensor, original)]
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


@_disable_dynamo
def exchange_originals(optimizer: Optimizer, *_: object) -> None:
    """Give an optimizer that was built before `fully_shard` the sharded parameters."""
    if any_sharded_originals():
        shard_optimizer(optimizer)
