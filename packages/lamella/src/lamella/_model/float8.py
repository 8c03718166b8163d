"""`--float8`: the recipe, the matrices of the recipe, scales in checkpoints, and lines on slower devices."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lamella._settings.options import ConfigError, in_short
from lamella._settings.sections import ParallelConfig
from lamella_engine import load_scaling_state, local_scaling_state, scaling_state
from lamella_precision import (
    Float8Recipe,
    MixedPrecisionPolicy,
    float8_matmul_layers,
    matrices_of,
    multiplies_in_float8,
    use_float8_matmul,
)

_RECIPES = {
    "tensor": Float8Recipe(),
    "delayed": Float8Recipe(num_past_amaxes=16),
    "row": Float8Recipe((1, None)),
    "block": Float8Recipe((128, 128)),
}
"""By `ParallelConfig.float8`."""

EXPERT_AXES: Final = ("experts_data", "experts")
"""The ranks with the same experts, and the ranks with shares of the experts."""

_NUM_NAMED = 3


def in_float8(
    units: Sequence[nn.Module], policy: MixedPrecisionPolicy, parallel: ParallelConfig
) -> MixedPrecisionPolicy:
    """Let the units' linear layers multiply in float8, and return the policy whose gathers are in float8.

    Kernels need sizes in multiples of 16 (`block`: 128): layers of other sizes are gathered in float8 alone.

    Args:
        units: Changed in place, before `fully_shard`.
        policy: The policy of all other parameters.
        parallel: The settings with `float8` and `float8_except`.

    Raises:
        ValueError: No matrix is left, or a pattern matches nothing.
    """
    recipe = replace(_RECIPES[parallel.float8], compute_dtype=policy.param_dtype or torch.float32)
    choose = matrices_of(units, recipe, except_names=parallel.float8_except)
    for unit in units:
        layers = float8_matmul_layers(unit, recipe)
        if names := [name for name in layers if choose(unit.get_parameter(f"{name}.weight".lstrip("."))) is not None]:
            use_float8_matmul(unit, recipe, names=names)
    return replace(policy, recipe=choose)


def check_float8(units: Sequence[nn.Module], parallel: ParallelConfig) -> None:
    """Refuse patterns without a match, and a model without matrices for float8, before anything starts.

    Args:
        units: Not changed.

    Raises:
        ConfigError: Names the option.
    """
    if parallel.float8 != "no":
        try:
            matrices_of(units, _RECIPES[parallel.float8], except_names=parallel.float8_except)
        except ValueError as error:
            raise ConfigError(
                f"Expected matrices in the model's layers for --float8 {parallel.float8} and --float8-except "
                f"{' '.join(parallel.float8_except) or '(none)'}, got: {in_short(error)} Pass other patterns, or "
                "--float8 no."
            ) from error
    elif parallel.float8_except:
        raise ConfigError(
            f"Expected --float8-except with --float8 only, got {' '.join(parallel.float8_except)} with --float8 no. "
            "Leave --float8-except out, or pass --float8 tensor."
        )


def product_lines(parallel: ParallelConfig, device: torch.device) -> list[str]:
    """A line if the device multiplies float8 values in fp32."""
    if parallel.float8 == "no" or multiplies_in_float8(_RECIPES[parallel.float8], device):
        return []
    needed = "9.0 and CUDA 12.9" if parallel.float8 == "block" else "8.9 or above"
    line = (
        f"float8: {device.type} here has no float8 products for --float8 {parallel.float8}, which need compute "
        f"capability {needed}: the same values are multiplied in fp32, slower than bf16"
    )
    return [line]


def gathered_scaling_state(model: nn.Module) -> dict[str, list[list[float]]]:
    """Return scales and past amaxes of delayed scaling, as `scaling_state` does, with those of all experts.

    Each matrix of a stack has a scale of its own, a column in the stack's rows. The columns of all ranks side by side
    are those of a run without `--experts`.

    Args:
        model: Sharded, between steps.

    Effects: collective over all ranks, as `scaling_state`; with spread experts an all-gather of their rows instead,
        over the ranks with shares of the experts.
    """
    axes = _axes_of_experts(model)
    if not axes:
        return scaling_state(model)
    state = local_scaling_state(model)
    axis = next(iter(axes.values()))
    parts: list[dict[str, list[list[float]]]] = [{}] * axis.size()
    dist.all_gather_object(parts, {name: rows for name, rows in state.items() if name in axes}, axis.get_group())
    for name in parts[0]:
        # Row by row: a row has a column for each of a rank's experts, and ranks hold experts in the order of ranks.
        state[name] = [list(chain(*rows)) for rows in zip(*(part[name] for part in parts), strict=True)]
    return state


def load_gathered_scaling_state(model: nn.Module, state: Mapping[str, Sequence[Sequence[float]]]) -> list[str]:
    """Go on with the scales of `gathered_scaling_state`, of which a rank takes those of its experts.

    Args:
        model: Sharded, with its main weights loaded.
        state: The state of a run with any `--experts`; {} starts all scales anew.

    Returns:
        The names of the parameters with delayed scaling that `state` lacks, whose scales start anew.

    Raises:
        ValueError: A parameter has another number of scales or of past amaxes.

    Effects: waits for the device; not a collective.
    """
    parts = {
        name: [_share(row, axis) for row in state[name]]
        for name, axis in _axes_of_experts(model).items()
        if name in state
    }
    return load_scaling_state(model, {**state, **parts})


def _axes_of_experts(model: nn.Module) -> dict[str, DeviceMesh]:
    """Return the ranks with shares of each stack of spread experts, by name."""
    inner = EXPERT_AXES[1]
    return {
        name: parameter.device_mesh[inner]
        for name, parameter in model.named_parameters()
        # An unsharded stack has the inner axis alone.
        if isinstance(parameter, DTensor) and inner in (parameter.device_mesh.mesh_dim_names or ())
    }


def _share(row: Sequence[float], axis: DeviceMesh) -> Sequence[float]:
    num_columns = len(row) // axis.size()
    first = axis.get_local_rank() * num_columns
    return row[first : first + num_columns]


def scale_lines(missing: Sequence[str], step: int) -> list[str]:
    """A line if a checkpoint lacks past amaxes of delayed scaling."""
    if not missing:
        return []
    more = ", ..." if len(missing) > _NUM_NAMED else ""
    first = ", ".join(missing[:_NUM_NAMED])
    line = f"float8: step {step} was saved without past amaxes of {len(missing)} matrices, whose scales start anew: "
    return [f"{line}{first}{more}"]
