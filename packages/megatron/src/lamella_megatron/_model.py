"""A whole megatron-core model in one call."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn

from lamella_engine import FSDPModule, fully_shard
from lamella_mamba import bind_live_parameters
from lamella_megatron._placement import Meshes, Placement
from lamella_megatron._units import layers_of

M = TypeVar("M", bound=nn.Module)


def fully_shard_model(model: M, *, groups: Any = None, **fully_shard_kwargs: Any) -> M:
    """Shard a megatron-core model: one unit a layer, and one for the rest, each parameter over its own ranks.

        parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
        model = GPTModel(...)
        fully_shard_model(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))

    Tensor-parallel parameters keep this rank's part, sharded over the data- and context-parallel ranks with the
    same part; experts are sharded over the ranks with the same experts; all gradients are divided by the number of
    data- and context-parallel ranks. The context-parallel helper of Mamba mixers looks parameters up in its mixer
    from now on.

    Args:
        model: A GPTModel, MambaModel or HybridModel, changed in place.
        groups: megatron-core's `ProcessGroupCollection` with `dp_cp`, and `expt_dp` for a model with experts. None
            takes the groups of `parallel_state`.
        fully_shard_kwargs: For every `fully_shard` call alike, but `mesh` and `shard_placement_fn`.

    Returns:
        `model`, changed.

    Raises:
        ImportError: megatron-core is not installed.
        ValueError: The model has no layers; a process group is missing; or the errors of `fully_shard`.
        TypeError: `mesh` or `shard_placement_fn` was given: both follow from the groups.

    Effects: as `lamella_engine.fully_shard`, once a unit; not a collective.
    """
    if given := [name for name in ("mesh", "shard_placement_fn") if name in fully_shard_kwargs]:
        raise TypeError(
            f"Expected `groups` to say over which ranks parameters are sharded, got `{given[0]}`. Leave it out, or "
            "shard by lamella_engine.fully_shard."
        )
    layers = layers_of(model)
    meshes = Meshes.of(groups, _device_type(model))
    placement = Placement(model, meshes)
    bind_live_parameters(model)
    modules: list[nn.Module] = [*layers, model]
    for module in modules:
        unit = fully_shard(module, mesh=meshes.dense, shard_placement_fn=placement, **fully_shard_kwargs)
        assert isinstance(unit, FSDPModule)
        unit.set_gradient_divide_factor(float(meshes.dense.size()))
    return model


def _device_type(model: nn.Module) -> str:
    """The type of device that parameters compute on: a model on the meta device goes to the accelerator, if any."""
    found = {parameter.device.type for parameter in model.parameters()} - {"meta"}
    if len(found) == 1:
        return found.pop()
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator.type if accelerator else "cpu"
