"""The errors of quantised weights: of modules' values, against main weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from lamella_engine._inspect.numerics import named_shards, sum_over_ranks
from lamella_engine._modules.state import find_state
from lamella_engine._parameters.group import ParameterGroup
from lamella_engine._parameters.sharding import groups_that_share
from lamella_engine._scaling.scales import parts_in
from lamella_engine._tree.tree import finish_deferred
from lamella_engine._unit.unit import Unit
from lamella_precision import Dequantizes, Direction


@dataclass(frozen=True)
class QuantizationError:
    """The error of a parameter's quantised values.

    Attributes:
        underflow: The share of elements rounded to zero from nonzero main weights.
        overflow: The share of elements beyond the format's largest number, by more than rounding.
        relative: The 2-norm of the error over the 2-norm of the main weight; 0.0 for a weight of zeros.
    """

    underflow: float
    overflow: float
    relative: float


def quantization_errors(model: nn.Module) -> dict[str, QuantizationError]:
    """Compare the values of forward with the main weights, for each parameter gathered in a quantised format.

    Too small a delayed scale shows as overflow, a scale for weights of unlike sizes as underflow.

    Args:
        model: Sharded, between steps.

    Returns:
        Errors by name, over all ranks, equal on all ranks that share a parameter; empty without quantised parameters.

    Effects: collective: gathers each unit with quantised parameters, one at a time, and reshards it; one all-reduce for
        each mesh axis of shards, of 40 bytes a parameter; one host sync. Memory for two copies of a parameter in fp32.
    """
    finish_deferred()
    sums: dict[int, torch.Tensor] = {}
    for module, unit in _units(model):
        # A unit kept unsharded by the user must stay unsharded afterwards, too.
        was_unsharded = unit.weights.is_unsharded
        module.unshard()
        try:
            for group in unit.parameters.groups:
                sums.update((id(parameter), row) for parameter, row in _sums_of_group(group))
        # Also after an error: left unsharded, the unit would hold its bytes until the next pass.
        finally:
            if not was_unsharded:
                module.reshard()
    sharded = [(name, p) for name, p in named_shards(model) if id(p) in sums and isinstance(p, DTensor)]
    if not sharded:
        return {}
    rows = torch.stack([sums[id(parameter)] for _, parameter in sharded])
    totals = sum_over_ranks(rows, [groups_that_share(parameter, name) for name, parameter in sharded])
    return {name: _error(*row) for (name, _), row in zip(sharded, totals.tolist(), strict=True)}


def _units(model: nn.Module) -> Iterator[tuple[Any, Unit]]:
    """The units with quantised parameters, each once, by one of their modules."""
    units = {id(state.unit): (module, state.unit) for module in model.modules() if (state := find_state(module))}
    for module, unit in units.values():
        if any(isinstance(group.policy.recipe, Dequantizes) for group in unit.parameters.groups):
            yield module, unit


def _sums_of_group(group: ParameterGroup) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    recipe: object = group.policy.recipe
    if not isinstance(recipe, Dequantizes):
        return
    owned, shards, parts = parts_in(group.main_weight, [None] * len(group.parameters))
    owned_shards = {i: (shard, part.first_row) for i, shard, part in zip(owned, shards, parts, strict=True)}
    for i, parameter in enumerate(group.parameters):
        payloads = [buffer.tensors[i] for buffer in group.buffers]
        # A row on every rank, also without elements, for the all-reduce; in float64, since float32 counts exactly to 16
        # million only.
        row = torch.zeros(5, dtype=torch.float64, device=payloads[0].device)
        if i in owned_shards:
            shard, first = owned_shards[i]
            rows = slice(first, first + len(shard))
            scales = None if group.scales is None else group.scales.parameter_scales[i]
            values = recipe.dequantize(payloads, scales, torch.Size(group.layout.shapes[i]), Direction.FORWARD)
            row = _sums(shard.to(row.device).float(), values[rows].float(), payloads[0][rows])
        yield parameter.sharded, row


def _sums(main: torch.Tensor, values: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """(5,): elements, elements that became zero, elements out of range, squares of errors and of weights."""
    limits = torch.finfo(data.dtype)
    encoded = data.float()
    is_beyond = (encoded.abs() >= limits.max) & (main.abs() > values.abs() * (1 + limits.eps / 2))
    is_lost = (main != 0) & (encoded == 0)
    counts = [torch.ones_like(is_lost).sum(), is_lost.sum(), is_beyond.sum()]
    squares = [(values - main).double().square().sum(), main.double().square().sum()]
    return torch.stack([number.double() for number in (*counts, *squares)])


def _error(
    numel: float, num_lost: float, num_beyond: float, squared_errors: float, squared_weights: float
) -> QuantizationError:
    relative = math.sqrt(squared_errors / squared_weights) if squared_weights else 0.0
    return QuantizationError(num_lost / numel, num_beyond / numel, relative)
