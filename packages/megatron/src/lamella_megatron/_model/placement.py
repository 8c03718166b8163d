"""The process groups over which a megatron-core model's parameters are sharded, by the marks on the parameters.

    mark on the parameter                      held by                                  sharded over
    none                                       all ranks of a tensor-parallel rank      `dp_cp`
    tensor_model_parallel                      one tensor-parallel rank: its own part   `dp_cp`
    allreduce=False, or below `.experts.`      the ranks with the same experts          `expt_dp`

With several instances of the distributed optimizer, `dp_cp` is (`inter_dist_opt`, `intra_dp_cp`) and `expt_dp` is
(`inter_dist_opt`, `intra_expt_dp`): replicated over the first axis, sharded over the second.

An expert's gradient is a sum over tokens of all `dp_cp` ranks, brought by the all-to-all: the divisor of all gradients
is the size of `dp_cp`. An average over `expt_dp` would be too large by the number of expert-parallel ranks.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lamella_engine.extending import ParameterPlacement, is_sharded, placement_on

GroupsByName = Callable[[str], dist.ProcessGroup | None]
# Dims of the parameters that megatron-core splits over tensor-parallel ranks and never marks, by their last name.
_UNMARKED_PARTS = {"softmax_offset": 0}
_DATA_GROUPS = ["dp_cp", "intra_dp_cp", "expt_dp", "intra_expt_dp", "inter_dist_opt"]


@dataclass(frozen=True)
class Meshes:
    """Data-parallel meshes of a megatron-core model: 1-D, or 2-D with several instances of the distributed optimizer.

    Attributes:
        dense: The mesh over `dp_cp`.
        experts: The mesh over `expt_dp`, the same object as `dense` where both have the same ranks; None for a model
            without expert-parallel parameters.
    """

    dense: DeviceMesh
    experts: DeviceMesh | None

    @classmethod
    def of(cls, groups: Any, device_type: str) -> Meshes:
        """Meshes over process groups.

        Args:
            groups: megatron-core's `ProcessGroupCollection`; None takes the groups of `parallel_state`.
            device_type: Type of the device that the model's parameters compute on.

        Raises:
            ValueError: `dp_cp` is missing: the groups cannot be known. Or a group of one instance of the distributed
                optimizer is missing, or does not divide the group of all instances.
        """
        groups = _groups_of_parallel_state() if groups is None else groups
        dense, experts = (_mesh(groups, name, device_type) for name in ("dp_cp", "expt_dp"))
        if dense is None:
            raise ValueError(
                "Expected `groups` with the process group `dp_cp`, got none. Call "
                "parallel_state.initialize_model_parallel() first, or pass a ProcessGroupCollection that has it."
            )
        if experts is not None and torch.equal(experts.mesh, dense.mesh):
            experts = dense  # a single collective for each unit, not two
        return cls(dense, experts)

    def check(self, model: nn.Module) -> None:
        """Refuse a model whose parameters the meshes cannot place; parameters of units below have their place.

        Raises:
            ValueError: A parameter is a DTensor, or a part of megatron-core's generalized tensor parallelism; expert
                parameters have no group; or the ranks of a group hold different parts of the model.
        """
        for name, parameter in model.named_parameters():
            if not is_sharded(parameter):
                _check_plain(name, parameter)
        _check_disjoint(model, "dp_cp", self.dense, ("tp", "pp"))
        expert = next(expert_parameters(model), None)
        if expert is None:
            return
        if self.experts is None:
            raise ValueError(
                f"Expected `groups` with the process group `expt_dp`, over which {expert!r} is sharded, got none. Pass "
                "the ProcessGroupCollection that the model was built with."
            )
        _check_disjoint(model, "expt_dp", self.experts, ("ep", "expt_tp", "pp"))
        self._check_sizes(model)

    def _check_sizes(self, model: nn.Module) -> None:
        """Hold the sizes of `dp_cp` and `expt_dp` against each other: both times their model-parallel ranks."""
        assert self.experts is not None
        tp, ep, expt_tp = (_size(model, name) for name in ("tp", "ep", "expt_tp"))
        if self.dense.size() * tp != self.experts.size() * ep * expt_tp:
            raise ValueError(
                f"Expected `dp_cp` times the model's `tp` to be as many ranks as `expt_dp` times its `ep` and "
                f"`expt_tp`, got {self.dense.size()} * {tp} and {self.experts.size()} * {ep} * {expt_tp}. Pass the "
                "ProcessGroupCollection that the model was built with."
            )
        if self.dense.ndim != self.experts.ndim:
            raise ValueError(
                f"Expected `groups` with `intra_dp_cp` and `intra_expt_dp`, the ranks of one instance of the "
                f"distributed optimizer, got only one of the two: `dp_cp` makes a mesh of {self.dense.ndim} axes, "
                f"`expt_dp` one of {self.experts.ndim}. Pass both groups, or neither."
            )


class Placement:
    """The `shard_placement_fn` of a model: experts on the meshes of experts, all other parameters on the dense mesh.

    Args:
        model: Whose parameters are placed, by their marks and names.
        meshes: Checked against the model.
        is_replicated: The ZeRO stage is DDP: experts are replicated over 1-D meshes.
        groups_by_name: Counts before marks and names: the process group of a parameter, or None.

    Raises:
        ValueError: The meshes cannot place the model's parameters; or several instances of the distributed optimizer
            and a group by name.
    """

    def __init__(
        self,
        model: nn.Module,
        meshes: Meshes,
        *,
        is_replicated: bool = False,
        groups_by_name: GroupsByName | None = None,
    ) -> None:
        meshes.check(model)
        self._dense = meshes.dense
        self._placements: dict[int, ParameterPlacement] = {}
        parameters = dict(model.named_parameters())
        if meshes.experts is not None and meshes.experts is not meshes.dense:
            on_experts = placement_on(meshes.experts, is_replicated=is_replicated)
            self._placements = {id(parameters[name]): on_experts for name in expert_parameters(model)}
        if groups_by_name is None:
            return
        placements: dict[dist.ProcessGroup, ParameterPlacement] = {}
        for name, parameter in parameters.items():
            group = None if is_sharded(parameter) else groups_by_name(name)
            if group is None:
                continue
            if meshes.dense.ndim > 1:
                raise ValueError(
                    f"Expected no group of a parameter's own with several instances of the distributed optimizer, got "
                    f"one of {group.size()} ranks for {name!r}: replicas of its shards are unknown. Leave "
                    "`groups_by_name` out, or train one instance."
                )
            if group not in placements:
                mesh = DeviceMesh.from_group(group, meshes.dense.device_type)
                placements[group] = placement_on(mesh, is_replicated=is_replicated)
            self._placements[id(parameter)] = placements[group]

    def __call__(self, parameter: nn.Parameter) -> ParameterPlacement | None:
        """The placement of one parameter on a mesh other than its unit's; None is the unit's mesh."""
        return self._placements.get(id(parameter))

    def mesh_of(self, parameter: nn.Parameter) -> DeviceMesh:
        """The mesh of the ranks that hold the same parameter."""
        placement = self(parameter)
        return self._dense if placement is None else placement.mesh_info.mesh


def mark_unmarked_parts(module: nn.Module) -> None:
    """Mark the tensor-parallel parts that megatron-core never marks: an attention's offsets of the softmax, one a head.

    Only `sharded_state_dict` tells that they are split. Taken for replicated, the offsets of a single tensor-parallel
    rank would be saved, and would count in norms.

    Args:
        module: The unit to be.

    Effects: sets attributes of parameters, over the mark False that Megatron-LM gives every parameter without a mark.
    """
    for name, parameter in module.named_parameters():
        if (dim := _UNMARKED_PARTS.get(name.rpartition(".")[2])) is not None:
            vars(parameter).update(tensor_model_parallel=True, partition_dim=dim, partition_stride=1)


def broadcast_weights(module: nn.Module, placement: Placement, ignored: Collection[nn.Parameter]) -> None:
    """Give the parameters that `fully_shard` is about to cut the values of the first rank of their mesh.

    Ranks that initialise with seeds of their own (Megatron-LM's `--data-parallel-random-init`) would each keep their
    own rows, and the model would be of no seed. Sharded parameters stay, and tensors that `fully_shard` refuses.

    Args:
        module: The unit to be.
        placement: The placement of the parameters below `module`.
        ignored: Parameters that stay as they are on each rank.

    Effects: a broadcast of each parameter over each axis of its mesh, in the parameter's dtype; parameters on another
        device than the mesh's travel by a copy.
    """
    ignored_ids = {id(parameter) for parameter in ignored}
    for parameter in module.parameters():
        weight = parameter.detach()
        is_plain = type(weight) is torch.Tensor and weight.is_contiguous()
        if id(parameter) in ignored_ids or is_sharded(parameter) or not is_plain or weight.is_meta:
            continue
        mesh = placement.mesh_of(parameter)
        on_mesh = weight if weight.device.type == mesh.device_type else weight.to(mesh.device_type)
        for axis in range(mesh.ndim):
            if mesh.size(axis) > 1:
                dist.broadcast(on_mesh, group=mesh.get_group(axis), group_src=0)
        if on_mesh is not weight:
            weight.copy_(on_mesh)


def expert_parameters(model: nn.Module) -> Iterator[str]:
    """Names of the parameters that hold experts of this rank, shared by the ranks of `expt_dp` only."""
    # The mark is set for expert parallelism alone. With expert tensor parallelism on one expert-parallel rank only the
    # name tells, and such parameters have data-parallel groups of their own too.
    for name, parameter in model.named_parameters():
        if getattr(parameter, "allreduce", True) is False or ".experts." in f".{name}":
            yield name


def differs_between_ranks(model: nn.Module) -> str | None:
    """The name of a parameter of which the ranks of the world hold different parts, or None."""
    splits = _size(model, "tp") > 1, _size(model, "expt_tp") > 1
    for name, parameter in model.named_parameters():
        if getattr(parameter, "allreduce", True) is False:
            return name
        # megatron-core marks parameters on a single tensor-parallel rank too.
        if getattr(parameter, "tensor_model_parallel", False) and splits[".experts." in name]:
            return name
    return None


def split_parameters(model: nn.Module) -> dict[dist.ProcessGroup, list[str]]:
    """Names of the parameters of which a rank holds a tensor-parallel part, by the group that holds all parts."""
    names_by_group: dict[dist.ProcessGroup, list[str]] = {}
    for name, parameter in model.named_parameters():
        if getattr(parameter, "tensor_model_parallel", False):
            group = _group(model, "expt_tp" if ".experts." in name else "tp")
            if group is not None and group.size() > 1:
                names_by_group.setdefault(group, []).append(name)
    return names_by_group


def _check_plain(name: str, parameter: nn.Parameter) -> None:
    """Refuse a parameter in parts beyond the marks of tensor and expert parallelism."""
    if isinstance(parameter, DTensor):
        raise ValueError(
            f"Expected parameters that are plain tensors, got {name!r}, a DTensor {parameter.placements}. Leave "
            "tensor parallelism to megatron-core's layers, and sharding to this call."
        )
    if getattr(parameter, "is_gtp_weight_remat", False):
        raise ValueError(
            f"Expected parameters without generalized tensor parallelism, got {name!r} with the mark "
            "`is_gtp_weight_remat`: megatron-core gathers it itself. Build the model with one GTP rank; fully_shard "
            "gathers in its place."
        )


def _check_disjoint(model: nn.Module, name: str, mesh: DeviceMesh, model_groups: tuple[str, ...]) -> None:
    """Refuse a data-parallel group with a rank that holds another part of the model than this rank."""
    shared = set(mesh.mesh.flatten().tolist())
    for model_group in model_groups:
        group = _group(model, model_group)
        if (
            group is not None
            and len(common_ranks := sorted(shared.intersection(dist.get_process_group_ranks(group)))) > 1
        ):
            raise ValueError(
                f"Expected `{name}` to have the ranks that hold the same parameters, got ranks {common_ranks} with "
                f"different parameters, as ranks of the model's group `{model_group}`. Pass the ProcessGroupCollection "
                "that the model was built with."
            )


def _size(model: nn.Module, name: str) -> int:
    """Number of ranks of one of the model's groups: 1 without the group."""
    group = _group(model, name)
    return 1 if group is None else int(group.size())


def _group(model: nn.Module, name: str) -> dist.ProcessGroup | None:
    """A model-parallel group given to the model's constructor, or the group of `parallel_state`, or None."""
    built_with = (getattr(module, "pg_collection", None) for module in model.modules())
    groups = next((collection for collection in built_with if collection is not None), None)
    group: dist.ProcessGroup | None = getattr(groups, name, None)
    if group is None and importlib.import_module("megatron.core.parallel_state").is_initialized():
        group = getattr(_process_groups([name]), name)
    return group


def check_group(pg_collection: Any, name: str, use: str) -> None:
    """Refuse a collection without a group: that of `parallel_state` may be another model's.

    Raises:
        ValueError: The group is missing; `use` says for whose sake.
    """
    if getattr(pg_collection, name, None) is None:
        raise ValueError(
            f"Expected `pg_collection` with the process group `{name}`, {use}, got none. Pass the "
            "ProcessGroupCollection that the model was built with, with all its groups."
        )


def num_instances(groups: Any) -> int:
    """How many instances of the distributed optimizer the groups make; None takes the groups of `parallel_state`."""
    groups = _groups_of_parallel_state() if groups is None else groups
    all_instances, inner = getattr(groups, "dp_cp", None), getattr(groups, "intra_dp_cp", None)
    return 1 if all_instances is None or inner is None else int(all_instances.size()) // int(inner.size())


def _groups_of_parallel_state() -> Any:
    """The data-parallel groups of `parallel_state`; before its initialization a collection without groups."""
    is_initialized = importlib.import_module("megatron.core.parallel_state").is_initialized()
    return _process_groups(_DATA_GROUPS if is_initialized else [])


def _process_groups(names: list[str]) -> Any:
    config = importlib.import_module("megatron.core.process_groups_config")
    return config.ProcessGroupCollection.use_mpu_process_groups(names)


def _mesh(groups: Any, name: str, device_type: str) -> DeviceMesh | None:
    """The mesh over a data-parallel group: 2-D if its ranks make several instances of the distributed optimizer."""
    all_instances, inner = getattr(groups, name, None), getattr(groups, f"intra_{name}", None)
    if all_instances is None:
        return None
    if inner is None or inner.size() == all_instances.size():
        return DeviceMesh.from_group(all_instances, device_type)
    outer = getattr(groups, "inter_dist_opt", None)
    if outer is None:
        raise ValueError(
            f"Expected `groups` with the process group `inter_dist_opt`, as `intra_{name}` has {inner.size()} of the "
            f"{all_instances.size()} ranks of `{name}`, got none. Pass the ProcessGroupCollection that the model was "
            "built with."
        )
    grid = _instances(name, *(dist.get_process_group_ranks(group) for group in (all_instances, inner, outer)))
    return DeviceMesh.from_group([outer, inner], device_type, mesh=grid, mesh_dim_names=("replicate", "shard"))


def _instances(name: str, ranks: list[int], inner: list[int], outer: list[int]) -> torch.Tensor:
    """The ranks of a data-parallel group, (num_instances, ranks of an instance).

    Raises:
        ValueError: This rank's groups are not a row and a column of consecutive ranks in rows.
    """
    num = len(inner)
    place = ranks.index(dist.get_rank())
    row, column = ranks[place // num * num :][:num], ranks[place % num :: num]
    if len(ranks) % num or (inner, outer) != (row, column):
        raise ValueError(
            f"Expected `intra_{name}` and `inter_dist_opt` to divide `{name}`, of ranks {ranks}, into instances of "
            f"consecutive ranks, got ranks {inner} and {outer}. Pass the ProcessGroupCollection that the model was "
            "built with."
        )
    return torch.tensor(ranks).view(-1, num)
