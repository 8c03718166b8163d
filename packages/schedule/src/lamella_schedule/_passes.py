"""The events of a pipeline: passes of a microbatch through a stage, and messages between stages."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeAlias

from lamella_schedule._events import Event, Lane, Phase, ResidenceEvent


class PassKind(StrEnum):
    """The work of a pass."""

    FORWARD = "forward"
    BACKWARD = "backward"
    """The whole backward: gradients of inputs and of weights."""
    INPUT_GRADIENT = "input gradient"
    """The part of the backward that the stage before waits for: `BACKWARD` without delayed weight gradients."""
    WEIGHT_GRADIENT = "weight gradient"
    """The delayed weight gradients, at any time after the `INPUT_GRADIENT` of the microbatch."""


_LETTERS: Final = {
    PassKind.FORWARD: "F",
    PassKind.BACKWARD: "B",
    PassKind.INPUT_GRADIENT: "I",
    PassKind.WEIGHT_GRADIENT: "W",
}


_BESIDE_FORWARD: Final = (PassKind.BACKWARD, PassKind.INPUT_GRADIENT)


@dataclass(frozen=True, slots=True)
class StagePass:
    """One kind of work of a stage on a microbatch. As text in torch's form: `2F0` is stage 2's forward of 0.

    Attributes:
        stage: Index in the pipeline, from the input on.
        kind: Forward, backward, or one of the backward's two parts.
        microbatch: Index in the step.
    """

    stage: int
    kind: PassKind
    microbatch: int

    @property
    def layer(self) -> None:
        """None: the parameters of a pass in one piece are the stage's."""
        return

    @property
    def phase(self) -> Phase:
        """The pass for residence and messages: all but `FORWARD` are backward."""
        return Phase.FORWARD if self.kind is PassKind.FORWARD else Phase.BACKWARD

    @property
    def lane(self) -> Lane:
        """Compute."""
        return Lane.COMPUTE

    @property
    def sends(self) -> bool:
        """Whether another stage waits for the pass: for all but weight gradients."""
        return self.kind is not PassKind.WEIGHT_GRADIENT

    def __str__(self) -> str:
        return f"{self.stage}{_LETTERS[self.kind]}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class PassPair:
    """A forward beside the backward of another stage or microbatch, as `order` runs two chunks.

    Attributes:
        forward: The forward.
        backward: A whole backward, or the part for the inputs.

    Raises:
        ValueError: The passes are of other kinds.
    """

    forward: StagePass
    backward: StagePass

    def __post_init__(self) -> None:
        if self.forward.kind is not PassKind.FORWARD or self.backward.kind not in _BESIDE_FORWARD:
            raise ValueError(
                f"Expected a forward and a backward or input gradient, got {self}. List other passes one by one."
            )

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})"


PassOrPair: TypeAlias = StagePass | PassPair


def passes_in(item: PassOrPair) -> tuple[StagePass, ...]:
    """The passes of a pair, or the pass itself."""
    return (item.forward, item.backward) if isinstance(item, PassPair) else (item,)


class TransferAction(StrEnum):
    """A rank's part in a message."""

    SEND = "send"
    """The values are complete on the sender's compute stream: the message may leave."""
    RECEIVE = "receive"
    """The receiver's memory may be filled. The receiving pass waits for the message, not the lane."""


@dataclass(frozen=True, slots=True)
class TransferEvent:
    """One end of a message between two ranks: values in forward, gradients in backward.

    Attributes:
        stage: The stage on this rank.
        microbatch: Index in the step.
        phase: Forward for the values of a stage's end, backward for their gradients.
        action: Send or receive.
        peer: The rank at the other end.
    """

    stage: int
    microbatch: int
    phase: Phase
    action: TransferAction
    peer: int

    @property
    def receiver(self) -> int:
        """The stage that reads the message."""
        if self.action is TransferAction.RECEIVE:
            return self.stage
        return self.stage + (1 if self.phase is Phase.FORWARD else -1)

    def __str__(self) -> str:
        letter = "F" if self.phase is Phase.FORWARD else "B"
        return f"{self.stage}{self.action.upper()}_{letter}{self.microbatch}"


WorkEvent: TypeAlias = Event | StagePass
PipelineEvent: TypeAlias = WorkEvent | ResidenceEvent | TransferEvent
