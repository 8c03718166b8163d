"""Parameters in one buffer of shards, gathered as the payloads of a recipe: the even and the flat layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
import torch.nn as nn

from lamella_buffers import GatherPlan, ShardedBuffer, Transport, standalone
from lamella_engine._parameters.group import Layout, ParameterGroup
from lamella_engine._parameters.offload import Offload
from lamella_engine._parameters.sharded_parameter import point_at
from lamella_engine._parameters.unsharded_weight import PayloadLayouts, UnshardedWeight
from lamella_engine._scaling.scales import Scales
from lamella_precision import CachingRecipe, Direction, ScaledRecipe, read_directly


@final
class PayloadForm:
    """The form of parameters whose shards lie in one buffer: `GroupForm` has the meanings of methods and attributes."""

    def __init__(self) -> None:
        self.allocated: tuple[int, ...] = ()
        self.sends_main = False
        self.computes_with_main = False
        self.is_unreceived = False  # decoded weights are views of the buffers: nothing to receive
        self.caches: CachingRecipe | None = None
        self._unsharded: UnshardedWeight  # as the two below made by `build`, for shards with storage
        # Both asked for at every gather. A plan keeps the sent main weights alive.
        self._chosen: dict[tuple[Direction, Direction | None], tuple[int, ...]] = {}
        self._plans: dict[tuple[int, ...], GatherPlan] = {}

    def take(self, group: ParameterGroup, layout: Layout, shards: list[torch.Tensor], *, keep_parameters: bool) -> None:
        """Copy local tensors into one buffer of this rank's shards."""
        rank, offload = group.axes.main_rank, group.offload
        group.main_weight = new_main_weight(layout, rank, shards[0].dtype, shards[0].device, offload)
        with torch.no_grad():
            group.main_weight.flat.zero_()
            # Copied, not adopted: assigned tensors may be another model's, and lie apart.
            torch._foreach_copy_(list(group.main_weight.shards), shards)
        for parameter, shard in zip(group.parameters, group.main_weight.shards, strict=True):
            if not keep_parameters:  # an optimizer will hold the Parameter put in by hand
                parameter.adopt(parameter.replacement())
            point_at(parameter, standalone(shard))
        group.reduce_dtype = group.policy.reduce_dtype_of(group.main_weight.dtype)

    def build(self, group: ParameterGroup) -> None:
        """Make the unsharded buffers, and over them the unsharded parameters; nothing for shards on meta."""
        if group.is_meta:
            return
        formats = group.payload_layouts(group.layout, group.main_weight.dtype)
        self.sends_main = all(payload_format.is_main_weight for payload_format in formats.formats)
        self.computes_with_main = self.sends_main and group.axes.shard_axis is None and group.offload is None
        allocator = _Borrowed(group.main_weight.flat) if self.computes_with_main else group.allocator
        if isinstance(formats.recipe, ScaledRecipe):  # new with each build: scales of weights that were replaced
            group.scales = Scales(formats.recipe, group.layout.shapes, group.device)
        self.caches = formats.recipe if isinstance(formats.recipe, CachingRecipe) else None
        layouts, ranks = (group.layout, group.main_weight.layout), (group.transports.rank, group.axes.main_rank)
        self._unsharded = UnshardedWeight(formats, *layouts, ranks, group.device, allocator, group.scales)
        group.buffers = self._unsharded.buffers
        self._compute_with_weights(group)
        for buffer in group.buffers:
            buffer.free()  # only now: torch checks new views against the storage's size
        self._chosen = _choices(formats, group.transports.neighbours)
        self._plans = {}  # made anew: old plans would send the old main weights
        # Only now: windows belong to the gather stream, not to the current one. A unit moved off its mesh has none.
        if group.transports.windows is not None and group.device.type == group.axes.mesh.device_type:
            for buffer in group.buffers:
                buffer.allocator = group.transports.windows

    def _compute_with_weights(self, group: ParameterGroup) -> None:
        for parameter, weight in zip(group.parameters, self._unsharded.weights, strict=True):
            # `data` has a version counter of its own: a write is told by the parameter's name, not by the group's.
            unsharded = parameter.sharding.wrap(weight.data if type(weight) is torch.Tensor else weight)
            parameter.compute_with(nn.Parameter(unsharded, requires_grad=parameter.sharded.requires_grad))
            read_directly(parameter.unsharded)

    def chosen(self, direction: Direction, gathered_for: Direction | None) -> tuple[int, ...]:
        """The buffers that a gather fills."""
        return self._chosen[direction, gathered_for]

    def prepare_gather(
        self, group: ParameterGroup, direction: Direction = Direction.BOTH, gathered_for: Direction | None = None
    ) -> GatherPlan:
        """Main weights in the communication dtype are sent in place, others encoded into this rank's slices.

        Effects: on the current stream. If main weights rest on the CPU, one copy of this rank's to the device, into
            memory that lives as long as the returned plan.
        """
        chosen = self._chosen[direction, gathered_for]
        # Before the plan is used: encodings write into pieces of these buffers.
        group.allocate(chosen)
        if group.transports.outer is not None:
            return self._plan_over_outer(group, chosen, group.transports.outer)
        if group.offload is not None:
            # A plan of this gather alone: it holds the device's copy of the main weights, which must go with the
            # gather.
            return self._unsharded.plan(chosen, group.main_weight_on_device())
        if chosen not in self._plans:
            self._plans[chosen] = self._unsharded.plan(chosen, group.main_weight)
        return self._plans[chosen]

    def _plan_over_outer(self, group: ParameterGroup, chosen: Sequence[int], outer: Transport) -> GatherPlan:
        """A gather from shards gathered over the outer axis before, or now if missing.

        Effects: if shards are missing, a collective on the outer axis, on the current stream; blocks the host on gloo.
        """
        missing = [p for p in chosen if p not in group.model_weights]
        if missing:
            # Kept for later gathers, until an update may have changed main weights (`UnitWeights.drop_copy`).
            group.model_weights |= self._unsharded.gather_shards(missing, group.main_weight_on_device(), outer)
        return self._unsharded.plan_from(group.model_weights, chosen)

    def receive(self) -> None:
        """Nothing to do: unsharded weights are views of the buffers."""


def new_main_weight(
    layout: Layout, rank: int, dtype: torch.dtype, device: torch.device, offload: Offload | None
) -> ShardedBuffer:
    """A buffer for one rank's main weights, in host memory for offloaded weights. Effects: on the current stream."""
    numel = layout.shard_numel
    if offload is not None and device.type == "cpu":
        return ShardedBuffer(layout, rank, offload.empty(numel, dtype))
    return ShardedBuffer(layout, rank, torch.empty(numel, dtype=dtype, device=device))


def _choices(
    formats: PayloadLayouts, neighbours: Transport | None
) -> dict[tuple[Direction, Direction | None], tuple[int, ...]]:
    """The answers of `chosen`, asked for by each gather."""
    pairs = [(direction, gathered_for) for direction in Direction for gathered_for in (None, *Direction)]
    if neighbours is None:
        return {(direction, gathered_for): formats.chosen(direction, gathered_for) for direction, gathered_for in pairs}
    # The neighbours' parts are of all payloads, so the first gather takes every payload.
    everything = tuple(range(len(formats.formats)))
    return {(direction, gathered_for): () if gathered_for else everything for direction, gathered_for in pairs}


class _Borrowed:
    """The allocator of an unsharded buffer over the main weights: replicated, and in the same dtype."""

    def __init__(self, flat: torch.Tensor) -> None:
        self._flat = flat

    def create(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        # The views that `UnshardedBuffer` makes are then views of the main weights: an update needs no gather to show.
        return self._flat

    def allocate(self, buffer: torch.Tensor) -> None:
        """Nothing to do: main weights always have bytes."""

    def free(self, buffer: torch.Tensor) -> None:
        """Nothing to do: main weights stay."""
