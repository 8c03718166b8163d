"""The cut of a model into units: saved tensors, number formats, stage and resting place of each unit."""

from collections.abc import Collection
from typing import Any, Final, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lamella._model.activations import check_recompute, offload_activations, recompute
from lamella._model.float8 import EXPERT_AXES, in_float8
from lamella._model.matrices import keep_whole
from lamella._settings.sections import ParallelConfig
from lamella._settings.sizes import budget_nbytes
from lamella_engine import (
    HFSDP,
    HSDP,
    ZERO1,
    ZERO2,
    ZERO3,
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    ShardingOptions,
    fully_shard,
)
from lamella_transformers import (
    TENSOR_AXES,
    SequencePieces,
    SharedRows,
    cut_sequences,
    cut_tensors,
    fp32_parameters,
    sharding_units,
    tensor_parallel_placement,
)
from lamella_transformers.experts import expert_arguments, spread_experts

_STAGES: Final = {1: ZERO1, 2: ZERO2, 3: ZERO3}


class ModelParts(NamedTuple):
    """The parts of a sharded model.

    Attributes:
        units: The units but the root.
        shared_rows: This rank's rows of the head, with tensor parallelism; None without.
        pieces: This rank's pieces of sequences, with context parallelism; None without.
    """

    units: list[nn.Module]
    shared_rows: SharedRows | None
    pieces: SequencePieces | None


def shard(
    model: nn.Module,
    parallel: ParallelConfig,
    matrices: Collection[str] = (),
    *,
    host: saved_tensors_hooks | None = None,
) -> ModelParts:
    """Shard each unit, then the root module with the remaining parameters.

    The order matters: spread experts and cut tensors, which replace parameters, then recompute, then offloading of
    activations around it, then shards. `compilation.compile_units` comes last, after the first forward.

    Args:
        model: Changed in place.
        parallel: The settings of sharding.
        matrices: The names of the matrices for Muon, whole on one rank where a layer's padding stays small.
        host: Hooks that move saved tensors to the host's memory, as for `offload_activations`.

    Raises:
        ConfigError: More layers are to be recomputed than the model has.

    Effects: collective over all ranks.
    """
    units = sharding_units(model)
    shared_rows = pieces = None
    if parallel.experts > 1:
        spread_experts(model, _neighbours(parallel, parallel.experts, EXPERT_AXES))
    check_recompute(units, parallel)
    if parallel.tensor_parallel > 1:
        tensor_mesh = _neighbours(parallel, parallel.tensor_parallel, TENSOR_AXES)
        cut_tensors(model, tensor_mesh)
        shared_rows = SharedRows(tensor_mesh.get_group(TENSOR_AXES[1]))
    if parallel.context_parallel > 1:
        pieces = SequencePieces(_neighbours(parallel, parallel.context_parallel, ("data", "context")).get_group(1))
        cut_sequences(model, pieces)
    if parallel.recompute != "no":
        recompute(units, parallel.recompute, parallel.recompute_layers)
    if parallel.offload_activations:
        offload_activations(units, host)
    policy = MixedPrecisionPolicy()
    if parallel.precision == "bf16":
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16,
            reduce_dtype=torch.bfloat16 if parallel.reduce == "bf16" else torch.float32,
            param_dtype_override_fn=fp32_parameters(model),
        )
    unit_policy = policy if parallel.float8 == "no" else in_float8(units, policy, parallel)
    options = ShardingOptions(
        placements=_placements(parallel),
        keep_budget=budget_nbytes(parallel.keep_budget),
        keep_together=keep_whole(model, matrices, _num_shards(parallel)),
    )
    shared: dict[str, Any] = {"mesh": _mesh(parallel), "options": options}
    if parallel.experts > 1:
        shared |= expert_arguments(model, options, unit_policy)
    if parallel.tensor_parallel > 1:
        shared["shard_placement_fn"] = tensor_parallel_placement(tensor_mesh)
    if parallel.rest == "cpu":
        shared["offload_policy"] = CPUOffloadPolicy(pin_memory=parallel.device == "cuda")
    # Stages 1 and 2 keep whole weights, and have nothing to free after forward.
    reshard = parallel.reshard_after_forward if parallel.stage == 3 else None
    for unit in units:
        fully_shard(unit, mp_policy=unit_policy, reshard_after_forward=reshard, **shared)
    fully_shard(model, mp_policy=policy, **shared)
    if parallel.experts > 1:  # Tokens of all ranks with a share reach an expert.
        for unit in (*units, model):
            cast(FSDPModule, unit).set_gradient_divide_factor(dist.get_world_size())
    return ModelParts(units, shared_rows, pieces)


def _mesh(parallel: ParallelConfig) -> DeviceMesh:
    """All ranks along one axis; with `replicate`, instances along an outer axis."""
    num_ranks = dist.get_world_size()
    if parallel.replicate == 1:
        return init_device_mesh(parallel.device, (num_ranks,))
    shape = (parallel.replicate, num_ranks // parallel.replicate)
    return init_device_mesh(parallel.device, shape, mesh_dim_names=("instances", "shards"))


def _num_shards(parallel: ParallelConfig) -> int:
    """The ranks that share a layer's parameters, or its states."""
    return dist.get_world_size() // (1 if parallel.spread_states else parallel.replicate)


def _neighbours(parallel: ParallelConfig, count: int, names: tuple[str, ...]) -> DeviceMesh:
    """All ranks on two axes with names: the inner one of `count` neighbours."""
    return init_device_mesh(parallel.device, (dist.get_world_size() // count, count), mesh_dim_names=names)


def _placements(parallel: ParallelConfig) -> Any:
    """The engine's name of the stage, for one axis or two."""
    stage = _STAGES[parallel.stage]
    if parallel.replicate > 1:
        return (HFSDP if parallel.spread_states else HSDP, stage)
    return stage
