"""Parameters kept by objects beside modules: refused before sharding, which would leave the object a stale weight.

`fully_shard` puts new Parameters into the modules' dictionaries. A helper object with a Parameter from the time when
a module was built (a context-parallel helper, a list beside the module tree) goes on with the original: the original
computes, is never updated, and stays in memory at full size on every rank, without an error.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Iterable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import NamedTuple

import torch
import torch.nn as nn
from torch.optim import Optimizer

_DEPTH = 3  # the attribute of a module, an object in it, a container in that
_OWN = frozenset(vars(nn.Module()))  # torch's own attributes of a module
_PLAIN = frozenset({type(None), bool, int, float, str, bytes, torch.dtype, torch.device})
# Optimizers from before sharding have their own refusal, at their step. Recurrent modules look their list up anew in
# forward; tensors, functions and classes hold no parameters in attributes of theirs.
_PASSED_OVER = (nn.Module, Optimizer, torch.Tensor, type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
_Seen = dict[int, tuple[object, int]]
"""Objects without a parameter, by id, each with the depth that it was looked through to."""


class _Holder(NamedTuple):
    path: str
    class_name: str


def refuse_outside_holders(modules: Iterable[tuple[str, nn.Module]], parameters: Mapping[int, str]) -> None:
    """Refuse parameters that an object in a module's attributes keeps, outside the modules' own parameters.

    Args:
        modules: The modules of a unit, with dotted prefixes.
        parameters: The names of the parameters to shard, by the Parameter's id.

    Raises:
        ValueError: Such an object exists; the message names it and the parameter.
    """
    # One for all modules: a model's configuration, with hundreds of fields, is an attribute of most of its modules.
    seen: _Seen = {}
    for prefix, module in modules:
        for name, value in vars(module).items():
            if name in _OWN or (isinstance(module, nn.RNNBase) and name == "_flat_weights"):
                continue
            for parameter, holder in _parameters_held_in(
                value, prefix + name, type(module).__name__, parameters, _DEPTH, seen
            ):
                raise ValueError(
                    f"Expected only modules to hold {parameters[parameter]!r}, got the Parameter itself in "
                    f"{holder.path!r} of a {holder.class_name} too. After fully_shard that would compute with a weight "
                    "that no optimizer updates. Let it look the parameter up in its module at each use (for example by "
                    "a property), or leave the parameter out by `ignored_params`."
                )


def _parameters_held_in(
    value: object, path: str, class_name: str, ids: Container[int], depth: int, seen: _Seen
) -> Iterator[tuple[int, _Holder]]:
    """The parameters below an attribute, each with its place."""
    if type(value) in _PLAIN:
        return
    if isinstance(value, nn.Parameter):
        if id(value) in ids:
            yield id(value), _Holder(path, class_name)
        return
    if isinstance(value, _PASSED_OVER) or depth == 0:
        return
    if id(value) in seen and seen[id(value)][1] >= depth:
        return
    seen[id(value)] = value, depth  # The object itself too: a dead object's id may be a later object's.
    for inner_path, inner_class, inner in _parts(value, path, class_name):
        yield from _parameters_held_in(inner, inner_path, inner_class, ids, depth - 1, seen)


def _parts(value: object, path: str, class_name: str) -> Iterator[tuple[str, str, object]]:
    """The objects in a container or in an object's attributes, each with its path and its holder's class."""
    if isinstance(value, Mapping):
        yield from ((f"{path}[{key!r}]", class_name, inner) for key, inner in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"{path}[{i}]", class_name, inner) for i, inner in enumerate(value))
    elif isinstance(value, functools.partial):
        yield f"{path}.args", class_name, [*value.args, *value.keywords.values()]
    else:
        name = type(value).__name__
        yield from ((f"{path}.{key}", name, inner) for key, inner in _attributes(value))


def _attributes(value: object) -> Iterator[tuple[str, object]]:
    """The attributes in an object's dictionary and slots. Properties are not called: they look things up anew."""
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        yield from list(attributes.items())
    for cls in type(value).__mro__:
        for name, member in list(vars(cls).items()):
            if isinstance(member, MemberDescriptorType):
                try:
                    inner = member.__get__(value)
                except AttributeError:  # an empty slot
                    continue
                yield name, inner
