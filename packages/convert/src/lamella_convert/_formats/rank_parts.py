"""Files of `torch.save` with one rank's part of a model: DTensors, or Megatron's legacy format `torch`.

A state dict of sharded parameters, saved by each rank for itself, is a file a rank. The files look alike, and each
holds a rank's rows under the names of the whole model. DTensors have global shapes beside their rows. Megatron's plain
tensors have not: the number of ranks is in `args`.
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
MEGATRON_WAY_OUT: Final = "Load the checkpoint in Megatron, and save it with --ckpt-format torch_dist or fsdp_dtensor."
_MEGATRON_SIZES: Final = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")


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


def megatron_sizes(root: Mapping[object, object]) -> str:
    """The parallel sizes above 1 that cut the model in a file of Megatron's format `torch`, as text.

    Returns:
        An empty text for a whole model, and for a file of another program.
    """
    if not {"args", "checkpoint_version"} <= root.keys():
        return ""
    args = root["args"]
    values = args.fields if isinstance(args, Inert) else getattr(args, "__dict__", args)
    sizes = {name: values.get(name) for name in _MEGATRON_SIZES} if isinstance(values, Mapping) else {}
    return ", ".join(f"{name}={size}" for name, size in sizes.items() if isinstance(size, int) and size > 1)


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
