"""FSDP2's functions of a unit: forwards by another name, and streams that several models share."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch.distributed.fsdp as fsdp2
import torch.nn as nn

from lamella_engine._attached import find_state, state_of, unit_state_of
from lamella_engine._hooks import post_forward, pre_forward


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let another method of a unit unshard before and reshard after, as `forward` does.

    Args:
        module: A unit; nothing happens to any other module, so that the same code runs without sharding.
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
    # The module will hold the result. A strong reference back, such as the one in a bound method, would keep a deleted
    # model's memory until the cyclic collector runs.
    ref = weakref.ref(module)
    function: Any = getattr(method, "__func__", None) if getattr(method, "__self__", None) is module else None
    call = method if function is None else lambda *args, **kwargs: function(ref(), *args, **kwargs)
    state = state_of(module)  # its own, which says how to cast, also if another unit takes the parameters over

    def wrapped(*args: Any, **kwargs: Any) -> object:
        module = ref()
        args, kwargs = pre_forward(state, cast(nn.Module, module), args, kwargs)
        return post_forward(state, cast(nn.Module, module), args, call(*args, **kwargs))

    functools.update_wrapper(wrapped, function or method)
    vars(wrapped).update(__signature__=inspect.signature(method))
    return wrapped


def share_comm_ctx(modules: Sequence[fsdp2.FSDPModule]) -> None:
    """Let several outermost units share streams, and the limit on reductions in flight: pipeline stages of one rank.

    Each stays the outermost unit of its own tree. Call it after the last `fully_shard` on any of the units.

    Args:
        modules: Units, on one device.

    Raises:
        ValueError: A module is no unit, or the units lie on different devices.
    """
    contexts = [unit_state_of(module, "Expects list of FSDPModules").context for module in modules]
    for context in contexts[1:]:
        if context.device != contexts[0].device:
            raise ValueError(f"Expected units on one device, got {contexts[0].device} and {context.device}.")
    for context in contexts[1:]:
        if context is not contexts[0]:
            context.share_communication(contexts[0])
