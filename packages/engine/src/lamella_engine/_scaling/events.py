"""The two events of a unit's weights: weights needed, weights changed; and a listener's view of the unit.

A unit raises both events and knows no listener: `UnitParameters.listeners` is empty for a unit whose weights are
not encoded with scales, and the events cost the unit nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from enum import Enum
from typing import Protocol

import torch

from lamella_buffers import ShardedBuffer, Transport
from lamella_engine._scaling.scales import Scales
from lamella_engine._streams.context import Context
from lamella_precision import MixedPrecisionPolicy


class WeightsChange(Enum):
    """The kind of a change of main weights."""

    UNSEEN = "anyone may have written main weights, with no event"
    UPDATED = "an optimizer has stepped, or `mark_updated` was called"
    REPLACED = "the caller is about to write other values, of another training or moment"
    REPLAYED = "a captured step is about to be replayed, with its own measurements of the weights before"


class ScaledParameter(Protocol):
    """A parameter in its sharded form."""

    @property
    def sharded(self) -> torch.Tensor: ...


class ScaledGroup(Protocol):
    """A group of parameters, for measurements."""

    @property
    def parameters(self) -> Sequence[ScaledParameter]: ...

    @property
    def policy(self) -> MixedPrecisionPolicy: ...

    @property
    def scales(self) -> Scales | None:
        """The scales of whole parameters; None for a recipe without."""

    @property
    def axes(self) -> Hashable:
        """Equal for groups whose measurements travel together."""

    @property
    def shard_and_outer(self) -> tuple[Transport, Transport | None]:
        """The axes that main weights are sharded over."""

    @property
    def is_offloaded(self) -> bool:
        """Whether main weights rest on the CPU; each measurement then reads another copy."""

    def main_weight_on_device(self) -> ShardedBuffer:
        """The main weights on the device of gathers: the group's own memory, or a copy of offloaded weights."""


class ScaledParameters(Protocol):
    """The parameters of a unit, for measurements."""

    @property
    def name(self) -> str: ...

    @property
    def groups(self) -> Sequence[ScaledGroup]: ...

    @property
    def listeners(self) -> Sequence[WeightsListener]: ...

    @property
    def context(self) -> Context: ...

    @property
    def is_offloaded(self) -> bool: ...

    def check_order(self, verb: str, nbytes: Callable[[], int]) -> None:
        """Refuse a collective that other ranks are not about to begin."""


class MeasurableWeights(Protocol):
    """The weights of a unit, for measurements."""

    @property
    def parameters(self) -> ScaledParameters: ...

    @property
    def will_be_encoded(self) -> bool:
        """Whether main weights are encoded before the next use, and nothing uses earlier encodings."""


class WeightsListener(Protocol):
    """Hears of needs and changes of units' weights, on every rank at the same points of the program."""

    def hears(self, groups: Sequence[ScaledGroup]) -> bool:
        """Whether the events of a unit with some groups concern the listener."""

    def weights_needed(self, weights: MeasurableWeights, *, is_in_pass: bool = False) -> None:
        """A gather from main weights is about to begin.

        Args:
            weights: The weights of the unit to be gathered.
            is_in_pass: The unit's turn in a forward pass has come or comes next; else the gather stands alone, as
                between passes, or completes a pass.
        """

    def weights_changed(
        self, weights: MeasurableWeights, change: WeightsChange, replaced: Collection[int] = ()
    ) -> None:
        """Main weights of a unit have changed, may have changed, or are about to.

        Args:
            weights: The weights of the unit.
            change: The kind of the change.
            replaced: Ids of the replaced sharded parameters.
        """
