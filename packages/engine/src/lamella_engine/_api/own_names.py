"""Names common to a model and its unit's class, and the meaning of each: the model's or the unit's."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar, cast

import torch.nn as nn

from lamella_engine._options.options import ShardingOptions

V = TypeVar("V")
_ABSENT = object()
_TABLES = ("_parameters", "_buffers", "_modules")  # read by `nn.Module.__getattr__`, which classes come before


def yields_to_model(verb: V) -> V:
    """Let a method or property of a unit give way to the model's own attribute of the same name, found at each use.

    Classes and instance attributes win by their places: `UnitVerbs` is a unit's last base, and the descriptor has no
    setter. The descriptor itself looks for children, parameters and buffers, and asks a class's `__getattr__`.
    """
    return cast(V, _YieldingVerb(verb))


class _YieldingVerb:
    def __init__(self, verb: Any) -> None:
        self._verb = verb
        self._name = ""
        self.__doc__ = verb.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, module: nn.Module | None, owner: type | None = None) -> Any:
        if module is None:
            return self._verb
        attribute = self._model_attribute(module)
        return self._verb.__get__(module, owner) if attribute is _ABSENT else attribute

    def _model_attribute(self, module: nn.Module) -> object:
        for table in _TABLES:
            if self._name in (attributes := vars(module).get(table, {})):
                return attributes[self._name]
        fallback: Any = type(module).__getattr__
        if fallback is nn.Module.__getattr__:
            return _ABSENT
        try:
            attribute = fallback(module, self._name)
        except AttributeError:
            return _ABSENT
        # A wrapper around an inner unit may pass the name on, and has no attribute of the name.
        is_inner_units = getattr(attribute, "__func__", None) is self._verb or isinstance(attribute, ShardingOptions)
        return _ABSENT if is_inner_units else attribute


def hidden_names(module: nn.Module, names: Collection[str]) -> list[str]:
    """The names of a module's methods, children, parameters and buffers hidden by a unit's class.

    Instance attributes are not hidden, as Python finds them first.

    Args:
        module: A module, not a unit yet.
        names: Names of the unit's class.
    """
    classes = [cls for cls in type(module).__mro__ if not issubclass(nn.Module, cls)]
    tables = [*map(vars, classes), module._parameters, module._buffers, module._modules]
    is_instances = vars(module)
    return sorted(name for name in names if name not in is_instances and any(name in table for table in tables))
