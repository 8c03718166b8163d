"""Numerics of a model in training: norms, non-finite elements, and spikes."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor

from lamella_engine._common.text import clean_name
from lamella_engine._modules.state import find_state
from lamella_engine._parameters.sharded_parameter import ShardedParameter
from lamella_engine._parameters.sharding import all_reduce_anywhere, groups_that_share
from lamella_engine._tree.tree import finish_deferred

Kind = Literal["nan", "inf"]


@dataclass(frozen=True)
class NonFinite:
    """Non-finite elements of one parameter on one rank.

    Attributes:
        name: The parameter's name.
        rank: The rank whose part has the elements.
        count: The number of elements in the part.
        kind: "nan" or "inf"; infinity of either sign.
    """

    name: str
    rank: int
    count: int
    kind: Kind


class Spike(NamedTuple):
    """A norm far above earlier norms.

    Attributes:
        name: The parameter's name.
        value: The norm now.
        usual: The median of earlier norms; NaN without earlier norms.
    """

    name: str
    value: float
    usual: float


def parameter_norms(model: nn.Module, *, of: Literal["gradient", "weight"] = "gradient") -> dict[str, float]:
    """The 2-norm of each parameter, or of its gradient, over all ranks.

    DTensors on any meshes, replicated or sharded; other tensors count as whole on every rank. Squares are summed in
    float64, for tensors of any dtype. Units may be in any state: shards are read.

    Args:
        model: The model, with or without units.
        of: "gradient" for `.grad`, "weight" for the parameters.

    Returns:
        Norms by name, equal on all ranks that share a parameter; none for a parameter if no rank has a gradient.

    Raises:
        ValueError: `of` is neither, or a tensor is `Partial`, a sum not reduced yet.

    Effects: collective: one all-reduce for each mesh axis that tensors are sharded along, of 16 bytes a parameter; one
        host sync.
    """
    _check_of(of, "gradient", "weight")
    finish_deferred()
    shards = list(named_shards(model))
    if not shards:
        return {}
    sharers = [_sharers(name, parameter, of) for name, parameter in shards]
    rows = sum_over_ranks(_local_squares([parameter for _, parameter in shards], of), sharers)
    named = zip(shards, rows.tolist(), strict=True)
    return {name: math.sqrt(square) for (name, _), (square, num_present) in named if num_present}


def find_nonfinite(model: nn.Module, *, of: Literal["gradient", "weight", "unreduced"] = "gradient") -> list[NonFinite]:
    """Find NaN and infinity.

    A reduction spreads non-finite elements: one rank's NaN gradient makes the sum NaN, and `rank` is the owner of the
    element. To find the rank that *made* a NaN, run backward with `set_requires_gradient_sync(False)` and ask for
    "unreduced".

    Args:
        model: The model, with or without units.
        of: "gradient" for `.grad`, "weight" for the parameters, "unreduced" for gradients kept by units while gradient
            sync is off.

    Returns:
        The findings of all ranks, an equal list on each, by rank and then in the model's order; empty if all elements
        are finite.

    Raises:
        ValueError: `of` has another value.

    Effects: collective on the default process group, two calls; waits for the device. Models may differ between ranks
        (pipeline stages do).
    """
    _check_of(of, "gradient", "weight", "unreduced")
    nonfinite = _nonfinite(list(_unreduced(model) if of == "unreduced" else _named_locals(model, of)))
    if not dist.is_initialized():
        return nonfinite
    # Objects, not tensors: ranks have findings in different numbers, and pipeline stages other names.
    everywhere: list[list[NonFinite]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, nonfinite)
    return [item for items in everywhere for item in items]


class SpikeWatch:
    """Remembers norms, and reports spikes.

    With equal norms, as `parameter_norms` returns on all ranks, every rank reports the same spikes.

    Args:
        factor: A norm above `factor` times the usual norm is a spike.
        window: The number of norms whose median is the usual norm. A parameter is watched after `window` norms; a norm
            that is not finite is a spike at any time, and is not remembered.

    Raises:
        ValueError: `factor` is not above 1, or `window` is below 1.
    """

    def __init__(self, *, factor: float = 10.0, window: int = 20) -> None:
        if not factor > 1:
            raise ValueError(f"Expected `factor` above 1, got {factor!r}.")
        if window < 1:
            raise ValueError(f"Expected `window` of at least 1, got {window!r}.")
        self._factor = factor
        # The last `window` finite norms of each name, for the life of the watch.
        self._seen: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=window))

    def check(self, norms: Mapping[str, float]) -> list[Spike]:
        """Compare norms with earlier norms, and remember the new norms.

        Returns:
            The spikes, in the order of `norms`.

        Effects: not a collective.
        """
        spikes = [spike for name, value in norms.items() if (spike := self._spike(name, value))]
        for name, value in norms.items():
            if math.isfinite(value):
                self._seen[name].append(value)
        return spikes

    def _spike(self, name: str, value: float) -> Spike | None:
        seen = self._seen[name]
        usual = median(seen) if seen else math.nan
        jumped = len(seen) == seen.maxlen and value > self._factor * usual
        return Spike(name, value, usual) if jumped or not math.isfinite(value) else None


def _check_of(of: str, *kinds: str) -> None:
    if of not in kinds:
        raise ValueError(f"Expected `of` to be {' or '.join(map(repr, kinds))}, got {of!r}.")


# -- tensors --------------------------------------------------------------------------------------------------------


def _sharded_parameters(model: nn.Module) -> Iterator[ShardedParameter]:
    for module in model.modules():
        if (state := find_state(module)) is not None:
            yield from (parameter for group in state.unit.parameters.groups for parameter in group.parameters)


def named_shards(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Named parameters, in the sharded form even while a unit is unsharded."""
    sharded = {id(parameter.unsharded): parameter.sharded for parameter in _sharded_parameters(model)}
    for name, parameter in model.named_parameters():
        yield clean_name(name), sharded.get(id(parameter), parameter)


def _tensor(parameter: nn.Parameter, of: str) -> torch.Tensor | None:
    return parameter.grad if of == "gradient" else parameter.detach()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.detach() if local.is_floating_point() else local.detach().float()


def _named_locals(model: nn.Module, of: str) -> Iterator[tuple[str, torch.Tensor]]:
    finish_deferred()
    for name, parameter in named_shards(model):
        if (tensor := _tensor(parameter, of)) is not None:
            yield name, _local(tensor)


def _unreduced(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The gradients of earlier microbatches and of the last, under the model's names."""
    # By both forms: with gradient sync off, modules may hold either between microbatches.
    by_form = {id(form): p for p in _sharded_parameters(model) for form in (p.sharded, p.unsharded)}
    for name, parameter in model.named_parameters():
        if (parameter_of_form := by_form.get(id(parameter))) is None:
            continue
        for gradient in (parameter_of_form.accumulated, parameter_of_form.unsharded.grad):
            if gradient is not None:
                yield clean_name(name), gradient


# -- norms ----------------------------------------------------------------------------------------------------------


def _local_squares(parameters: list[nn.Parameter], of: str) -> torch.Tensor:
    """For each parameter, (N, 2) in float64: the squared norm of this rank's part, and whether a tensor is present."""
    tensors = [_tensor(parameter, of) for parameter in parameters]
    local_tensors = {i: _local(tensor) for i, tensor in enumerate(tensors) if tensor is not None}
    local_tensors = {i: local for i, local in local_tensors.items() if local.numel()}
    device = _local(parameters[0]).device
    # Made on the device: a copy from the host would make the host wait.
    zero, one = (torch.full((), value, dtype=torch.float64, device=device) for value in (0.0, 1.0))
    squares = [zero] * len(parameters)
    if local_tensors:
        norms = torch._foreach_norm(list(local_tensors.values()), 2, dtype=torch.float64)
        for i, norm in zip(local_tensors, norms, strict=True):
            squares[i] = norm.square().to(device)  # parts at rest on the CPU too
    present = [zero if tensor is None else one for tensor in tensors]
    return torch.stack([torch.stack(squares), torch.stack(present)], dim=1)


def sum_over_ranks(rows: torch.Tensor, sharers: list[list[dist.ProcessGroup]]) -> torch.Tensor:
    """Sum each row over the groups that share the row's parameter: all rows of a group in one call."""
    members: dict[dist.ProcessGroup, list[int]] = {}
    for i, groups in enumerate(sharers):
        for group in groups:
            members.setdefault(group, []).append(i)
    summed = list(rows.unbind())
    for group, indices in members.items():
        part = torch.stack([summed[i] for i in indices])
        all_reduce_anywhere(part, group)
        for i, row in zip(indices, part.unbind(), strict=True):
            summed[i] = row
    return torch.stack(summed)


def _sharers(name: str, parameter: nn.Parameter, of: str) -> list[dist.ProcessGroup]:
    """The groups over which a parameter is sharded, by its own placements: some ranks may have no gradient."""
    if not isinstance(parameter, DTensor):
        return []
    tensor = _tensor(parameter, of)
    if isinstance(tensor, DTensor) and tensor.placements != parameter.placements:
        raise ValueError(
            f"Expected the gradient of {name!r} to lie as the parameter does, {parameter.placements}, got "
            f"{tensor.placements}. Redistribute it first."
        )
    return groups_that_share(parameter, name)


# -- non-finite elements --------------------------------------------------------------------------------------------


def _nonfinite(tensors: list[tuple[str, torch.Tensor]]) -> list[NonFinite]:
    """The findings in this rank's tensors.

    Effects: one host sync.
    """
    if not tensors:
        return []
    rank = dist.get_rank() if dist.is_initialized() else 0
    device = tensors[0][1].device  # units may rest on the CPU, or not
    counts = torch.stack([torch.stack([t.isnan().sum(), t.isinf().sum()]).to(device) for _, t in tensors])
    kinds: tuple[Kind, Kind] = ("nan", "inf")
    return [
        NonFinite(name, rank, count, kind)
        for (name, _), row in zip(tensors, counts.tolist(), strict=True)
        for kind, count in zip(kinds, row, strict=True)
        if count
    ]
