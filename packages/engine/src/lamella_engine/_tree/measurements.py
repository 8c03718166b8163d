"""Scales of whole tensors, measured a few units at a time, ahead of the units' gathers.

A measurement reads all main weights of its units. Of all units at once, the first gather of a pass would wait for a
read of the whole model, with no compute beside; of each unit alone, every gather would wait for a reduction. Units that
encodings have measured (delayed scaling) read nothing, and come all at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from lamella_engine._unit.unit import Unit
from lamella_engine._unit.weights import UnitWeights, measure

_MOST = 8  # units: a longer read than a unit's compute would hold up the next gather


class Measurements:
    """The measurements of a tree's forward passes.

    The first gather waits for two units; later ones find units measured in growing numbers beside earlier units'
    compute.

    Args:
        units: The tree's, in the order of their `fully_shard` calls: equal on every rank.
    """

    def __init__(self, units: Sequence[weakref.ref[Unit]]) -> None:
        self._units = units
        self._num_measured = 0

    def begin_pass(self) -> None:
        """Let scales of all units at rest expire: main weights may have been written by anyone, with no event."""
        self._num_measured = 0
        for weights in self._at_rest():
            weights.expire_scales()

    def before_gather_of(self, unit: Unit) -> None:
        """Compute the scales of a unit that is about to be gathered, and of some others; nothing with scales at hand.

        Args:
            unit: One that `has_scales`.

        Effects: those of `measure`.
        """
        if unit.weights.awaits_scales and unit.weights.may_be_measured:
            later_weights = [
                weights for weights in self._at_rest() if weights.awaits_scales and weights is not unit.weights
            ]
            read = [weights for weights in (unit.weights, *later_weights) if not weights.are_measured]
            due = read[: min(max(self._num_measured, 2), _MOST)]
            self._num_measured += len(due)
            measure([*due, *(weights for weights in (unit.weights, *later_weights) if weights.are_measured)])

    def compute_measured(self) -> None:
        """Compute scales that are due of units at rest, where encodings have measured.

        Effects: those of `measure`; none without delayed scaling.
        """
        at_rest = self._at_rest()
        for weights in at_rest:
            weights.expire_scales()
        if due := [
            unit_weights for unit_weights in at_rest if unit_weights.awaits_scales and unit_weights.are_measured
        ]:
            measure(due)

    def _at_rest(self) -> list[UnitWeights]:
        living = [unit for ref in self._units if (unit := ref()) is not None]
        return [unit.weights for unit in living if unit.parameters.has_scales and unit.weights.may_be_measured]
