"""The tensors in a module's arguments and outputs: in nested containers, in dataclasses, hidden in other objects."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch.utils import _pytree as pytree

T = TypeVar("T")

_UNREGISTERED = (dict, list, set)
"""Containers that pytree takes for leaves: sets, and subclasses without a registration."""

_PLAIN = (torch.Tensor, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type(None))


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], tree: T) -> T:
    """Replace every tensor of a nest by the result of `fn`.

    Containers are the classes in torch's pytree registry (a library's output classes register themselves), sets,
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
    if isinstance(node, _UNREGISTERED):
        return _map_unregistered(fn, node)
    return _map_fields(fn, node) if _is_record(node) else node


def _map_unregistered(fn: Callable[[torch.Tensor], torch.Tensor], node: Any) -> Any:
    before = _children(node)
    after = [_map(fn, child) for child in before]
    if all(a is b for a, b in zip(before, after, strict=True)):
        return node
    changed = copy.copy(node)  # with attributes, and with the factory of a defaultdict
    if isinstance(changed, dict):
        for key, child in zip(node, after, strict=True):
            changed[key] = child
    elif isinstance(changed, list):
        changed[:] = after
    else:
        changed.clear()
        changed.update(after)
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
    elif isinstance(node, _UNREGISTERED):
        for child in _children(node):
            _collect(child, leaves)
    elif _is_record(node):
        _collect(_fields(node), leaves)
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
