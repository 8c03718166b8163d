"""Measurements of main weights, and the scales computed from them: one reduction for all groups on the same axes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from lamella_engine._common.labels import label
from lamella_engine._scaling.events import MeasurableWeights, ScaledGroup
from lamella_engine._scaling.scales import Scales, joined, rescale
from lamella_precision import ScaledRecipe


def measure(units: Sequence[MeasurableWeights]) -> None:
    """Compute the scales of whole tensors of some units, for the gathers of this pass.

    Args:
        units: Weights of units of one tree, at least one; each with scales, and one that `will_be_encoded` or is about
            to be gathered.

    Effects: on the gather stream: reads the main weights not yet measured by encodings, and a MAX all-reduce
        for all units on the same axes; blocks the host on gloo.
    """
    scaled = [unit.parameters for unit in units]
    first, streams = scaled[0], scaled[0].context.streams
    streams.reads_shards |= any(parameters.is_offloaded for parameters in scaled)
    groups = [group for parameters in scaled for group in parameters.groups]
    first.check_order("measure", lambda: sum(group.scales.amaxes.nbytes for group in groups if group.scales))
    # On the stream of the gathers, which encode with the scales next: no second stream reads or writes scales.
    # Inside a transform of `torch.func` writes of scales would count as the transformed function's.
    with label("measure", first.name), streams.on(streams.all_gather_stream), temporarily_clear_interpreter_stack():
        _refresh(groups)


def _refresh(groups: Iterable[ScaledGroup]) -> None:
    """Measure main weights, and compute scales of whole parameters; nothing for groups whose scales are not due.

    Effects: on the current stream: a MAX all-reduce for all groups on the same axes, on the shard axis and on the outer
        axis, and a computation for all of a recipe. Blocks the host on gloo.
    """
    scaled = [(group, group.scales) for group in groups if group.scales is not None and group.scales.are_due]
    together: dict[Hashable, dict[ScaledRecipe, list[Scales]]] = {}
    for group, scales in scaled:
        if not scales.are_measured:
            # Lasting memory is measured by arguments made once; each copy of offloaded weights is new memory.
            scales.measure(group.main_weight_on_device(), stays=not group.is_offloaded)
        together.setdefault(group.axes, {}).setdefault(scales.recipe, []).append(scales)
    transports = {group.axes: group.shard_and_outer for group, _ in scaled}
    for axes, by_recipe in together.items():
        amaxes = joined([scales.amaxes for scales_of_recipe in by_recipe.values() for scales in scales_of_recipe])
        # Bits of non-negative numbers have the order of the numbers, and NaN's come last: a MAX of floats may drop NaN,
        # by the order of the ranks. A NaN of torch's CPU kernels has a sign, with which its bits would come first.
        bits = amaxes.view(torch.int32).bitwise_and_(0x7FFFFFFF)
        for transport in transports[axes]:
            if transport is not None:
                transport.all_reduce([bits], dist.ReduceOp.MAX).wait()
        numels = [sum(len(scales.amaxes) for scales in scales_of_recipe) for scales_of_recipe in by_recipe.values()]
        for scales_of_recipe, recipe_amaxes in zip(by_recipe.values(), torch.split(amaxes, numels), strict=True):
            rescale(scales_of_recipe, recipe_amaxes)
    for _, scales in scaled:
        scales.note_computed()
    torch._foreach_zero_([scales.amaxes for _, scales in scaled])  # measurements and encodings raise them
