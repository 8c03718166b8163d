"""Boxes of live tensors: which ones this rank holds, by placements or by the tensor's own word."""

from typing import NamedTuple, cast

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from lamella_checkpoint._base.boxes import box_of, places_in_memory, whole_box
from lamella_layout import Chunk, mesh_region


class LocalBox(NamedTuple):
    """A box of a global tensor, and the memory of this rank that holds it."""

    chunk: Chunk
    local: torch.Tensor


def local_boxes(tensor: torch.Tensor) -> list[LocalBox]:
    """What this rank holds of a tensor: nothing, one box, or several where shards are strided.

    Computed from the mesh and the placements; a tensor that cuts otherwise says so itself, as it does to DCP
    (`__create_chunk_list__` of a class of its own, or of the local tensor).

    Raises:
        ValueError: The local tensor does not have the sizes that its placements leave to this rank.
    """
    if not isinstance(tensor, DTensor):
        return [LocalBox(whole_box(tensor.shape), tensor)]
    return _boxes_in(tensor, tensor._local_tensor)


def is_placed_by(param: torch.Tensor, slot: torch.Tensor, name: str) -> bool:
    """Whether a slot of a parameter's optimizer state holds this rank's elements in the order of the parameter's.

    Such a slot is a plain tensor, or a DTensor that knows of the data-parallel ranks alone, beside a sharded parameter:
    Note [Coordinates come from the parameter]. So is one like a parameter that is cut otherwise than its placements
    say: `torch.zeros_like` does not take over what the parameter says itself. Any other DTensor on the parameter's mesh
    says where it lies, a plain tensor of the parameter's whole shape is all of it, and of one element it is a number.

    Args:
        param: The parameter.
        slot: Its slot.
        name: Of the slot, for messages.

    Raises:
        ValueError: It is none of these.


    """
    if not isinstance(param, DTensor) or slot.ndim == 0:
        return False
    held, local = param._local_tensor, slot._local_tensor if isinstance(slot, DTensor) else slot
    if slot.shape == param.shape:
        is_alike = isinstance(slot, DTensor) and local.shape == held.shape
        return is_alike and _tells_itself(param) and not _tells_itself(cast(DTensor, slot))
    if isinstance(slot, DTensor) and slot.device_mesh == param.device_mesh:
        return False
    if local.numel() == held.numel():
        return True
    if slot.numel() == 1:
        return False
    raise ValueError(
        f"Expected {name!r} to have the {held.numel()} elements that this rank holds of its parameter (of shape "
        f"{tuple(param.shape)}), or all of the parameter's, got {local.numel()} of shape {tuple(local.shape)}. State "
        f"of another shape has to be a DTensor on the parameter's mesh, as `param.new_zeros` makes it."
    )


def boxes_beside(param: DTensor, slot: torch.Tensor) -> list[LocalBox]:
    """What this rank holds of a slot that its parameter places (`is_placed_by`), as `local_boxes`.

    The boxes are views.
    """
    local = slot._local_tensor if isinstance(slot, DTensor) else slot
    return _boxes_in(param, local.detach().view(param._local_tensor.shape))


def cut_order(tensor: DTensor) -> tuple[int, ...] | None:
    """The axes of a tensor's mesh in the order in which they cut it, where the mesh says so; None for left to right.

    Megatron-FSDP marks its meshes: tensor parallelism cuts first there, though its axis is the last, and placements do
    not say it. Taken at their word, they would place a rank's part among another's rows. A strided shard does say it.


    """
    told = getattr(tensor.device_mesh, "_shard_order", None)
    if told is None or any(isinstance(placement, _StridedShard) for placement in tensor.placements):
        return None
    return tuple(told)


def _boxes_in(tensor: DTensor, local: torch.Tensor) -> list[LocalBox]:
    """The boxes of a DTensor that this rank holds, in memory that lies as its local tensor does."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return []
    told = _told_by_itself(tensor)
    if told is not None:
        return _checked(tensor, told, local)
    region = mesh_region(
        tuple(tensor.shape), tuple(mesh.shape), tensor.placements, tuple(coordinate), order=cut_order(tensor)
    )
    _check_sizes(tensor, region.shape)
    along = zip(region.chunks, places_in_memory(region), strict=True)
    return [LocalBox(chunk, box_of(local, place)) for chunk, place in along]


def _tells_itself(tensor: DTensor) -> bool:
    """Whether a tensor answers torch DCP otherwise than DTensor does, from its placements."""
    is_own_class = type(tensor).__create_chunk_list__ is not DTensor.__create_chunk_list__
    return is_own_class or hasattr(tensor._local_tensor, "__create_chunk_list__")


def _told_by_itself(tensor: DTensor) -> list[Chunk] | None:
    if not _tells_itself(tensor):
        return None
    of_local = getattr(tensor._local_tensor, "__create_chunk_list__", None)
    listed = tensor.__create_chunk_list__() if of_local is None else of_local()  # type: ignore[no-untyped-call]
    return [Chunk(tuple(each.offsets), tuple(each.sizes)) for each in listed]


def _checked(tensor: DTensor, chunks: list[Chunk], local: torch.Tensor) -> list[LocalBox]:
    chunks = [chunk for chunk in chunks if chunk.numel]
    if len(chunks) > 1:
        raise NotImplementedError(f"Expected a tensor to say that it holds one box, got {chunks}.")
    _check_sizes(tensor, chunks[0].sizes if chunks else (0,) * local.ndim)
    return [LocalBox(chunk, local) for chunk in chunks]


def _check_sizes(tensor: DTensor, expected: tuple[int, ...]) -> None:
    local = tuple(tensor._local_tensor.shape)
    if local != expected and not (0 in local and 0 in expected):
        raise ValueError(
            f"Expected a local tensor of shape {expected} of a DTensor of shape {tuple(tensor.shape)} placed "
            f"{tensor.placements}, got {local}. A tensor that is cut elsewhere has to bring `__create_chunk_list__`."
        )
