"""The tensors in a module's arguments and outputs: in nested containers, in dataclasses, hidden in other objects."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, TypeVar, cast

import torch
from torch.utils import _pytree as pytree

T = TypeVar("T")

_PLAIN = (torch.Tensor, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type(None))


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], tree: T) -> T:
    """Replace every tensor of a nest by the result of `fn`.

    Containers are the classes in torch's pytree registry (a library's output classes register themselves), sets, plain
    subclasses of lists and dicts, and dataclasses.

    Returns:
        The nest with the results. A container with unchanged tensors is the same object, else a shallow copy.

    Effects: as `fn`.
    """
    return cast(T, _map(fn, tree))


def _map(fn: Callable[[torch.Tensor], torch.Tensor], node: Any) -> Any:
    if isinstance(node, torch.Tensor):
        return fn(node)
    opened = _open(node)
    if opened is None:
        return node
    before, form = opened
    after = [fn(child) if isinstance(child, torch.Tensor) else _map(fn, child) for child in before]
    return node if all(map(is_, before, after)) else _copy(node, after, form)


def tensors_in(tree: object) -> list[torch.Tensor]:
    """The tensors of a nest, in the order in which `map_tensors` visits them."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [leaf for leaf in _leaves(tree) if isinstance(leaf, torch.Tensor)]


def hides_tensors(tree: object) -> bool:
    """Whether a nest holds an object that may hide tensors from `tensors_in`."""
    return any(not isinstance(leaf, _PLAIN) for leaf in _leaves(tree))


def _leaves(tree: object) -> list[object]:
    leaves: list[object] = []
    _collect(tree, leaves)
    return leaves


def _collect(node: Any, leaves: list[object]) -> None:
    opened = _open(node)
    if opened is None:
        leaves.append(node)
        return
    for child in opened[0]:
        if isinstance(child, torch.Tensor):
            leaves.append(child)
        else:
            _collect(child, leaves)


# -- one level of a nest --------------------------------------------------------------------------------------------


def _open(node: Any) -> tuple[Sequence[Any], Any] | None:
    """The items of a container, and the form by which `_copy` puts others in place: keys, names, or pytree's spec.

    None for any other object. Tuples, lists and dicts, which every forward takes and returns, do not go through pytree,
    which takes several times as long. Exact classes alone: a named tuple, or an output class of a library, is not
    rebuilt from a list.
    """
    kind = type(node)
    if kind is tuple or kind is list:
        return node, None
    if kind is dict:
        return list(node.values()), list(node)
    if isinstance(node, _PLAIN):
        return None
    if not pytree.tree_is_leaf(node):
        # A level at a time: pytree by itself would pass over dataclasses further in.
        return pytree.tree_flatten(node, is_leaf=lambda child: child is not node)
    if _is_record(node):
        names = [field.name for field in dataclasses.fields(node)]
        return [getattr(node, name) for name in names], names
    if not _is_container(node):
        return None
    return (list(node.values()), list(node)) if isinstance(node, dict) else (list(node), None)


def _copy(node: Any, items: list[Any], form: Any) -> Any:
    """A shallow copy of a container, with other items."""
    kind = type(node)
    if kind is tuple or kind is list:
        return kind(items)
    if isinstance(form, pytree.TreeSpec):
        return pytree.tree_unflatten(items, form)
    changed = copy.copy(node)
    if _is_record(node):
        for name, item in zip(form, items, strict=True):
            object.__setattr__(changed, name, item)  # past a frozen dataclass's own __setattr__
    elif isinstance(node, dict):
        changed.update(zip(form, items, strict=True))
    else:
        changed.clear()
        changed.extend(items) if isinstance(node, list) else changed.update(items)
    return changed


def _is_record(node: object) -> bool:
    return dataclasses.is_dataclass(node) and not isinstance(node, type)


_BASES = (OrderedDict, dict, list, set)
_METHODS = ("__new__", "__init__", "__setitem__", "__iter__", "__reduce__", "__reduce_ex__", "__copy__", "__slots__")


def _is_container(node: object) -> bool:
    """Whether a leaf of pytree is a set, or of a subclass of dict or list whose items are all that it holds.

    Others are opaque: attributes may hold tensors too, and a class's own constructor or `__setitem__` may do more.
    """
    base = next((base for base in _BASES if isinstance(node, base)), None)
    if base is None or getattr(node, "__dict__", None):
        return False
    return all(getattr(type(node), name, None) == getattr(base, name, None) for name in _METHODS)
