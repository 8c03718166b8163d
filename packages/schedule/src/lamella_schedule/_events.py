"""The events of a schedule: work of a layer's slots, and the residence of the layer's parameters."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Slot(StrEnum):
    """A part of a layer, or of a chunk around its layers, in the order of forward."""

    PREPROCESS = "preprocess"
    """Before the first layer: embedding. Of the chunk."""
    PRE = "pre"
    """Attention, norm, shared experts, router: all work before tokens leave the rank."""
    DISPATCH = "dispatch"
    """The all-to-all to the experts."""
    EXPERTS = "experts"
    """The routed experts, or a dense MLP."""
    COMBINE = "combine"
    """The all-to-all back, the residual connection, the final norm."""
    POST = "post"
    """After the tokens are back: the end of a multi-token-prediction layer."""
    POSTPROCESS = "postprocess"
    """After the last layer: output layer and loss. Of the chunk."""


class Kind(StrEnum):
    """The work of a slot in an event."""

    FORWARD = "forward"
    BACKWARD = "backward"
    """Autograd's part of the backward: gradients of inputs, and of weights without delay."""
    WEIGHT_GRADIENT = "weight gradient"
    """The delayed gradients of the slot's weights."""


class Lane(StrEnum):
    """A stream of work, which runs in order. Work of different lanes overlaps.

    Slots run on the first two. The other lanes are those of priced events in a simulation: gathers and reductions of
    parameters, and messages to other stages.
    """

    COMPUTE = "compute"
    COMMUNICATION = "communication"
    GATHER = "gather"
    REDUCE = "reduce"
    SEND = "send"


class Phase(StrEnum):
    """The pass that needs the parameters of a layer."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Action(StrEnum):
    """A step in a layer's residence."""

    ACQUIRE = "acquire"
    """The parameters will be read soon: a gather may start."""
    USED = "used"
    """The next event of the lane reads the parameters: the lane's stream must wait for the gather."""
    FINISHED = "finished"
    """The lane's stream is behind the last reader of the phase, and in backward behind all gradients of the layer."""


_COMMUNICATION = frozenset((Slot.DISPATCH, Slot.COMBINE))
LAYER_SLOTS = (Slot.PRE, Slot.DISPATCH, Slot.EXPERTS, Slot.COMBINE, Slot.POST)
DELAYABLE = frozenset((Slot.PRE, Slot.EXPERTS))


@dataclass(frozen=True, slots=True)
class Event:
    """One kind of work of one slot of one microbatch.

    Attributes:
        microbatch: Index in the step.
        layer: Index in the chunk; None for the slots around the layers.
        slot: The slot.
        kind: Forward, backward or delayed weight gradients.
        stage: The pipeline stage of the chunk; 0 without pipeline stages.
    """

    microbatch: int
    layer: int | None
    slot: Slot
    kind: Kind
    stage: int = 0

    @property
    def lane(self) -> Lane:
        """The lane of the work."""
        return Lane.COMMUNICATION if self.slot in _COMMUNICATION else Lane.COMPUTE

    @property
    def phase(self) -> Phase:
        """The pass of the work."""
        return Phase.FORWARD if self.kind is Kind.FORWARD else Phase.BACKWARD

    def __str__(self) -> str:
        layer = "" if self.layer is None else f" layer {self.layer}"
        return f"microbatch {self.microbatch}{layer} {self.slot} {self.kind}"


@dataclass(frozen=True, slots=True)
class ResidenceEvent:
    """A step in the residence of a layer's parameters, for one pass of one microbatch.

    Attributes:
        microbatch: Index in the step.
        layer: Index in the chunk; None for the parameters around the layers (embedding, final norm, output layer).
        phase: The pass that reads the parameters.
        action: The step.
        lane: The lane whose stream is current.
        stage: The pipeline stage of the chunk; 0 without pipeline stages.
    """

    microbatch: int
    layer: int | None
    phase: Phase
    action: Action
    lane: Lane
    stage: int = 0

    def __str__(self) -> str:
        owner = "around the layers" if self.layer is None else f"layer {self.layer}"
        return f"microbatch {self.microbatch} {owner} {self.action} for {self.phase}"


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """The slots of a layer, and the slots with delayed weight gradients.

    Attributes:
        slots: `PRE` and `EXPERTS` at least. A dense layer has neither `DISPATCH` nor `COMBINE`.
        delayed: Among `PRE` and `EXPERTS`.

    Raises:
        ValueError: `pre` or `experts` is missing, or a slot is not a layer's.
    """

    slots: frozenset[Slot] = frozenset((Slot.PRE, Slot.DISPATCH, Slot.EXPERTS, Slot.COMBINE))
    delayed: frozenset[Slot] = DELAYABLE

    def __post_init__(self) -> None:
        if not DELAYABLE <= self.slots <= set(LAYER_SLOTS):
            raise ValueError(
                f"Expected slots of a layer (pre, experts; maybe dispatch, combine, post), got {_names(self.slots)}. "
                "Leave preprocess and postprocess to the chunk."
            )
        if not self.delayed <= DELAYABLE:
            raise ValueError(
                f"Expected delayed weight gradients in pre and experts alone, got {_names(self.delayed)}. Other slots "
                "compute weight gradients in their backward."
            )

    @property
    def forward_order(self) -> tuple[Slot, ...]:
        """The slots in the order of forward."""
        return tuple(slot for slot in LAYER_SLOTS if slot in self.slots)


def _names(slots: frozenset[Slot]) -> str:
    return ", ".join(slot for slot in Slot if slot in slots) or "none"
