"""FSDP2's functions of a unit: forward methods by other names, and streams shared by several models."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch.distributed.fsdp as fsdp2
import torch.nn as nn

from lamella_engine._modules.attached import state_of, unit_state_of
from lamella_engine._modules.hooks import call_between_hooks
from lamella_engine._modules.state import find_state


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let another method of a unit unshard before and reshard after, as `forward` does.

    Args:
        module: A unit; other modules are left alone, so the same code runs without sharding.
        method_name: Such as "generate" or "encode".

    Raises:
        ValueError: The module has no such method.

    Effects: replaces the method on this module.
    """
    if find_state(module) is None:
        return
    if not hasattr(module, method_name):
        raise ValueError(
            f"Expected `method_name` to be a method of {type(module).__name__}, got {method_name!r}: {type(module)} "
            f"does not have a method {method_name}."
        )
    setattr(module, method_name, _with_hooks(module, getattr(module, method_name)))


def _with_hooks(module: nn.Module, method: Callable[..., object]) -> Callable[..., object]:
    # The module will hold the result. A strong reference back, as in a bound method, would keep a deleted model's
    # memory until the cyclic collector runs.
    ref = weakref.ref(module)
    function: Any = getattr(method, "__func__", None) if getattr(method, "__self__", None) is module else None
    call = method if function is None else lambda *args, **kwargs: function(ref(), *args, **kwargs)
    state = state_of(module)  # also after a takeover: casts follow the module's own policy

    def wrapped(*args: Any, **kwargs: Any) -> object:
        return call_between_hooks(state, cast(nn.Module, ref()), call, args, kwargs)

    functools.update_wrapper(wrapped, function or method)
    vars(wrapped).update(__signature__=inspect.signature(method))
    return wrapped


def share_comm_ctx(modules: Sequence[fsdp2.FSDPModule]) -> None:
    """Let several outermost units share streams, and the limit on reductions in flight: pipeline stages of a rank.

    Each unit stays the outermost unit of its tree. Call the function after the last `fully_shard` on any of the units.

    Args:
        modules: Units, on the same device.

    Raises:
        ValueError: A module is no unit, or the units lie on different devices.
    """
    trees = [unit_state_of(module, "Expects list of FSDPModules").tree for module in modules]
    for tree in trees:
        if tree.streams.device != trees[0].streams.device:
            raise ValueError(f"Expected units on one device, got {trees[0].streams.device} and {tree.streams.device}.")
    for tree in trees:
        if tree is not trees[0]:
            tree.share_communication(trees[0])
