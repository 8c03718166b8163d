"""State shared by the units of one tree while they run: streams, the phase of the step, the check of the order."""

from __future__ import annotations

from enum import Enum

import torch

from lamella_engine._streams.order_check import OrderCheck
from lamella_engine._streams.streams import Streams


class PassPhase(Enum):
    """The pass under way in a tree. Between passes only shards hold memory, except in units that were asked to stay."""

    RESTING = "resting"
    FORWARD = "forward"
    BACKWARD = "backward"


class Context:
    """Shared by all units of a tree, and by the parts of each unit.

    Args:
        device: The device of the tree's parameters while they are used.

    Attributes:
        streams: The tree's streams, and the work in flight on them.
        phase: The pass under way.
        is_last_backward: Whether the backward under way, or the next one, is the step's last.
        max_reductions_in_flight: The largest number asked for by a unit of the tree, as of the backward under way.
        order_check: Compares the order of collectives between ranks, if the options ask for the check.
    """

    def __init__(self, device: torch.device) -> None:
        self.streams = Streams(device)
        # Within a pass gathers rely on the wait at its beginning: rule 1 of Note [Streams].
        self.phase = PassPhase.RESTING
        # Written by `StepEnd` alone, from announcements that every rank makes alike: ranks that differ in it would
        # reduce different gradients.
        self.is_last_backward = True
        self.max_reductions_in_flight = 1  # fixed during a backward: the bound on unreduced gradients' bytes
        self.order_check: OrderCheck | None = None

    @property
    def is_resting(self) -> bool:
        """Whether no pass is under way."""
        return self.phase is PassPhase.RESTING

    @property
    def is_in_backward(self) -> bool:
        """Whether the pass under way is a backward."""
        return self.phase is PassPhase.BACKWARD
