"""Experts as units of their own, in a ZeRO stage of their own.

Note [Experts rest by a stage of their own]
    A stage belongs to a unit, so the experts of each layer become a unit inside the layer's. The unit lies on the mesh
    of experts, not on that of dense parameters with a placement for each parameter: an outer axis may then shard main
    weights (HFSDP) too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from lamella_engine import AxisPlacement, ShardingOptions
from lamella_megatron._model.placement import Meshes, expert_parameters

Stage = AxisPlacement | tuple[AxisPlacement, ...]


def check_stage(
    stage: Stage, model: nn.Module, meshes: Meshes, unit_classes: Collection[type[nn.Module]], *, has_names: bool
) -> None:
    """Refuse a stage of experts that fits no experts, not their mesh, or units that divide experts.

    Args:
        stage: The stage.
        model: A megatron-core model; a pipeline stage may have no layer with experts.
        meshes: The meshes of the model.
        unit_classes: The classes of units.
        has_names: Whether parameters have groups by their names.

    Raises:
        ValueError: The model's config has no experts; the stage has not a placement for each axis of the mesh; modules
            of experts are units by their class; or parameters have groups by their names.
    """
    if not getattr(getattr(model, "config", None), "num_moe_experts", None):
        raise ValueError(
            f"Expected a model with experts for `expert_stage`, got {type(model).__name__} with "
            "config.num_moe_experts=None. Leave `expert_stage` out: `placements` of `options` is the stage."
        )
    if has_names:
        raise ValueError(
            f"Expected no `groups_by_name` with `expert_stage`, got both: experts of {stage} lie on `expt_dp`. Leave "
            "one of them out."
        )
    for experts in expert_modules(model):
        if (inner := next((m for m in experts.modules() if isinstance(m, tuple(unit_classes))), None)) is not None:
            raise ValueError(
                f"Expected `unit_classes` without modules of experts, whose unit has `expert_stage`, got "
                f"{type(inner).__name__} inside {type(experts).__name__}. Leave one of the two out."
            )
    num_placements = len(stage) if isinstance(stage, tuple) else 1
    if num_placements != meshes.dense.ndim:
        raise ValueError(
            f"Expected one placement of `expert_stage` for each of the {meshes.dense.ndim} axes of the experts' ranks, "
            f"got {stage}. Pass one stage, such as ZERO1, or with several instances of the distributed optimizer two, "
            "such as (HSDP, ZERO1)."
        )


def expert_modules(module: nn.Module) -> Iterator[nn.Module]:
    """The modules inside that hold the experts of a layer."""
    names = (f".{name}".partition(_EXPERTS) for name in expert_parameters(module))
    for path in dict.fromkeys(before + _EXPERTS for before, _, after in names if after):
        yield module.get_submodule(path.strip("."))


def expert_arguments(stage: Stage, meshes: Meshes, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `fully_shard` for experts.

    Args:
        stage: The stage of experts.
        meshes: The meshes of the model.
        arguments: The arguments for all other modules; `reshard_after_forward` is for stages that free parameters.
    """
    options: ShardingOptions = arguments.get("options") or ShardingOptions()
    changed = {"options": replace(options, placements=stage), "mesh": meshes.experts or meshes.dense}
    inner = stage[-1] if isinstance(stage, tuple) else stage
    keeps_parameters = inner.parameters.is_replicate()
    return {
        **{name: argument for name, argument in arguments.items() if not (keeps_parameters and name == _RESHARD)},
        **changed,
    }


_EXPERTS, _RESHARD = ".experts.", "reshard_after_forward"
