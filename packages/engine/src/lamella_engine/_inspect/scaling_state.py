"""Past amaxes and scales of delayed scaling, for checkpoints: main weights alone do not determine them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.nn as nn

from lamella_engine._inspect.numerics import named_shards
from lamella_engine._modules.attached import find_state
from lamella_engine._parameters.scales import Scales
from lamella_engine._tree.tree import finish_left


def scaling_state(model: nn.Module) -> dict[str, list[list[float]]]:
    """The scales of delayed scaling and the amaxes that later ones depend on, as plain numbers for `extra` of a `save`.

    Args:
        model: Sharded, between steps.

    Returns:
        For each such parameter, by name: its scales, and its past amaxes from the latest on, a row each. Equal on all
        ranks that share a parameter; empty without delayed scaling.

    Effects: waits for the device; not a collective.
    """
    finish_left()
    _synchronize(model)
    return {name: scales.state_of(i) for name, scales, i in _delayed(model)}


def load_scaling_state(model: nn.Module, state: Mapping[str, Sequence[Sequence[float]]]) -> list[str]:
    """Go on with saved scales: the next steps are those of the run that saved, on any number of ranks.

    Args:
        model: Sharded, between steps, with its main weights loaded before or after.
        state: From `scaling_state`, of a model with the same recipes.

    Returns:
        The names of the parameters with delayed scaling that `state` lacks, which are left as they are: those of a
        fresh model start from their current weights.

    Raises:
        ValueError: A parameter has another number of scales or of past amaxes.

    Effects: waits for the device; not a collective.
    """
    finish_left()
    _synchronize(model)
    missing = []
    for name, scales, i in _delayed(model):
        if name not in state:
            missing.append(name)
            continue
        rows = torch.tensor(state[name])
        if rows.shape != (expected := scales.state_shape(i)):
            raise ValueError(
                f"Expected {expected[0]} rows of {expected[1]} numbers in `state` for {name!r}, as its recipe has, got "
                f"{tuple(rows.shape)}. Use the recipe of the run that saved, or leave the parameter out: its scales "
                "start anew."
            )
        scales.load(i, rows)
    return missing


def _delayed(model: nn.Module) -> Iterator[tuple[str, Scales, int]]:
    """Name, scales of the group and index in the group, of each parameter with delayed scaling."""
    units = {id(state.unit): state.unit for module in model.modules() if (state := find_state(module))}
    found = {
        id(parameter.sharded): (group.scales, i)
        for unit in units.values()
        for group in unit.parameters.groups
        if group.scales is not None and group.scales.num_past
        for i, parameter in enumerate(group.parameters)
    }
    for name, parameter in named_shards(model):
        if id(parameter) in found:
            yield (name, *found[id(parameter)])


def _synchronize(model: nn.Module) -> None:
    """Wait for all streams: a pass may still compute scales on a stream of its unit's."""
    for device in {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}:
        torch.cuda.synchronize(device)
