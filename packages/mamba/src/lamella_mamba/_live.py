"""Helper objects that keep parameters of a module are made to look parameters up in the module at each use."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import reduce
from typing import Any, NoReturn

from torch import nn


def bind_live_parameters(model: nn.Module) -> list[str]:
    """Let objects beside a model's modules look parameters up at each use, instead of keeping the Parameters.

    megatron-core's Mamba mixer hands `A_log`, `D`, `dt_bias` and the convolution to a context-parallel helper when the
    mixer is built. `fully_shard` exchanges the mixer's Parameters, and the helper would go on with the originals, which
    no optimizer updates. Every attribute that is a parameter below the module becomes a property of the helper, read
    from the module. Bind before `fully_shard`; a second call finds nothing. A bound model refuses `copy.deepcopy`
    by a TypeError: the copy's helpers would read the original's parameters. Copy first, then bind each copy.

    Args:
        model: Changed in place: the class of a helper becomes a subclass of its own.

    Returns:
        The attributes that were bound, as dotted paths from the model.

    Effects: none on parameters.
    """
    bound = []
    for prefix, module in model.named_modules():
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        for attribute, helper in list(vars(module).items()):
            if _is_helper(helper):
                parameter_names = {key: names[id(value)] for key, value in vars(helper).items() if id(value) in names}
                _bind(helper, module, parameter_names)
                bound += [".".join(filter(None, (prefix, attribute, key))) for key in parameter_names]
    return bound


def _is_helper(value: object) -> bool:
    """Whether an attribute of a module is an object that may keep parameters."""
    return hasattr(value, "__dict__") and not isinstance(value, nn.Module | nn.Parameter | type | Mapping)


def _bind(helper: Any, module: nn.Module, names: Mapping[str, str]) -> None:
    """Make some attributes of an object properties that look a module's parameters up."""
    if not names:
        return
    # Weak: the module holds the helper. A strong reference back would keep a deleted model's memory until the cyclic
    # collector runs.
    ref = weakref.ref(module)
    live: dict[str, Any] = {key: _look_up(ref, name) for key, name in names.items()}
    live["__deepcopy__"] = _refuse_deepcopy
    helper.__class__ = type(type(helper).__name__, (type(helper),), live)
    for key in names:
        del vars(helper)[key]


def _look_up(module: weakref.ref[nn.Module], name: str) -> property:
    def look_up(_: object) -> Any:
        holder = module()
        assert holder is not None, f"the module that holds {name!r} is gone"
        return reduce(getattr, name.split("."), holder)

    return property(look_up)


def _refuse_deepcopy(_: object, memo: object) -> NoReturn:
    raise TypeError(
        "Expected a model copied before bind_live_parameters, got deepcopy after it. Copy first, then bind each copy."
    )
