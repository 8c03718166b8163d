"""The tensors in a module's arguments and outputs: in nested containers, in dataclasses, hidden in other objects."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from itertools import chain, repeat
from operator import is_
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch.utils import _pytree as pytree

T = TypeVar("T")

_PLAIN = (torch.Tensor, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type(None))


class Copied(NamedTuple):
    """A container that `map_tensors` has copied, with the items of both at that moment, in the same order."""

    container: Any
    items: list[Any]
    copy: Any
    items_of_copy: list[Any]
    form: Any


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], tree: T, copied: list[Copied] | None = None) -> T:
    """Replace every tensor of a nest by the result of `fn`.

    Containers are the classes in torch's pytree registry (a library's output classes register themselves), sets, plain
    subclasses of lists and dicts, and dataclasses.

    Args:
        fn: Called with each tensor.
        tree: The nest.
        copied: Extended by the containers that are copied, but for tuples; for `write_back`.

    Returns:
        The nest with the results. A container with unchanged tensors is the same object, else a shallow copy.

    Raises:
        RuntimeError: A container holds itself.

    Effects: as `fn`.
    """
    try:
        return cast(T, _map(fn, tree, copied))
    except RecursionError as error:
        _refuse_cycle(tree)
        raise error


def _map(fn: Callable[[torch.Tensor], torch.Tensor], node: Any, copied: list[Copied] | None) -> Any:
    if isinstance(node, torch.Tensor):
        return fn(node)
    opened = _open(node)
    if opened is None:
        return node
    before, form = opened
    after = [fn(child) if isinstance(child, torch.Tensor) else _map(fn, child, copied) for child in before]
    if all(map(is_, before, after)):
        return node
    changed = _copy(node, after, form)
    if copied is not None and not isinstance(node, tuple):
        copied.append(Copied(node, list(before), changed, after, form))
    return changed


def write_back(copied: Sequence[Copied]) -> list[Any]:
    """Give containers the items that were put into their copies since, and take those that were removed.

    Other items stay the containers' own, with their own tensors.

    Returns:
        The items that were put into copies.

    Effects: none on a container whose copy holds the same items as before.
    """
    written: dict[int, Any] = {}
    for container, items, changed, items_of_copy, form in reversed(copied):  # copies of copies first
        items_after, form_after = cast(tuple[Sequence[Any], Any], _open(changed))
        if form_after == form and len(items_after) == len(items_of_copy) and all(map(is_, items_after, items_of_copy)):
            continue
        originals = dict(zip(map(id, items_of_copy), items, strict=True))
        written.update((id(item), item) for item in items_after if id(item) not in originals)
        _fill(container, [originals.get(id(item), item) for item in items_after], form_after)
    return list(written.values())


def tensors_in(tree: object) -> list[torch.Tensor]:
    """The tensors of a nest, in the order in which `map_tensors` visits them.

    Raises:
        RuntimeError: A container holds itself.
    """
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [leaf for leaf in _leaves(tree) if isinstance(leaf, torch.Tensor)]


def hides_tensors(tree: object) -> bool:
    """Whether a nest holds an object that may hide tensors from `tensors_in`."""
    return any(not isinstance(leaf, _PLAIN) for leaf in _leaves(tree))


def _leaves(tree: object) -> list[object]:
    leaves: list[object] = []
    try:
        _collect(tree, leaves)
    except RecursionError as error:
        _refuse_cycle(tree)
        raise error
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


def _refuse_cycle(node: Any, outer: tuple[Any, ...] = ()) -> None:
    if any(node is one for one in outer):
        raise RuntimeError(
            f"Expected arguments and outputs of a unit without cycles, got a {type(node).__qualname__} that holds "
            "itself. Leave that reference out, or hide it in an object that is neither a container nor a dataclass."
        )
    opened = _open(node)
    for child in opened[0] if opened else ():
        _refuse_cycle(child, (*outer, node))


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
        # One level, so that lists further in are copied, and written back, by themselves. Of other classes all levels:
        # they may make new lists each time that they are asked for their items.
        if not isinstance(node, (tuple, deque, *_BASES)):
            return pytree.tree_flatten(node)
        # Asked for the node first. A closure over the node would keep its tensors until Python collects cycles: torch's
        # function makes one.
        is_leaf = chain((False,), repeat(True))
        return pytree.tree_flatten(node, is_leaf=lambda _: next(is_leaf))
    if _is_record(node):
        names = [field.name for field in dataclasses.fields(node) if hasattr(node, field.name)]  # some may be unset
        return [getattr(node, name) for name in names], names
    if not _is_container(node):
        return None
    return (list(node.values()), list(node)) if isinstance(node, dict) else (list(node), None)


def _copy(node: Any, items: list[Any], form: Any) -> Any:
    """A shallow copy of a container, with other items."""
    kind = type(node)
    if kind is tuple or kind is list:
        return kind(items)
    if kind is dict:
        return dict(zip(form, items, strict=True))
    if isinstance(form, pytree.TreeSpec):
        return pytree.tree_unflatten(items, form)
    changed = copy.copy(node)
    _fill(changed, items, form)
    return changed


def _fill(node: Any, items: Sequence[Any], form: Any) -> None:
    """Replace the items of a container in place."""
    if isinstance(form, pytree.TreeSpec):
        refilled = pytree.tree_unflatten(items, form)
        getattr(node, "__dict__", {}).update(getattr(refilled, "__dict__", {}))
        items, form = (list(refilled.values()), list(refilled)) if isinstance(node, dict) else (items, None)
    elif _is_record(node):
        for name, item in zip(form, items, strict=True):
            object.__setattr__(node, name, item)  # past a frozen dataclass's own __setattr__
        return
    if isinstance(node, dict):
        node.clear()
        for key, item in zip(form, items, strict=True):
            node[key] = item
    elif isinstance(node, (list, deque, set)):
        node.clear()
        node.update(items) if isinstance(node, set) else node.extend(items)


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
