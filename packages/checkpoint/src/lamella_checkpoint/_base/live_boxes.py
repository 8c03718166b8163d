"""Boxes of live tensors on this rank, from the placements or from a tensor's own chunk list."""

from typing import NamedTuple, cast

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from lamella_files import box_of, places_in_memory, whole_box
from lamella_layout import Chunk, RaggedShard, mesh_region


class LocalBox(NamedTuple):
    """A box of a global tensor, and this rank's memory for the box."""

    chunk: Chunk
    local: torch.Tensor


def local_boxes(tensor: torch.Tensor) -> list[LocalBox]:
    """This rank's boxes of a tensor: none, one, or several for strided shards.

    Computed from the mesh and the placements. A tensor cut otherwise lists boxes as for DCP
    (`__create_chunk_list__` of the tensor's own class, or of the local tensor).

    Raises:
        ValueError: The local tensor's sizes contradict the placements.
    """
    if not isinstance(tensor, DTensor):
        return [LocalBox(whole_box(tensor.shape), tensor)]
    return _boxes_in(tensor, tensor._local_tensor)


def is_placed_by(param: torch.Tensor, slot: torch.Tensor, name: str) -> bool:
    """Whether a slot of a parameter's optimizer state holds this rank's elements in the order of the parameter's.

    The slot is then a plain tensor, or a DTensor on the data-parallel axes alone, beside a sharded parameter:
    Note [Coordinates come from the parameter]. Likewise a slot shaped like a parameter with a separate chunk list:
    `torch.zeros_like` does not copy the chunk list. Any other DTensor on the parameter's mesh has true placements, a
    plain tensor of the parameter's whole shape is the whole slot, and a tensor of one element is a number.

    Args:
        param: The parameter.
        slot: The optimizer state tensor of the parameter.
        name: The name of the slot, for messages.

    Raises:
        ValueError: The slot is of no known kind.
    """
    if not isinstance(param, DTensor) or slot.ndim == 0:
        return False
    local_param, local = param._local_tensor, slot._local_tensor if isinstance(slot, DTensor) else slot
    if slot.shape == param.shape:
        is_alike = isinstance(slot, DTensor) and local.shape == local_param.shape
        return is_alike and _tells_itself(param) and not _tells_itself(cast(DTensor, slot))
    if isinstance(slot, DTensor) and slot.device_mesh == param.device_mesh:
        return False
    if local.numel() == local_param.numel():
        return True
    if slot.numel() == 1:
        return False
    raise ValueError(
        f"Expected {name!r} to have the {local_param.numel()} elements that this rank holds of its parameter (of shape "
        f"{tuple(param.shape)}), or all of the parameter's, got {local.numel()} of shape {tuple(local.shape)}. State "
        f"of another shape has to be a DTensor on the parameter's mesh, as `param.new_zeros` makes it."
    )


def boxes_beside(param: DTensor, slot: torch.Tensor) -> list[LocalBox]:
    """This rank's boxes of a slot in the parameter's coordinates (`is_placed_by`), as `local_boxes`.

    The boxes are views.
    """
    local = slot._local_tensor if isinstance(slot, DTensor) else slot
    return _boxes_in(param, local.detach().view(param._local_tensor.shape))


def cut_order(tensor: DTensor) -> tuple[int, ...] | None:
    """The order of cuts by a tensor's mesh axes, if the mesh defines an order; None for left to right.

    Megatron-FSDP marks meshes: tensor parallelism cuts first although the axis is the last, and placements do not
    record the order. Without the mark, a rank's part would be placed among another rank's rows. Strided shards record
    the order themselves.
    """
    shard_order = getattr(tensor.device_mesh, "_shard_order", None)
    if shard_order is None or any(isinstance(placement, _StridedShard) for placement in tensor.placements):
        return None
    return tuple(shard_order)


def _boxes_in(tensor: DTensor, local: torch.Tensor) -> list[LocalBox]:
    """This rank's boxes of a DTensor, in memory with the layout of the local tensor."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return []
    boxes = _boxes_of_local_tensor(tensor)
    if boxes is not None:
        return _checked(tensor, boxes, local)
    region = mesh_region(
        tuple(tensor.shape), tuple(mesh.shape), tensor.placements, tuple(coordinate), order=cut_order(tensor)
    )
    _check_sizes(tensor, region.shape)
    along = zip(region.chunks, places_in_memory(region), strict=True)
    return [LocalBox(chunk, box_of(local, place)) for chunk, place in along]


def is_ragged(tensor: DTensor) -> bool:
    """Whether placements of lamella's own tell the rows; a ragged tensor need not list boxes."""
    return any(isinstance(placement, RaggedShard) for placement in tensor.placements)


def _tells_itself(tensor: DTensor) -> bool:
    """Whether a tensor overrides DTensor's chunk list, made from the placements."""
    if is_ragged(tensor):
        return False
    is_own_class = type(tensor).__create_chunk_list__ is not DTensor.__create_chunk_list__
    return is_own_class or hasattr(tensor._local_tensor, "__create_chunk_list__")


def _boxes_of_local_tensor(tensor: DTensor) -> list[Chunk] | None:
    if not _tells_itself(tensor):
        return None
    list_local_chunks = getattr(tensor._local_tensor, "__create_chunk_list__", None)
    listed = tensor.__create_chunk_list__() if list_local_chunks is None else list_local_chunks()  # type: ignore[no-untyped-call]
    return [Chunk(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in listed]


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
