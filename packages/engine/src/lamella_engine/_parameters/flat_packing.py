"""Parameters of a unit packed into one buffer, cut only between parts to be kept together: the flat layout.

Such parameters are gathered as one payload, in place, and reduced as one payload. Gradients are copied once, into the
reduction's buffer: autograd makes each in separate memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import lcm, prod

from lamella_engine._parameters.sharded_parameter import Candidate
from lamella_engine._parameters.sharding import DataAxes, Sharding, local_of
from lamella_layout import FlatLayout

# Elements. Starts and cuts are multiples, as even slots are: one layout then serves all dtypes.
ALIGNMENT = 256


def pack(candidates: Sequence[Candidate]) -> tuple[list[Candidate], FlatLayout, FlatLayout]:
    """Pack parameters, each with a `keep`, and of equal `nums_per_element`.

    Returns:
        The parameters with their placements in the packing; the layout of gathered shards, and of main weights.
    """
    axes = candidates[0].sharding.axes
    packed = _packed(candidates, axes)
    placed = [
        candidate._replace(sharding=_placed(candidate.sharding, packed, i)) for i, candidate in enumerate(candidates)
    ]
    # Neighbouring parts of the main weights together are a rank's shard in compute.
    return placed, packed.merge_shards(axes.num_outer_shards), packed


def _packed(candidates: Sequence[Candidate], axes: DataAxes) -> FlatLayout:
    return FlatLayout.build(
        [local_of(candidate.parameter).shape for candidate in candidates],
        axes.num_shards * axes.num_outer_shards,
        keep=[keep for candidate in candidates if (keep := candidate.sharding.keep) is not None],
        # Starts are aligned in every payload's buffer.
        alignment=ALIGNMENT * lcm(*nums_per_element(candidates[0])),
    )


def nums_per_element(candidate: Candidate) -> tuple[int, ...]:
    """The parameter elements for an element of each payload; equal for all parameters of one packing."""
    parameter, policy = candidate.parameter, candidate.policy
    shape = local_of(parameter).shape
    formats = policy.recipe_of(policy.main_dtype_of(parameter.dtype)).payloads(shape, parameter.dtype)
    return tuple(max(1, prod(shape) // max(1, prod(payload_format.shape))) for payload_format in formats)


def _placed(sharding: Sharding, layout: FlatLayout, index: int) -> Sharding:
    """A parameter's sharding, with placements from the group's packing."""
    return replace(sharding, placements=sharding.axes.flat_placements(layout, index))
