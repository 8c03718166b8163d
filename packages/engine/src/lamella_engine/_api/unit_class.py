"""The class of a unit's modules: FSDPModule's methods before those of the module's class.

Note [Names that the module has itself]. A model may have a method, property, child or parameter called as one of
lamella's methods (`hold`, `mark_updated`). The model's code goes on meaning its own: the unit's class passes the name
on to the module's class, or to its children. The engine calls its methods through `FSDPModule`, as users of such a
model can: `FSDPModule.hold(unit)`. FSDP2's names mean FSDP2's methods, as under FSDP2; `fully_shard` warns of a clash.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable
from functools import cache
from typing import Any, Final

import torch.distributed.fsdp as fsdp2
from torch import nn

from lamella_engine._api.module import FSDPModule

_FSDP2_NAMES: Final = frozenset(name for name in vars(fsdp2.FSDPModule) if not name.startswith("_"))
_LAMELLA_NAMES: Final = frozenset(
    name
    for name in vars(FSDPModule)
    if not name.startswith("_") and name not in _FSDP2_NAMES and not hasattr(nn.Module, name)
)


def warn_of_clashes(module: nn.Module) -> None:
    """Warn of names of FSDP2's methods that a module has itself.

    Effects: a UserWarning for each name.
    """
    for name in sorted(_FSDP2_NAMES & {*_class_names(type(module)), *_child_names(module)}):
        warnings.warn(
            f"{type(module).__name__} has {name!r} itself, and FSDP2's method of that name takes its place on a unit. "
            "Rename it, or its callers get FSDP2's method.",
            stacklevel=3,
        )


def unit_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that makes a module a unit's; see Note [Names that the module has itself]."""
    return _unit_class(type(module), frozenset(_LAMELLA_NAMES & _child_names(module)))  # type: ignore[arg-type]


@cache
def _unit_class(original: type[nn.Module], children: frozenset[str]) -> type[nn.Module]:
    class_names = _LAMELLA_NAMES & _class_names(original)
    namespace: dict[str, Any] = {name: inspect.getattr_static(original, name) for name in class_names}
    namespace |= {name: _Child(name) for name in children}
    return type(f"FSDP{original.__name__}", (FSDPModule, original), namespace)


class _Child:
    """Finds a child, parameter or buffer of a module before an attribute of the same name in the module's class."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, module: nn.Module | None, _: type | None = None) -> object:
        return self if module is None else nn.Module.__getattr__(module, self._name)


def _class_names(cls: type[nn.Module]) -> set[str]:
    """The names that a module's class defines beyond nn.Module."""
    inherited = {*nn.Module.__mro__, *FSDPModule.__mro__}
    return {name for base in cls.__mro__ if base not in inherited for name in vars(base)}


def _child_names(module: nn.Module) -> set[str]:
    held: tuple[Iterable[str], ...] = (module._modules, module._parameters, module._buffers)
    return {name for names in held for name in names}
