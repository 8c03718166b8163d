"""The tensors in a module's arguments and outputs: in nested containers, in dataclasses, hidden in other objects."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch.utils import _pytree as pytree

T = TypeVar("T")

_PLAIN = (torch.Tensor, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type(None))


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], tree: T) -> T:
    """Replace every tensor of a nest by the result of `fn`.

    Containers are the classes in torch's pytree registry (a library's output classes register themselves), sets, plain
    subclasses of lists and dicts, and dataclasses. Tuples, lists and dicts, which every forward takes and returns, do
    not go through pytree, which takes several times as long.

    Returns:
        The nest with the results. A dataclass, a set or a subclass with unchanged tensors is the same object, else a
        shallow copy.

    Effects: as `fn`.
    """
    return cast(T, _map(fn, tree))


def _map(fn: Callable[[torch.Tensor], torch.Tensor], node: Any) -> Any:
    if isinstance(node, torch.Tensor):
        return fn(node)
    kind = type(node)
    # Exact classes alone: a named tuple, or an output class of a library, is not rebuilt from a list.
    if kind is tuple or kind is list:
        return kind([fn(child) if isinstance(child, torch.Tensor) else _map(fn, child) for child in node])
    if kind is dict:
        return {key: _map(fn, child) for key, child in node.items()} if node else node
    if not pytree.tree_is_leaf(node):
        # A level at a time: pytree by itself would pass over dataclasses further in.
        return pytree.tree_map(lambda child: _map(fn, child), node, is_leaf=lambda child: child is not node)
    if _is_record(node):
        return _map_fields(fn, node)
    return _map_container(fn, node) if _is_container(node) else node


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


def _map_container(fn: Callable[[torch.Tensor], torch.Tensor], node: Any) -> Any:
    before = _children(node)
    after = [_map(fn, child) for child in before]
    if all(a is b for a, b in zip(before, after, strict=True)):
        return node
    changed = copy.copy(node)
    if isinstance(changed, dict):
        changed.update(zip(node, after, strict=True))
    else:
        changed.clear()
        changed.extend(after) if isinstance(changed, list) else changed.update(after)
    return changed


def _children(node: Any) -> list[Any]:
    return list(node.values() if isinstance(node, dict) else node)


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
    kind = type(node)
    if kind is tuple or kind is list:
        for child in node:
            if isinstance(child, torch.Tensor):
                leaves.append(child)
            else:
                _collect(child, leaves)
    elif kind is dict:
        for child in node.values():
            _collect(child, leaves)
    elif isinstance(node, _PLAIN):
        leaves.append(node)
    elif not pytree.tree_is_leaf(node):
        for child in pytree.tree_leaves(node, is_leaf=lambda child: child is not node):
            _collect(child, leaves)
    elif _is_record(node):
        _collect(_fields(node), leaves)
    elif _is_container(node):
        for child in _children(node):
            _collect(child, leaves)
    else:
        leaves.append(node)


def _is_record(leaf: object) -> bool:
    return dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)


def _fields(record: Any) -> dict[str, object]:
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def _map_fields(fn: Callable[[torch.Tensor], torch.Tensor], record: Any) -> Any:
    before = _fields(record)
    after = map_tensors(fn, before)
    if all(a is b for a, b in zip(_leaves(before), _leaves(after), strict=True)):
        return record
    changed = copy.copy(record)
    for name, value in after.items():
        object.__setattr__(changed, name, value)  # past a frozen dataclass's own __setattr__
    return changed
