"""Parameters of a unit that are packed into one buffer, cut where what must stay together allows: the flat layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from lamella_buffers import Allocator
from lamella_engine._offload import Offload
from lamella_engine._parameter_group import ParameterGroup
from lamella_engine._sharded_parameter import Candidate
from lamella_engine._sharding import DataAxes, Sharding, local_of
from lamella_layout import FlatLayout

# Elements. Starts and cuts are multiples of it, for the reason that even slots are: one layout serves all dtypes.
ALIGNMENT = 256


class FlatGroup(ParameterGroup):
    """Parameters of one unit in the flat layout: gathered as one payload, in place, and reduced as one.

    Gradients are copied once, into the one buffer that is reduced: autograd leaves each in memory of its own.

    Args:
        candidates: As for `ParameterGroup`, each with what of it must stay together, and so are the others.
        allocator: Gives the unsharded buffer its bytes.
        offload: Where the shards rest, if not on the device.

    Effects: those of `ParameterGroup`.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        allocator: Allocator | None,
        offload: Offload | None = None,
    ) -> None:
        axes = candidates[0].sharding.axes
        self._packed = _pack(candidates, axes)
        placed = [
            candidate._replace(sharding=_placed(candidate.sharding, self._packed, i))
            for i, candidate in enumerate(candidates)
        ]
        super().__init__(placed, allocator, offload)

    def _lay_out(self, shapes: Sequence[tuple[int, ...]], dims: Sequence[int]) -> None:
        self.main_layout = self._packed
        # Neighbouring parts of the main weights are one rank's shard in compute.
        self.layout = self._packed.merge_shards(self.axes.num_outer_shards)


def _pack(candidates: Sequence[Candidate], axes: DataAxes) -> FlatLayout:
    return FlatLayout.build(
        [local_of(candidate.parameter).shape for candidate in candidates],
        axes.num_shards * axes.num_outer_shards,
        keep=[keep for candidate in candidates if (keep := candidate.sharding.keep) is not None],
        alignment=ALIGNMENT * max(_num_per_element(candidate) for candidate in candidates),
    )


def _num_per_element(candidate: Candidate) -> int:
    """Most elements of a parameter that one of a payload stands for: starts are aligned in every payload's buffer."""
    parameter, policy = candidate.parameter, candidate.policy
    shape = local_of(parameter).shape
    formats = policy.recipe_of(policy.main_dtype_of(parameter.dtype)).payloads(shape, parameter.dtype)
    return max(-(-prod(shape) // max(1, prod(each.shape))) for each in formats)


def _placed(sharding: Sharding, layout: FlatLayout, index: int) -> Sharding:
    """How a parameter lies, which the group's packing decides."""
    return replace(sharding, placements=sharding.axes.flat_placements(layout, index))
