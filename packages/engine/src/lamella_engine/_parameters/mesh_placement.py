"""The placement of one parameter on a mesh other than the unit's, as returned by FSDP2's `shard_placement_fn`."""

from typing import NamedTuple

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard


class ParameterMesh(NamedTuple):
    """The data axes of a parameter, with the attributes of FSDP2's `FSDPMeshInfo` and `HSDPMeshInfo`.

    Attributes:
        mesh: The parameter's ranks.
        shard_mesh_dim: The axis of shards; None for a parameter replicated over all axes.
        replicate_mesh_dim: The axis of ranks with equal shards; None without such an axis.
    """

    mesh: DeviceMesh
    shard_mesh_dim: int | None
    replicate_mesh_dim: int | None


class ParameterPlacement(NamedTuple):
    """A dim and a mesh for one parameter, with the attributes of FSDP2's `ShardPlacementResult`."""

    placement: Shard
    mesh_info: ParameterMesh


def placement_on(mesh: DeviceMesh, *, dim: int = 0, is_replicated: bool = False) -> ParameterPlacement:
    """Place a parameter on `mesh`, for units on any mesh: the result of a `shard_placement_fn`.

    Args:
        mesh: One axis, of shards; or two axes, the second of shards and the first of ranks with equal
            shards (HSDP).
        dim: The parameter's dim to cut.
        is_replicated: Each rank of a mesh of one axis holds the whole parameter (DDP).

    Raises:
        ValueError: The mesh has more than two axes, or is replicated with two.

    Effects: none.
    """
    if mesh.ndim > (1 if is_replicated else 2):
        axes = "one axis for a replicated parameter" if is_replicated else "one axis or two"
        raise ValueError(f"Expected `mesh` with {axes}, got {mesh}. Pass a submesh: mesh['name'].")
    if is_replicated:
        return ParameterPlacement(Shard(dim), ParameterMesh(mesh, None, 0))
    return ParameterPlacement(Shard(dim), ParameterMesh(mesh, mesh.ndim - 1, 0 if mesh.ndim == 2 else None))
