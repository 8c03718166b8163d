"""The listener that keeps scales of a tree's weights: measured a few units at a time, ahead of the units' gathers.

A measurement reads all main weights of its units. Of all units at once, the first gather of a pass would wait for a
read of the whole model, with no compute beside; of each unit alone, every gather would wait for a reduction. Units
measured by encodings (delayed scaling) read nothing, and come all at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

import torch

from lamella_engine._scaling.events import MeasurableWeights, ScaledGroup, ScaledParameters, WeightsChange
from lamella_engine._scaling.measuring import measure
from lamella_engine._scaling.scales import Scales
from lamella_precision import ScaledRecipe

_MOST = 8  # units: a longer read than a unit's compute would hold up the next gather


class ScaledUnit(Protocol):
    """A unit of the tree."""

    @property
    def weights(self) -> MeasurableWeights: ...


class WeightScaling:
    """Hears of needs and changes of a tree's weights, and computes scales before a gather encodes with them.

    The first gather of a forward waits for the measurement of two units; later gathers find units measured in growing
    numbers beside earlier units' compute.

    Args:
        units: The tree's, in the order of their `fully_shard` calls: equal on every rank. The tree adds to the list.
    """

    def __init__(self, units: Sequence[Callable[[], ScaledUnit | None]]) -> None:
        self._units = units
        self._num_measured = 0  # in the forward under way; `begin_pass` starts anew

    def hears(self, groups: Sequence[ScaledGroup]) -> bool:
        """Whether a recipe encodes some of the groups with scales of whole tensors."""
        return any(isinstance(group.policy.recipe, ScaledRecipe) for group in groups)

    def begin_pass(self) -> None:
        """Let scales of all units at rest expire: main weights may have been written by anyone, with no event."""
        # The next forward begins with few units again: its first gather must not wait for a long measurement.
        self._num_measured = 0
        for weights in self._at_rest():
            _expire(weights.parameters)

    def weights_needed(self, weights: MeasurableWeights, *, is_in_pass: bool = False) -> None:
        """Compute the due scales of a unit about to be gathered; in a pass also some further units'.

        Effects: those of `measure`; none with scales at hand.
        """
        if not _are_due(weights):
            return
        if not is_in_pass:
            measure([weights])
        elif weights.will_be_encoded:  # else earlier encodings serve this pass
            self._measure_with_others(weights)

    def weights_changed(
        self, weights: MeasurableWeights, change: WeightsChange, replaced: Collection[int] = ()
    ) -> None:
        """Take a change of main weights into account.

        Effects: those of `_forget_past` and `_forget_measured`, before weights are replaced and before a replay.
        """
        if change is WeightsChange.UNSEEN:
            _expire(weights.parameters)
        elif change is WeightsChange.UPDATED:
            for scales in scales_of(weights.parameters):
                scales.note_update()
        elif change is WeightsChange.REPLACED:
            _forget_past(weights.parameters, replaced)
        else:
            _forget_measured(weights.parameters)

    def compute_measured(self) -> None:
        """Compute scales that are due of units at rest, where encodings have measured.

        Effects: those of `measure`; none without delayed scaling.
        """
        at_rest = self._at_rest()
        for weights in at_rest:
            _expire(weights.parameters)
        if due := [weights for weights in at_rest if _are_due(weights) and _are_measured(weights)]:
            measure(due)

    def _measure_with_others(self, weights: MeasurableWeights) -> None:
        # In the order of `fully_shard` calls, equal on every rank, from facts that follow from the program: the MAX
        # reduction must have the same members everywhere.
        candidates = [
            weights,
            *(other for other in self._at_rest() if _are_due(other) and other is not weights),
        ]
        read = [candidate for candidate in candidates if not _are_measured(candidate)]
        due = read[: min(max(self._num_measured, 2), _MOST)]
        self._num_measured += len(due)
        measure([*due, *(candidate for candidate in candidates if _are_measured(candidate))])

    def _at_rest(self) -> list[MeasurableWeights]:
        living = [unit.weights for reference in self._units if (unit := reference()) is not None]
        # A unit in use keeps the scales of its encoded payloads: backward decodes with the same scales.
        return [weights for weights in living if self in weights.parameters.listeners and weights.will_be_encoded]


def scales_of(parameters: ScaledParameters) -> list[Scales]:
    """The scales of whole tensors, of a unit's groups that have some."""
    return [group.scales for group in parameters.groups if group.scales is not None]


def _are_due(weights: MeasurableWeights) -> bool:
    """Whether the next gather needs scales anew."""
    return any([scales.are_due for scales in scales_of(weights.parameters)])


def _are_measured(weights: MeasurableWeights) -> bool:
    """Whether no scales that are due need a read of main weights: encodings have measured them."""
    return all([scales.are_measured for scales in scales_of(weights.parameters) if scales.are_due])


def _expire(parameters: ScaledParameters) -> None:
    for scales in scales_of(parameters):
        scales.expire()


def _forget_past(parameters: ScaledParameters, replaced: Collection[int]) -> None:
    """Let delayed scales of parameters start anew from the caller's next values.

    A scale of the values before may saturate the new ones, in every pass until the next write.

    Effects: on the gather stream, which the compute stream then waits for; nothing without delayed scaling.
    """
    delayed = [(group, scales) for group in parameters.groups if (scales := group.scales) and scales.num_past]
    if not delayed:
        return
    streams = parameters.context.streams
    with streams.on(streams.all_gather_stream):
        for group, scales in delayed:
            _forget(scales, group, replaced)
    # The caller writes the new values on the compute stream, and may read scales there (`scaling_state`).
    streams.compute_stream.wait_stream(streams.all_gather_stream)


def _forget(scales: Scales, group: ScaledGroup, replaced: Collection[int]) -> None:
    for i, parameter in enumerate(group.parameters):
        if id(parameter.sharded) in replaced:
            scales.forget(i)


def _forget_measured(parameters: ScaledParameters) -> None:
    """Drop amaxes that passes since the last update have measured; the next pass measures the same weights again.

    A replay of a captured step, whose amaxes always count for the step before, would take the amaxes in twice.

    Effects: on the gather stream, which the compute stream then waits for; none where an update waits for its scales,
        and without delayed scaling.
    """
    amaxes = _amaxes_of_passes(scales_of(parameters))
    if not amaxes:
        return
    streams = parameters.context.streams
    with streams.on(streams.all_gather_stream):
        # On the stream whose encodings raise the amaxes: elsewhere an encoding in flight could add to zeroed ones.
        torch._foreach_zero_(amaxes)
    streams.compute_stream.wait_stream(streams.all_gather_stream)


def _amaxes_of_passes(several: Iterable[Scales]) -> list[torch.Tensor]:
    return [scales.amaxes for scales in several if scales.num_past and not scales.are_due]
