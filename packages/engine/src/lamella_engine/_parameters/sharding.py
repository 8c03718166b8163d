"""A parameter's place on the mesh: axes for sharding and replication, and the placements of the DTensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from lamella_engine._common.errors import MisuseError
from lamella_engine._options.policies import DataParallelMeshDims
from lamella_layout import FlatLayout, Keep, mesh_region, ragged_rows, strided_placements

if TYPE_CHECKING:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec


class MeshInfo(Protocol):
    """FSDP2's description of data axes, the attributes of `FSDPMeshInfo` and `HSDPMeshInfo`."""

    @property
    def mesh(self) -> DeviceMesh: ...

    @property
    def shard_mesh_dim(self) -> int | None: ...

    @property
    def replicate_mesh_dim(self) -> int | None: ...


@runtime_checkable
class PlacementResult(Protocol):
    """FSDP2's `ShardPlacementResult`: a dim, and the mesh of a single parameter."""

    @property
    def placement(self) -> Shard | None: ...

    @property
    def mesh_info(self) -> MeshInfo: ...


# Parts of a shard group by their number of ranks: one communicator for all units, not one a unit. The process's: each
# call of `fully_shard` may bring a mesh object of its own over the same group. Weak keys: the table must not keep a
# destroyed group alive.
_neighbour_groups: WeakKeyDictionary[dist.ProcessGroup, dict[int, dist.ProcessGroup]] = WeakKeyDictionary()

PlacementFn = Callable[[nn.Parameter], "Shard | PlacementResult | None"]


@dataclass(frozen=True)
class DataAxes:
    """The mesh axes of data parallelism.

    Attributes:
        mesh: 1-D or 2-D, of the data axes alone.
        shard_axis: Axis of `mesh` for sharding; None if parameters are only replicated.
        replicate_axis: Axis of `mesh` for replication, or None.
        outer_axis: Axis of `mesh` for sharding main weights alone, each rank's shard once more, or None.
        full_mesh: The mesh of parameters that come as DTensors on data axes too (`dims`); None for all other
            parameters.
        names: The data axes in `full_mesh`: the shard axis's, and the replicate axis's.
    """

    mesh: DeviceMesh
    shard_axis: int | None
    replicate_axis: int | None = None
    outer_axis: int | None = None
    full_mesh: DeviceMesh | None = None
    names: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())

    @classmethod
    def of(cls, mesh: DeviceMesh, dims: DataParallelMeshDims | None = None) -> DataAxes:
        """The data axes of a user's mesh.

        Args:
            mesh: 1-D (sharded), or 2-D with names (replicated, sharded); any mesh with `dims`.
            dims: Names the data axes of `mesh`.

        Raises:
            ValueError: The mesh has another number of axes or no names, or `dims` names an unknown axis.

        Effects: flattens several shard or replicate axes into one, a collective on the mesh's ranks.
        """
        if dims is not None:
            return cls._named(mesh, dims)
        if mesh.ndim not in (1, 2):
            raise ValueError(
                "Expected `mesh` to have data axes only (mesh['replicate', 'shard']), or `dp_mesh_dims` to name them: "
                f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}."
            )
        if mesh.ndim == 1:
            return cls(mesh, 0)
        if mesh.mesh_dim_names is None:
            raise MisuseError(
                "Expected a 2-D mesh whose axes have names, got none. Please init the 2D mesh for HSDP with "
                "mesh_dim_names specified: init_device_mesh(..., mesh_dim_names=('replicate', 'shard'))."
            )
        return cls(mesh, 1, 0)

    @classmethod
    def _named(cls, mesh: DeviceMesh, dims: DataParallelMeshDims) -> DataAxes:
        shard, replicate = dims.shard_names, dims.replicate_names
        if mesh.mesh_dim_names is None:
            raise ValueError(
                "Expected `mesh` to have mesh_dim_names, got none: mesh must have mesh_dim_names when dp_mesh_dims is "
                "provided. Name its axes (`init_device_mesh(..., mesh_dim_names=...)`)."
            )
        for name in shard + replicate:
            if name not in mesh.mesh_dim_names:
                raise ValueError(
                    f"Expected the axes in `dp_mesh_dims` to be among those of `mesh`, got {name!r}. Mesh dim name "
                    f"{name!r} not found in mesh.mesh_dim_names {mesh.mesh_dim_names}."
                )
        parts = [_one_axis(mesh, names) for names in (replicate, shard) if names]
        # Replicate before shard, as in a 2-D mesh: the axes' indices below count on the order.
        data = parts[0] if len(parts) == 1 else DeviceMesh._concatenate(parts)
        shard_axis = data.ndim - 1 if shard else None
        return cls(data, shard_axis, 0 if replicate else None, None, mesh, (shard, replicate))

    @classmethod
    def from_info(cls, info: MeshInfo) -> DataAxes:
        """The axes of FSDP2's mesh infos."""
        return cls(info.mesh, info.shard_mesh_dim, info.replicate_mesh_dim)

    @property
    def num_shards(self) -> int:
        """Number of ranks that share a parameter."""
        return 1 if self.shard_axis is None else self.mesh.size(self.shard_axis)

    @property
    def num_replicas(self) -> int:
        """Number of ranks with the same shard."""
        return 1 if self.replicate_axis is None else self.mesh.size(self.replicate_axis)

    @property
    def num_outer_shards(self) -> int:
        """Number of ranks that share a shard's main weights."""
        return 1 if self.outer_axis is None else self.mesh.size(self.outer_axis)

    @cached_property
    def num_ranks(self) -> int:
        """Number of ranks of all axes together."""
        return self.num_shards * self.num_replicas * self.num_outer_shards

    @property
    def main_rank(self) -> int:
        """This process's rank among the ranks that share a parameter's main weights: shard by shard, then by part."""
        outer = 0 if self.outer_axis is None else self.mesh.get_local_rank(self.outer_axis)
        # The parts of one shard are consecutive: a gather over the outer axis fills the shard without copies.
        return self.shard_rank * self.num_outer_shards + outer

    @property
    def shard_rank(self) -> int:
        """This process's rank among the ranks that share a parameter."""
        return 0 if self.shard_axis is None else self.mesh.get_local_rank(self.shard_axis)

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        """The process group of the shard axis."""
        return None if self.shard_axis is None else self.mesh.get_group(self.shard_axis)

    @property
    def replicate_group(self) -> dist.ProcessGroup | None:
        """The process group of the replicate axis."""
        return None if self.replicate_axis is None else self.mesh.get_group(self.replicate_axis)

    def group_of(self, num_ranks: int) -> dist.ProcessGroup | None:
        """The process group of `num_ranks` neighbours on the shard axis, this rank among them.

        Returns:
            None if `num_ranks` is 1 or the whole axis.

        Raises:
            ValueError: `num_ranks` does not divide the axis.

        Effects: the first call for a `num_ranks` creates the process group, a collective on the neighbours.
        """
        if self.num_shards % num_ranks != 0:
            raise ValueError(
                f"Expected an int `reshard_after_forward` to be a factor of {self.num_shards}, the ranks that share a "
                f"parameter, got {num_ranks}. If passing reshard_after_forward as an int, it should be a factor of "
                f"{self.num_shards}, not {num_ranks}."
            )
        if num_ranks in (1, self.num_shards):
            return None
        assert self.shard_group is not None
        groups = _neighbour_groups.setdefault(self.shard_group, {})
        if num_ranks not in groups:
            ranks = dist.get_process_group_ranks(self.shard_group)
            first = self.shard_group.rank() // num_ranks * num_ranks
            # Local: ranks off this axis (tensor parallelism) do not know these neighbours, and never make this call.
            groups[num_ranks] = dist.new_group(ranks[first : first + num_ranks], use_local_synchronization=True)
        return groups[num_ranks]

    @property
    def axes_of_whole(self) -> tuple[int, ...]:
        """The data axes' indices in `whole`; empty without a whole mesh."""
        names = () if self.full_mesh is None else self.full_mesh.mesh_dim_names or ()
        return tuple(names.index(name) for name in (*self.names[1], *self.names[0]))

    @property
    def outer_group(self) -> dist.ProcessGroup | None:
        """The process group of the outer axis."""
        return None if self.outer_axis is None else self.mesh.get_group(self.outer_axis)

    def placements(self, dim: int) -> list[Placement]:
        """Placements of main weights sharded along `dim`, one for each axis of `mesh`."""
        return list(strided_placements(self.mesh.shape, self.plain_placements(dim), order=self.cutting_order))

    def plain_placements(self, dim: int) -> list[Placement]:
        """The placements, to be read in `cutting_order`."""
        cut = (self.shard_axis, self.outer_axis)
        return [Shard(dim) if axis in cut else Replicate() for axis in range(self.mesh.ndim)]

    @property
    def cutting_order(self) -> tuple[int, ...]:
        """The axes of `mesh` in the order in which they cut: the shard axis before the outer one, first in the mesh."""
        return tuple(sorted(range(self.mesh.ndim), key=lambda axis: axis == self.outer_axis))

    def flat_placements(self, layout: FlatLayout, index: int) -> tuple[Placement, ...]:
        """Placements of tensor `index` of a flat layout of main weights, one for each axis of `mesh`."""
        # Parts of one shard are consecutive: a step along the shard axis passes over all outer parts.
        strides = {self.shard_axis: self.num_outer_shards, self.outer_axis: 1}
        return tuple(
            layout.placement(index, stride=strides[axis]) if axis in strides else Replicate()
            for axis in range(self.mesh.ndim)
        )

    def dividing(self, shape: Sequence[int] | None, dim: int) -> DataAxes:
        """The axes of a parameter by shape: the outer axis replicates a parameter that it cannot shard.

        Args:
            shape: The shape of the parameter, or of each model-parallel rank's part; None where the parts differ.
            dim: Tensor dim of the sharding.

        A strided shard places rows correctly only if the rows divide. Along any dim but the first, the parts of a
        rank's shard are not contiguous in the shard, and a gather in two steps would need copies.
        """
        num_parts = self.num_shards * self.num_outer_shards
        if self.outer_axis is None or (dim == 0 and shape is not None and shape[0] % num_parts == 0):
            return self
        return replace(self, outer_axis=None, replicate_axis=self.outer_axis)


@dataclass(frozen=True)
class Sharding:
    """A parameter's place on the mesh.

    A parameter that comes as a DTensor (tensor or expert parallel) is sharded by data ranks within each model-parallel
    rank's part: the part is cut first, so along the same dim the sharded DTensor has a strided shard.

    Attributes:
        axes: The data axes.
        dim: Tensor dim of the sharding.
        mesh: The mesh of the sharded DTensor: the data axes, and the axes that the parameter came with.
        placements: The placements of the sharded DTensor, one an axis of `mesh`.
        part: The spec of a parameter that came as a DTensor: the unsharded form is a DTensor again. Else None.
        keep: The part of the parameter to keep on one rank, in the flat layout, which then decides about `placements`.
            None for the even layout.
    """

    axes: DataAxes
    dim: int
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    part: DTensorSpec | None = None
    keep: Keep | None = None

    def own_part(self, local: torch.Tensor) -> torch.Tensor:
        """This rank's view of a tensor of the parameter's shape; for a DTensor, of the local part's shape."""
        if self.keep is not None and (coordinate := self.mesh.get_coordinate()) is not None:
            rows = ragged_rows(self.placements, coordinate)
            return local if rows is None else local[slice(*rows)]
        # As `torch.chunk` cuts, without a view for each of the ranks; of few rows the last ranks own none.
        num_rows = local.shape[self.dim]
        most = -(-num_rows // (self.axes.num_shards * self.axes.num_outer_shards))
        start = min(num_rows, self.axes.main_rank * most)
        return local.narrow(self.dim, start, min(most, num_rows - start))

    def wrap(self, local: torch.Tensor) -> torch.Tensor:
        """The unsharded parameter over the local part: a DTensor if the parameter came as a DTensor."""
        if self.part is None:
            return local
        # Over `local` itself: the bytes of the DTensor must come and go with the unsharded buffer.
        return DTensor(local, self.part, requires_grad=False)  # type: ignore[no-untyped-call]

    def largest_part(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The largest shape of a local part, over all model-parallel ranks: equal on all, without communication.

        Args:
            shape: The shape of this rank's part.
        """
        if self.part is None:
            return shape
        mesh = self.part.mesh
        # At the first coordinate: torch's chunks only get smaller towards the last rank.
        return mesh_region(self.part.shape, mesh.shape, self.part.placements, (0,) * mesh.ndim).shape

    def unwrap(self, gradient: torch.Tensor) -> torch.Tensor:
        """The local part of an unsharded parameter's gradient.

        Effects: if the gradient's placements differ from the parameter's (a partial sum), the collectives of a
            redistribution on the model-parallel axes.
        """
        if self.part is None:
            return gradient
        assert isinstance(gradient, DTensor)
        placements = list(self.part.placements)
        for axis in self.axes.axes_of_whole:
            placements[axis] = gradient.placements[axis]  # left to the reduction, which sums over data axes
        if list(gradient.placements) != placements:
            # A collective that every model-parallel rank joins: placements of a gradient are equal on all of them.
            gradient = gradient.redistribute(placements=placements)
        return gradient.to_local()


def sharding_of(
    name: str, parameter: nn.Parameter, axes: DataAxes, placement_fn: PlacementFn | None, keep: Keep | None = None
) -> Sharding:
    """Choose a parameter's sharding.

    Args:
        name: The tensor's name in messages.
        parameter: Plain, or a DTensor on other axes of the same root mesh.
        axes: Unless `placement_fn` returns a mesh.
        placement_fn: FSDP2's `shard_placement_fn`.
        keep: The part of the parameter to keep on one rank; None for the even layout.

    Raises:
        ValueError: The function returned something else than a Shard, a placement result or None, or a dim out of
            range; on a whole mesh, the parameter is plain, or not replicated over all data axes.
        NotImplementedError: A dim other than the first does not divide over the ranks; a parameter in the flat layout
            is sharded along such a dim, or comes as a DTensor.
    """
    dim, axes = _resolve(name, parameter, axes, placement_fn)
    if keep is not None:
        _check_flat(name, parameter, dim)
        return Sharding(axes, dim, axes.mesh, (), keep=keep)
    _check_dim(name, local_of(parameter), dim, axes.num_shards)
    if axes.outer_axis is not None and axes.full_mesh is not None:
        raise NotImplementedError(
            f"Expected a mesh of data axes alone for {name!r}, as `placements` shard main weights over two axes, got "
            f"{axes.full_mesh} with `dp_mesh_dims`. Pass the 2-D mesh of the data axes, or choose (HSDP, ZERO3)."
        )
    axes = axes.dividing(_part_shape(parameter), dim)
    if axes.full_mesh is not None:
        _check_on_whole_mesh(name, parameter, axes)
    if not isinstance(parameter, DTensor):
        return Sharding(axes, dim, axes.mesh, tuple(axes.placements(dim)))
    mesh, placements = _beside_part(parameter, axes, dim)
    return Sharding(axes, dim, mesh, placements, parameter._spec)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor's local tensor; a plain tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def groups_that_share(tensor: DTensor, name: str = "a gradient") -> list[dist.ProcessGroup]:
    """The process groups of the axes that shard a DTensor.

    Raises:
        ValueError: The DTensor is `Partial`, an outstanding sum.
    """
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(
            f"Expected {name!r} to be sharded or replicated, got {tensor.placements}. Redistribute it first."
        )
    mesh = tensor.device_mesh
    cut = [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    return [mesh.get_group(axis) for axis in cut if mesh.size(axis) > 1]


def all_reduce_anywhere(
    tensor: torch.Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> None:
    """Reduce a small tensor in place over a group, also on a device that the group does not serve (CPU with NCCL).

    Effects: collective on the group; for an unserved device, a copy to a served device and back, and a host sync.
    """
    devices = group._device_types
    if any(device.type == tensor.device.type for device in devices):
        dist.all_reduce(tensor, op, group=group)
        return
    served = tensor.to(devices[0])
    dist.all_reduce(served, op, group=group)
    tensor.copy_(served)


def _one_axis(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    return mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))


def _resolve(
    name: str, parameter: nn.Parameter, axes: DataAxes, placement_fn: PlacementFn | None
) -> tuple[int, DataAxes]:
    result = None if placement_fn is None else placement_fn(parameter)
    if isinstance(result, PlacementResult):
        axes, result = DataAxes.from_info(result.mesh_info), result.placement
    if result is None:
        return 0, axes
    if not isinstance(result, Shard):
        raise ValueError(
            f"Expected `shard_placement_fn` to return a Shard, a ShardPlacementResult or None for {name!r}, got "
            f"{result!r}. Invalid shard_placement_fn result: {result}."
        )
    ndim = local_of(parameter).ndim
    if not -ndim <= result.dim < ndim:
        raise MisuseError(
            f"Expected `shard_placement_fn` to name one of the {ndim} dims of {name!r}, got dim {result.dim}. Shard "
            f"dim {result.dim} is invalid for {ndim}D tensor: {parameter.shape}."
        )
    return result.dim % ndim, axes


def _check_dim(name: str, local: torch.Tensor, dim: int, num_shards: int) -> None:
    if dim > 0 and local.shape[dim] % num_shards != 0:
        raise NotImplementedError(
            f"Expected dim {dim} of {name!r}, of shape {tuple(local.shape)}, to divide over {num_shards} ranks. FSDP "
            f"does not support uneven sharding on dim {dim}: {local.shape} (world size: {num_shards}). Shard it along "
            "dim 0, which need not divide."
        )


def _check_flat(name: str, parameter: nn.Parameter, dim: int) -> None:
    if dim != 0:
        raise NotImplementedError(
            f"Expected `shard_placement_fn` to leave {name!r} at dim 0, as `keep_together` puts it into the flat "
            f"layout, got dim {dim}. Return None for it from `keep_together`."
        )
    if isinstance(parameter, DTensor):
        raise NotImplementedError(
            f"Expected {name!r} to be a plain parameter, as `keep_together` puts it into the flat layout, got a "
            f"DTensor {parameter.placements}. Return None for it from `keep_together`."
        )


def _beside_part(parameter: DTensor, axes: DataAxes, dim: int) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """The sharded DTensor's mesh and placements: data axes cut within the model-parallel rank's part."""
    mesh, placements = parameter.device_mesh, list(parameter.placements)
    names = mesh.mesh_dim_names or ()
    if axes.full_mesh is not None and len(axes.names[0]) <= 1:  # the mesh stays unchanged
        data = [names.index(name) for name in axes.names[0]]
        for axis in data:
            placements[axis] = Shard(dim)
        # Data axes last: they cut within the part that the model-parallel axes leave to a rank.
        order = [axis for axis in range(mesh.ndim) if axis not in data] + data
        return mesh, strided_placements(mesh.shape, placements, order=order)
    model_axes = [axis for axis in range(mesh.ndim) if axis not in axes.axes_of_whole]
    model_meshes = [mesh[names[axis]] for axis in model_axes] if axes.full_mesh is not None else [mesh]
    # One mesh of all axes: `full_tensor`, norms and checkpoints must see data and model axes together.
    joined = DeviceMesh._concatenate([axes.mesh, *model_meshes])
    joined_placements = [*axes.plain_placements(dim), *(placements[axis] for axis in model_axes)]
    order = [*range(axes.mesh.ndim, joined.ndim), *axes.cutting_order]
    return joined, strided_placements(joined.shape, joined_placements, order=order)


def _part_shape(parameter: nn.Parameter) -> tuple[int, ...] | None:
    """The shape of each model-parallel rank's part of a parameter; None if the parts differ."""
    if not isinstance(parameter, DTensor):
        return tuple(parameter.shape)
    mesh = parameter.device_mesh
    ends = [(0,) * mesh.ndim, tuple(num - 1 for num in mesh.shape)]  # torch's chunks only get smaller
    first, last = (mesh_region(parameter.shape, mesh.shape, parameter.placements, end).shape for end in ends)
    return tuple(first) if first == last else None


def _check_on_whole_mesh(name: str, parameter: nn.Parameter, axes: DataAxes) -> None:
    mesh = axes.full_mesh
    assert mesh is not None
    mesh_names = mesh.mesh_dim_names or ()
    if not isinstance(parameter, DTensor):
        raise ValueError(
            f"Expected {name!r} to be on the whole mesh, got a plain tensor. When dp_mesh_dims is provided, all "
            "parameters must be DTensors on the full SPMD mesh (e.g. via distribute_module). Got plain tensor for "
            f"parameter {name!r}."
        )
    if parameter.device_mesh != mesh:
        raise ValueError(
            f"Expected {name!r} to lie on {mesh}, got {parameter.device_mesh}. Expected param's DTensor mesh to be the "
            "same mesh passed to fully_shard, but got different mesh objects."
        )
    for kind, names in zip(("shard", "replicate"), axes.names, strict=True):
        for axis, axis_name in ((mesh_names.index(data_axis), data_axis) for data_axis in names):
            if not (got := parameter.placements[axis]).is_replicate():
                raise ValueError(
                    f"Expected {name!r} to be replicated over the data axes before it is sharded. Expected Replicate() "
                    f"on DP {kind} dim {axis_name!r} (index {axis}) but got {got}. Leave that axis to fully_shard."
                )
