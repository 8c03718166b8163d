"""DTensors in files of `torch.save`: all of a tensor, or only one rank's part.

A state dict of sharded parameters, saved by each rank for itself, is a file a rank. The files look alike, and each
holds a rank's rows under the names and the global shapes of the whole model.
"""

from collections.abc import Iterator, Mapping
from typing import Final

import torch

from lamella_files import FormatUnknown, Inert, Record, StoredTensor, stored_tensor

_OF_RANKS: Final = ("DTensorSpec", "ShardedTensor")
_PARTIAL: Final = ("Partial", "_Partial")
_WAY_OUT: Final = (
    "Load each rank's file with torch.load, on as many ranks, and save by lamella_checkpoint.save; or save "
    "full_tensor() of each DTensor."
)


class RankPart(FormatUnknown):
    """A file with one rank's parts of tensors, unfit for readers of whole tensors."""

    def __init__(self, file: str, names: list[str], way_out: str = _WAY_OUT) -> None:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        super().__init__(
            file,
            f"one rank's part of {names[0]!r}{more}",
            expected="whole tensors",
            way_out=way_out,
        )


def held_whole(value: object, files: Mapping[str, Record]) -> StoredTensor | None:
    """The stored elements of a DTensor whole on one rank (a mesh of a single rank, replicas).

    Returns:
        None for a rank's part, and for any other value.

    Raises:
        ValueError: The conditions of `stored_tensor`.
    """
    match value:
        case Inert(kind="torch._utils._rebuild_parameter", args=(data, _, _)):
            return held_whole(data, files)
        case Inert(kind="torch._tensor._rebuild_from_type_v2", args=(_, _, (_, _, tuple(shape), *_), state)):
            attributes = state[-1] if isinstance(state, tuple) and state else state
        case _:
            return None
    if not isinstance(attributes, dict) or {"_local_tensor", "_spec"} - attributes.keys():
        return None
    local = stored_tensor(attributes["_local_tensor"], files)
    is_partial = any(kind.endswith(_PARTIAL) for kind in _kinds(attributes["_spec"]))
    return local if local is not None and local.shape == tuple(shape) and not is_partial else None


def is_rank_part(value: object) -> bool:
    """Whether a value is, or contains, a tensor distributed over ranks."""
    if isinstance(value, torch.Tensor):
        return hasattr(value, "_local_tensor")
    return any(kind.endswith(_OF_RANKS) for kind in _kinds(value))


def _kinds(value: object) -> Iterator[str]:
    """The types of all stand-ins in a value, at any depth. A read pickle is no larger than the limit."""
    unseen = [value]
    while unseen:
        node = unseen.pop()
        if isinstance(node, Inert):
            yield node.kind
            unseen += [node.args, node.state, node.items]
        elif isinstance(node, dict):
            unseen += [*node, *node.values()]
        elif isinstance(node, list | tuple | set | frozenset):
            unseen += node
        elif isinstance(node, type) and issubclass(node, Inert):
            yield node.kind
