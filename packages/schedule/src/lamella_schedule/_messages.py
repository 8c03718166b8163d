"""Values and gradients on their way between the stages of a pipeline: by messages, or on the rank itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist

from lamella_schedule._events import Phase
from lamella_schedule._passes import TransferEvent

Tensors: TypeAlias = tuple[torch.Tensor, ...]
Address: TypeAlias = tuple[int, int, Phase]  # receiving stage, microbatch, phase


class Mail:
    """The values and gradients that a rank's stages send and receive in one step.

    Values go down the stages, and gradients of the values with a floating dtype go up.

    Args:
        borders: Tensors with the shape and dtype of the values between two stages, on any device.
        group: The ranks of the pipeline, in the order of the pipeline; None for all ranks.
        device: The device of the values.
    """

    def __init__(self, borders: Sequence[torch.Tensor], group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.borders = borders
        self._group, self._device = group, device
        self._rank = dist.get_rank(group)
        self._values: dict[Address, Tensors] = {}
        self._works: dict[Address, list[dist.Work]] = {}
        self._sent: list[tuple[list[dist.Work], Tensors]] = []

    def put(self, address: Address, values: Tensors) -> None:
        """Keep the values of a pass until `send`, or until a stage of this rank takes them.

        Raises:
            ValueError: Number, shape or dtype are not those of the borders.
        """
        stage, microbatch, phase = address
        borders = self._crossing(phase)
        shown = [(tuple(tensor.shape), tensor.dtype) for tensor in values]
        expected = [(tuple(tensor.shape), tensor.dtype) for tensor in borders]
        if shown != expected:
            raise ValueError(
                f"Expected values like the borders, {_text(expected)}, for stage {stage} and microbatch {microbatch} "
                f"in {phase}, got {_text(shown)}. Give borders with the shape and dtype of the stages' outputs."
            )
        self._values[address] = values

    def take(self, address: Address) -> Tensors:
        """Return the values for a pass.

        Effects: the current stream waits for the message; with gloo the host does.
        """
        for work in self._works.pop(address, ()):
            work.wait()
        return self._values.pop(address)

    def send(self, event: TransferEvent) -> None:
        """Send the values of a pass.

        Effects: point-to-point on the group, after the current stream's work so far; keeps the values until they have
            left.
        """
        address = event.receiver, event.microbatch, event.phase
        values = tuple(tensor.detach().contiguous() for tensor in self._values.pop(address))
        self._sent = [message for message in self._sent if not all(work.is_completed() for work in message[0])]
        works = [
            _work(dist.isend(tensor, group=self._group, group_dst=event.peer, tag=self._tag(address, i)))
            for i, tensor in enumerate(values)
        ]
        self._sent.append((works, values))

    def receive(self, event: TransferEvent) -> None:
        """Allocate the values of a message, and start to fill them.

        Effects: point-to-point on the group.
        """
        address = event.receiver, event.microbatch, event.phase
        self._values[address] = tuple(
            torch.empty(border.shape, dtype=border.dtype, device=self._device) for border in self._crossing(event.phase)
        )
        self._works[address] = [
            _work(dist.irecv(tensor, group=self._group, group_src=event.peer, tag=self._tag(address, i)))
            for i, tensor in enumerate(self._values[address])
        ]

    def finish(self) -> None:
        """Wait until all values have left, as `take` waits."""
        for works, _ in self._sent:
            for work in works:
                work.wait()
        self._sent.clear()

    def _crossing(self, phase: Phase) -> list[torch.Tensor]:
        """The borders of a phase: gradients are of floating tensors."""
        return [border for border in self.borders if phase is Phase.FORWARD or border.is_floating_point()]

    def _tag(self, address: Address, i: int) -> int:
        """A number of the message's own: gloo may deliver messages to different passes in any order."""
        stage, microbatch, phase = address
        return ((microbatch * 4096 + stage) * 2 + (phase is Phase.BACKWARD)) * len(self.borders) + i


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None, "the rank is in the group"
    return work


def _text(tensors: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> str:
    return ", ".join(f"{shape} of {dtype}" for shape, dtype in tensors) or "no tensor"
