"""How a parameter lies: the mesh axes it is sharded and replicated over, and what its DTensor says."""

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

from lamella_engine._errors import MisuseError
from lamella_engine._policies import DataParallelMeshDims
from lamella_layout import FlatLayout, Keep, mesh_region, ragged_rows, strided_placements

if TYPE_CHECKING:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec


class MeshInfo(Protocol):
    """FSDP2's description of data axes: `FSDPMeshInfo` and `HSDPMeshInfo` have these attributes."""

    mesh: DeviceMesh
    shard_mesh_dim: int | None
    replicate_mesh_dim: int | None


@runtime_checkable
class PlacementResult(Protocol):
    """FSDP2's `ShardPlacementResult`: a dim, and the mesh of this one parameter."""

    placement: Shard | None
    mesh_info: MeshInfo


# Of a shard group, its parts by their number of ranks: one communicator for all units, not one a unit.
_neighbour_groups: WeakKeyDictionary[dist.ProcessGroup, dict[int, dist.ProcessGroup]] = WeakKeyDictionary()

PlacementFn = Callable[[nn.Parameter], "Shard | PlacementResult | None"]


@dataclass(frozen=True)
class DataAxes:
    """The mesh axes along which ranks hold different data.

    Attributes:
        mesh: 1-D or 2-D, of these axes alone.
        shard_axis: Axis of `mesh` that parameters are sharded over; None if they are replicated only.
        replicate_axis: Axis of `mesh` that they are replicated over, or None.
        outer_axis: Axis of `mesh` that main weights alone are sharded over, each rank's shard once more, or None.
        whole: The mesh that parameters come as DTensors on, data axes included; None where they do not.
        names: The data axes in `whole`: those of the shard axis, and those of the replicate axis.
    """

    mesh: DeviceMesh
    shard_axis: int | None
    replicate_axis: int | None = None
    outer_axis: int | None = None
    whole: DeviceMesh | None = None
    names: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())

    @classmethod
    def of(cls, mesh: DeviceMesh, dims: DataParallelMeshDims | None = None) -> DataAxes:
        """The axes of the mesh that a user gives.

        Args:
            mesh: 1-D (sharded), 2-D with names (replicated, sharded); any where `dims` names its data axes.
            dims: Which axes of `mesh` are data axes.

        Raises:
            ValueError: The mesh has another number of axes or no names, or `dims` names one that it has not.

        Effects: several shard or replicate axes are flattened into one, which is a collective on the mesh's ranks.
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
        data = parts[0] if len(parts) == 1 else DeviceMesh._concatenate(parts)
        shard_axis = data.ndim - 1 if shard else None
        return cls(data, shard_axis, 0 if replicate else None, None, mesh, (shard, replicate))

    @classmethod
    def from_info(cls, info: MeshInfo) -> DataAxes:
        """The axes that FSDP2's mesh infos describe."""
        return cls(info.mesh, info.shard_mesh_dim, info.replicate_mesh_dim)

    @property
    def num_shards(self) -> int:
        """Ranks that share a parameter."""
        return 1 if self.shard_axis is None else self.mesh.size(self.shard_axis)

    @property
    def num_replicas(self) -> int:
        """Ranks that hold the same shard."""
        return 1 if self.replicate_axis is None else self.mesh.size(self.replicate_axis)

    @property
    def num_outer_shards(self) -> int:
        """Ranks that share the main weights of one shard."""
        return 1 if self.outer_axis is None else self.mesh.size(self.outer_axis)

    @cached_property
    def num_ranks(self) -> int:
        """Ranks of all axes together."""
        return self.num_shards * self.num_replicas * self.num_outer_shards

    @property
    def main_rank(self) -> int:
        """This process's place among those that share a parameter's main weights: shards first, then their parts."""
        outer = 0 if self.outer_axis is None else self.mesh.get_local_rank(self.outer_axis)
        return self.shard_rank * self.num_outer_shards + outer

    @property
    def shard_rank(self) -> int:
        """This process's place among those that share a parameter."""
        return 0 if self.shard_axis is None else self.mesh.get_local_rank(self.shard_axis)

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        """The process group that shares a parameter."""
        return None if self.shard_axis is None else self.mesh.get_group(self.shard_axis)

    @property
    def replicate_group(self) -> dist.ProcessGroup | None:
        """The process group that holds the same shard."""
        return None if self.replicate_axis is None else self.mesh.get_group(self.replicate_axis)

    def group_of(self, num_ranks: int) -> dist.ProcessGroup | None:
        """The process group of the `num_ranks` neighbours on the shard axis that this rank is one of.

        Returns:
            None where they are this rank alone, or the whole axis.

        Raises:
            ValueError: They do not divide the axis.

        Effects: the first time it is asked for, creates a process group, a collective on the neighbours; nothing where
            they are the whole axis or one rank.
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
        made = _neighbour_groups.setdefault(self.shard_group, {})
        if num_ranks not in made:
            ranks = dist.get_process_group_ranks(self.shard_group)
            first = self.shard_group.rank() // num_ranks * num_ranks
            # Others know only their own part of this axis (tensor parallelism), and cannot take part in its groups.
            made[num_ranks] = dist.new_group(ranks[first : first + num_ranks], use_local_synchronization=True)
        return made[num_ranks]

    @property
    def axes_of_whole(self) -> tuple[int, ...]:
        """The data axes' places in `whole`; none where there is no whole mesh."""
        names = () if self.whole is None else self.whole.mesh_dim_names or ()
        return tuple(names.index(name) for name in (*self.names[1], *self.names[0]))

    @property
    def outer_group(self) -> dist.ProcessGroup | None:
        """The process group that shares the main weights of one shard."""
        return None if self.outer_axis is None else self.mesh.get_group(self.outer_axis)

    def placements(self, dim: int) -> list[Placement]:
        """One placement for each axis of `mesh`, of main weights that are sharded along `dim`."""
        cut = (self.shard_axis, self.outer_axis)
        flat: list[Placement] = [Shard(dim) if axis in cut else Replicate() for axis in range(self.mesh.ndim)]
        if self.outer_axis is None or self.shard_axis is None:
            return flat
        return list(strided_placements(self.mesh.shape, flat, order=(self.shard_axis, self.outer_axis)))

    def flat_placements(self, layout: FlatLayout, index: int) -> tuple[Placement, ...]:
        """One placement for each axis of `mesh`, of main weights that lie as tensor `index` of a flat layout."""
        strides = {self.shard_axis: self.num_outer_shards, self.outer_axis: 1}
        return tuple(
            layout.placement(index, stride=strides[axis]) if axis in strides else Replicate()
            for axis in range(self.mesh.ndim)
        )

    def dividing(self, shape: Sequence[int], dim: int) -> DataAxes:
        """The axes of a parameter of this shape: one that the outer axis cannot cut too lies on it whole.

        A strided shard says only of rows that divide where each of them is. Along another dim than the first the parts
        of a rank's shard do not lie one after another in it, so it could not be gathered in two steps without copies.
        """
        if self.outer_axis is None or (dim == 0 and shape[0] % (self.num_shards * self.num_outer_shards) == 0):
            return self
        return replace(self, outer_axis=None, replicate_axis=self.outer_axis)


@dataclass(frozen=True)
class Sharding:
    """How one parameter lies.

    A parameter that comes as a DTensor (tensor or expert parallel) is sharded by data ranks within each model-parallel
    rank's part: the part is cut first, so along the same dim its DTensor has a strided shard.

    Attributes:
        axes: The data axes.
        dim: Tensor dim that it is sharded along.
        mesh: Of the sharded DTensor: the data axes, and those that the parameter came with.
        placements: Of the sharded DTensor, one an axis of `mesh`.
        part: What the parameter came as, if that was a DTensor: the unsharded form is one again.
        keep: What of it stays on one rank, in the flat layout, which then decides about `placements`. None: it lies in
            the even layout.
    """

    axes: DataAxes
    dim: int
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    part: DTensorSpec | None = None
    keep: Keep | None = None

    def own_part(self, local: torch.Tensor) -> torch.Tensor:
        """This rank's view of a tensor of the parameter's shape, or of its local part's for a DTensor."""
        if self.keep is not None and (coordinate := self.mesh.get_coordinate()) is not None:
            rows = ragged_rows(self.placements, coordinate)
            return local if rows is None else local[slice(*rows)]
        parts = torch.chunk(local, self.axes.num_shards * self.axes.num_outer_shards, self.dim)
        return parts[self.axes.main_rank] if self.axes.main_rank < len(parts) else local.narrow(self.dim, 0, 0)

    def wrap(self, local: torch.Tensor) -> torch.Tensor:
        """The unsharded parameter over its local part: a DTensor if it came as one."""
        if self.part is None:
            return local
        return DTensor(local, self.part, requires_grad=False)  # type: ignore[no-untyped-call]

    def largest_part(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A local part's shape where that is largest, of all model-parallel ranks: what each of them can tell.

        Args:
            shape: Of the part on this rank.
        """
        if self.part is None:
            return shape
        mesh = self.part.mesh
        return mesh_region(self.part.shape, mesh.shape, self.part.placements, (0,) * mesh.ndim).shape

    def unwrap(self, gradient: torch.Tensor) -> torch.Tensor:
        """The local part of an unsharded parameter's gradient.

        Effects: where autograd left it placed otherwise than the parameter (a partial sum), the collectives of a
            redistribution on the model-parallel axes.
        """
        if self.part is None:
            return gradient
        assert isinstance(gradient, DTensor)
        wanted = list(self.part.placements)
        for axis in self.axes.axes_of_whole:
            wanted[axis] = gradient.placements[axis]  # their sum is the reduction's
        if list(gradient.placements) != wanted:
            gradient = gradient.redistribute(placements=wanted)
        return gradient.to_local()


def sharding_of(
    name: str, parameter: nn.Parameter, axes: DataAxes, placement_fn: PlacementFn | None, keep: Keep | None = None
) -> Sharding:
    """Decide how a parameter lies.

    Args:
        name: For messages.
        parameter: Plain, or a DTensor on other axes of the same root mesh.
        axes: Where `placement_fn` does not say otherwise.
        placement_fn: FSDP2's `shard_placement_fn`.
        keep: What of it stays on one rank; None for the even layout.

    Raises:
        ValueError: The function returned something else than a Shard, a placement result or None, or a dim that the
            parameter has not; the parameter is replicated on no data axis of a whole mesh.
        NotImplementedError: A dim other than the first does not divide over the ranks; a parameter that is to lie in
            the flat layout is sharded along one, or comes as a DTensor.
    """
    dim, axes = _resolve(name, parameter, axes, placement_fn)
    if keep is not None:
        _check_flat(name, parameter, dim)
        return Sharding(axes, dim, axes.mesh, (), keep=keep)
    _check_dim(name, local_of(parameter), dim, axes.num_shards)
    if axes.outer_axis is not None and isinstance(parameter, DTensor):
        raise NotImplementedError(
            f"Expected {name!r} to be a plain parameter, as `placements` shard its main weights over two axes, got a "
            f"DTensor {parameter.placements}. Choose (HSDP, ZERO3)."
        )
    axes = axes.dividing(parameter.shape, dim)
    if axes.whole is not None:
        _check_on_whole_mesh(name, parameter, axes)
    if not isinstance(parameter, DTensor):
        return Sharding(axes, dim, axes.mesh, tuple(axes.placements(dim)))
    mesh, placements = _beside_part(parameter, axes, dim)
    return Sharding(axes, dim, mesh, placements, parameter._spec)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor's local tensor; any other tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def groups_that_share(tensor: DTensor, name: str = "a gradient") -> list[dist.ProcessGroup]:
    """The process groups over which a DTensor is cut, one an axis.

    Raises:
        ValueError: It is `Partial`: a sum that was not made yet.
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
    """Reduce a small tensor in place over a group, which may be unable to on its device: NCCL on the CPU.

    Effects: collective on the group; if it cannot take the tensor, a copy to a device and back, and a host sync.
    """
    devices = group._device_types
    if any(device.type == tensor.device.type for device in devices):
        dist.all_reduce(tensor, op, group=group)
        return
    there = tensor.to(devices[0])
    dist.all_reduce(there, op, group=group)
    tensor.copy_(there)


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
    """The sharded DTensor's mesh and placements: the data axes cut within what the other axes left."""
    mesh, placements = parameter.device_mesh, list(parameter.placements)
    names = mesh.mesh_dim_names or ()
    if axes.whole is not None and len(axes.names[0]) <= 1:  # the mesh stays what it is
        data = [names.index(name) for name in axes.names[0]]
        for axis in data:
            placements[axis] = Shard(dim)
        order = [axis for axis in range(mesh.ndim) if axis not in data] + data
        return mesh, strided_placements(mesh.shape, placements, order=order)
    others = [axis for axis in range(mesh.ndim) if axis not in axes.axes_of_whole]
    rest = [mesh[names[axis]] for axis in others] if axes.whole is not None else [mesh]
    joined = DeviceMesh._concatenate([axes.mesh, *rest])
    both = [*axes.placements(dim), *(placements[axis] for axis in others)]
    order = [*range(axes.mesh.ndim, joined.ndim), *range(axes.mesh.ndim)]
    return joined, strided_placements(joined.shape, both, order=order)


def _check_on_whole_mesh(name: str, parameter: nn.Parameter, axes: DataAxes) -> None:
    mesh = axes.whole
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
        for axis, axis_name in ((mesh_names.index(each), each) for each in names):
            if not (got := parameter.placements[axis]).is_replicate():
                raise ValueError(
                    f"Expected {name!r} to be replicated over the data axes before it is sharded. Expected Replicate() "
                    f"on DP {kind} dim {axis_name!r} (index {axis}) but got {got}. Leave that axis to fully_shard."
                )
