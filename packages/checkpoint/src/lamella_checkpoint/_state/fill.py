"""A state dict filled from a checkpoint that may lack some of the requested values.

Note [Missing values stay]
    Programs request more than a checkpoint has: `args` and `iteration` after a conversion by Megatron-Bridge, options
    that an older release did not write. torch's own partial load replaces such an object by None, at any nesting
    depth, and the caller takes None for loaded. Here names are compared whole, leaf by leaf: a missing value
    keeps the present object, and is reported.
"""

from collections.abc import Iterator, MutableMapping, MutableSequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from lamella_checkpoint._base.live_boxes import LocalBox, local_boxes
from lamella_checkpoint._state.shards import PiecesOfTensor
from lamella_files import Source, Wanted

Container = MutableMapping[Any, Any] | MutableSequence[Any]


@dataclass(frozen=True, kw_only=True)
class Filled:
    """The outcome of a request, by dotted name: loaded values, and unchanged values."""

    loaded: tuple[str, ...]
    kept: tuple[str, ...]


class _StateLeaf(NamedTuple):
    name: str
    container: Container
    key: Any


def fill(request: MutableMapping[str, Any], source: Source) -> Filled:
    """Fill a nested state dict from a checkpoint, in place: Note [Missing values stay].

    Args:
        request: Dicts and lists of tensors and other values. A tensor is filled in place, a DTensor or
            `PiecesOfTensor` with this rank's part, in its own dtype; any other value is replaced.
        source: Names are the request's keys, joined by dots.

    Raises:
        CheckpointDamaged: The conditions of `Source.read`.
        ValueError: A tensor has another shape in the checkpoint, or is a tensor on one side only. Nothing has been
            changed.

    Effects: no collective.
    """
    objects = frozenset(source.objects)
    leaves = list(_leaves(request, "", objects))
    requests: list[Wanted] = []
    values: list[tuple[_StateLeaf, object]] = []
    unread: list[str] = []
    for leaf in leaves:
        target = leaf.container[leaf.key]
        if leaf.name in source.tensors:
            requests += _requests(leaf.name, target, source)
        elif leaf.name not in objects:
            unread.append(leaf.name)
        elif isinstance(target, torch.Tensor):
            raise ValueError(f"Expected a tensor for {leaf.name!r}, got another value in the checkpoint.")
        else:
            values.append((leaf, source.read_object(leaf.name)))
    with torch.no_grad():
        source.read(requests)
    for leaf, value in values:
        leaf.container[leaf.key] = value
    absent = set(unread)
    return Filled(loaded=tuple(leaf.name for leaf in leaves if leaf.name not in absent), kept=tuple(unread))


def _leaves(container: Container, prefix: str, objects: AbstractSet[str]) -> Iterator[_StateLeaf]:
    """The values to fill; a dict or list stored as one object is one value."""
    keys = list(container) if isinstance(container, MutableMapping) else range(len(container))
    for key in keys:
        name = f"{prefix}.{key}" if prefix else str(key)
        value = container[key]
        if isinstance(value, MutableMapping | MutableSequence) and value and name not in objects:
            yield from _leaves(value, name, objects)
        else:
            yield _StateLeaf(name, container, key)


def _requests(name: str, target: object, source: Source) -> list[Wanted]:
    info = source.tensors[name]
    if not isinstance(target, torch.Tensor):
        raise ValueError(
            f"Expected a value of type {type(target).__name__} for {name!r}, got a tensor in the checkpoint."
        )
    if tuple(target.shape) != tuple(info.shape):
        raise ValueError(
            f"Expected {name!r} of shape {tuple(target.shape)!r}, got {tuple(info.shape)!r} in the checkpoint."
        )
    return [Wanted(name, box.chunk, box.local) for box in _boxes(target) if box.chunk.numel]


def _boxes(target: torch.Tensor) -> list[LocalBox]:
    if isinstance(target, PiecesOfTensor):
        return [LocalBox(piece.chunk, piece.values) for piece in target.pieces]
    return local_boxes(target)
