"""The process groups that a megatron-core model's parameters are sharded over, by the marks on the parameters.

    mark on the parameter                      held by                                  sharded over
    none                                       all ranks of a tensor-parallel rank      `dp_cp`
    tensor_model_parallel                      one tensor-parallel rank: its own part   `dp_cp`
    allreduce=False, or below `.experts.`      the ranks with the same experts          `expt_dp`

An expert's gradient is a sum over tokens of all `dp_cp` ranks, brought by the all-to-all: the divisor of all gradients
is the size of `dp_cp`. An average over `expt_dp` would be too large by the number of expert-parallel ranks.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from lamella_engine.extending import MeshInfo


@dataclass(frozen=True)
class Meshes:
    """Data-parallel meshes of a megatron-core model.

    Attributes:
        dense: Over `dp_cp`.
        experts: Over `expt_dp`; None for a model without expert-parallel parameters.
    """

    dense: DeviceMesh
    experts: DeviceMesh | None

    @classmethod
    def of(cls, groups: Any, device_type: str) -> Meshes:
        """Meshes over process groups.

        Args:
            groups: megatron-core's `ProcessGroupCollection`; None takes the groups of `parallel_state`.
            device_type: Of the model's parameters in compute.

        Raises:
            ValueError: `dp_cp` is missing: the groups cannot be known.
        """
        groups = _groups_of_parallel_state() if groups is None else groups
        dense, experts = getattr(groups, "dp_cp", None), getattr(groups, "expt_dp", None)
        if dense is None:
            raise ValueError(
                "Expected `groups` with the process group `dp_cp`, got none. Call "
                "parallel_state.initialize_model_parallel() first, or pass a ProcessGroupCollection that has it."
            )
        return cls(_mesh(dense, device_type), None if experts is None else _mesh(experts, device_type))

    def check(self, model: nn.Module) -> None:
        """Refuse a model whose expert parameters have no group.

        Raises:
            ValueError: The first expert parameter's name is in the message.
        """
        if self.experts is None and (name := next(expert_parameters(model), None)) is not None:
            raise ValueError(
                f"Expected `groups` with the process group `expt_dp`, over which {name!r} is sharded, got none. Pass "
                "the ProcessGroupCollection that the model was built with."
            )


@dataclass
class _MeshInfo:
    """FSDP2's `FSDPMeshInfo`, as `fully_shard` reads it."""

    mesh: DeviceMesh
    shard_mesh_dim: int | None = 0
    replicate_mesh_dim: int | None = None


@dataclass
class _OnMesh:
    """FSDP2's `ShardPlacementResult`: a dim, and the mesh of a single parameter."""

    placement: Shard | None
    mesh_info: MeshInfo


class Placement:
    """The `shard_placement_fn` of a model: experts on the meshes of experts, all other parameters on the dense mesh.

    Args:
        model: Whose parameters are placed, by their marks and names.
        meshes: Checked against the model.
    """

    def __init__(self, model: nn.Module, meshes: Meshes) -> None:
        meshes.check(model)
        parameters = dict(model.named_parameters())
        self._experts = {id(parameters[name]) for name in expert_parameters(model)}
        self._info = None if meshes.experts is None else _MeshInfo(meshes.experts)

    def __call__(self, parameter: nn.Parameter) -> _OnMesh | None:
        """The mesh of one parameter; None is the unit's own."""
        if id(parameter) not in self._experts:
            return None
        assert self._info is not None
        return _OnMesh(Shard(0), self._info)


def expert_parameters(model: nn.Module) -> Iterator[str]:
    """Names of the parameters that hold experts of this rank, shared by the ranks of `expt_dp` only."""
    # The mark is set for expert parallelism alone. With expert tensor parallelism on one expert-parallel rank only the
    # name tells, and such parameters have data-parallel groups of their own too.
    for name, parameter in model.named_parameters():
        if getattr(parameter, "allreduce", True) is False or ".experts." in name:
            yield name


def differs_between_ranks(model: nn.Module) -> str | None:
    """The name of a parameter of which the ranks of the world hold different parts, or None."""
    splits = _tensor_parallel_size(model) > 1  # megatron-core marks parameters on a single tensor-parallel rank too
    for name, parameter in model.named_parameters():
        if getattr(parameter, "allreduce", True) is False or (
            splits and getattr(parameter, "tensor_model_parallel", False)
        ):
            return name
    return None


def _tensor_parallel_size(model: nn.Module) -> int:
    group = getattr(getattr(model, "pg_collection", None), "tp", None)
    if group is not None:
        return int(group.size())
    state = importlib.import_module("megatron.core.parallel_state")
    return int(state.get_tensor_model_parallel_world_size()) if state.is_initialized() else 1


def _groups_of_parallel_state() -> Any:
    config = importlib.import_module("megatron.core.process_groups_config")
    return config.ProcessGroupCollection.use_mpu_process_groups(["dp_cp", "expt_dp"])


def _mesh(group: dist.ProcessGroup, device_type: str) -> DeviceMesh:
    return DeviceMesh.from_group(group, device_type)
