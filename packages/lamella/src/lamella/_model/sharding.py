"""How a model is cut into units, with which number formats, and which units are compiled."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lamella._model.float8 import in_float8
from lamella._settings.config import ParallelConfig
from lamella_engine import MixedPrecisionPolicy, fully_shard
from lamella_transformers import fp32_parameters, sharding_units


def shard(model: nn.Module, parallel: ParallelConfig) -> list[nn.Module]:
    """Shard each unit, then the root module with the remaining parameters.

    Returns:
        The units but the root.

    Effects: collective over all ranks.
    """
    mesh = init_device_mesh(parallel.device, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy()
    if parallel.precision == "bf16":
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16,
            reduce_dtype=torch.float32,
            param_dtype_override_fn=fp32_parameters(model),
        )
    units = sharding_units(model)
    unit_policy = policy if parallel.float8 == "no" else in_float8(units, policy, parallel)
    for unit in units:
        fully_shard(unit, mesh=mesh, mp_policy=unit_policy, reshard_after_forward=parallel.reshard_after_forward)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return units


def compile_units(units: Sequence[nn.Module], parallel: ParallelConfig) -> None:
    """Compile each unit at its next forward, where the settings ask for it."""
    for unit in units if parallel.compile else ():
        unit.compile()
