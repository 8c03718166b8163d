"""Runs flights in the order of events: a forward beside a backward, or all microbatches of a step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from lamella_schedule._chunk import ModelChunk
from lamella_schedule._events import Action, Event, Phase, ResidenceEvent
from lamella_schedule._flight import Around, Flight
from lamella_schedule._lanes import NOTHING, Lanes
from lamella_schedule._measure import device_of
from lamella_schedule._nodes import Values
from lamella_schedule._order import order


class Residence(Protocol):
    """Keeps the parameters of layers, and makes the parameters present for each pass.

    Events say the layer (None: the parameters around the layers), the pass, the microbatch and the lane whose stream is
    current. One pass of one microbatch acquires, uses and finishes each layer once.
    """

    def begin_step(self, num_microbatches: int) -> None:
        """Take the number of a step's microbatches, numbered from 0: `run` calls this, and `run_pair` does not."""

    def acquire(self, event: ResidenceEvent) -> None:
        """Start to make the parameters present. No slot reads the parameters before `used`."""

    def used(self, event: ResidenceEvent) -> None:
        """Make the current stream wait for the parameters. The chain orders later readers of the pass."""

    def finished(self, event: ResidenceEvent) -> None:
        """Let go of the parameters, and reduce the layer's gradients if the pass is backward.

        The current stream is ordered behind every reader of the pass, and behind every gradient.
        """

    def drop(self) -> None:
        """Let go of all parameters after an exception, without any collective; a second call changes nothing.

        Ranks without the exception would not take part in a reduction.
        """


def run(
    chunks: Sequence[ModelChunk],
    *,
    residence: Residence | None = None,
    early_release: bool = False,
    num_layers_ahead: int = 1,
    device: torch.device | str | None = None,
    around: Around | None = None,
) -> list[torch.Tensor]:
    """Run forward and backward of a step's microbatches, each forward beside the backward before, as `run_order` says.

    Gradients are added to `.grad` of parameters, in the order of the microbatches.

    Args:
        chunks: One for each microbatch. The loss is 0-D, and scaled like the gradient: divided by the
            number of microbatches for a mean.
        residence: Keeps the layers' parameters; None for parameters that are always present.
        early_release: Run the backward of `PRE` before the forward of the experts.
        num_layers_ahead: Number of layers whose parameters are acquired before their turn.
        device: The device of the tensors; None for the current accelerator, or the CPU without one.
        around: Called with each event; the event runs inside the returned context, on the event's stream.

    Under a profiler each event leaves a range `schedule::dispatch forward (layer 0)`.

    Returns:
        The losses, 0-D, detached, one for each microbatch.

    Raises:
        ValueError: No chunk, a loss other than a single 0-D tensor with a gradient, a tensor on another device of the
            same type, or a slot that writes in place to a tensor that shares memory with another input.
        TypeError: A slot returned a container of tensors.
        RuntimeError: A tensor reached a later slot by another way than as a return value.

    Effects: compute on the current stream, all-to-alls on a second stream, for which the current stream waits;
        no host sync. After an exception no tensor is held, and the residence is dropped.
    """
    if not chunks:
        raise ValueError("Expected a chunk for each microbatch, got no chunk. Give the step data.")
    for chunk in chunks:
        _ = chunk.plans  # a layer that cannot run is refused before gradients of other microbatches are added
    lanes = Lanes(device_of(device))
    losses: list[torch.Tensor] = []
    backward: Flight | None = None
    if residence is not None:
        residence.begin_step(len(chunks))
    try:
        for i in range(len(chunks) + 1):
            forward = Flight(chunks[i], lanes, i) if i < len(chunks) else None
            run_pair(
                forward,
                backward,
                residence=residence,
                early_release=early_release,
                num_layers_ahead=num_layers_ahead,
                around=around,
            )
            backward = forward
            if forward is not None:
                losses.append(_begin(forward))
    except BaseException:
        if residence is not None:
            residence.drop()  # between pairs too, where layers may stay for a backward
        raise
    return losses


def run_pair(
    forward: Flight | None,
    backward: Flight | None,
    *,
    residence: Residence | None = None,
    backward_residence: Residence | None = None,
    early_release: bool = False,
    num_layers_ahead: int = 1,
    around: Around | None = None,
) -> None:
    """Run the forward of one flight beside the backward of another, as `order` says: for drivers of pipeline stages.

    `outputs` of the flight in forward are set afterwards. The `preprocess` of a stage returns the input as a leaf with
    `requires_grad`, and the gradient is on the leaf's `.grad` after the backward.

    Args:
        forward: A new flight, or None.
        backward: A flight after `begin_backward`, or None.
        residence: The holder of the layers' parameters; None for parameters that are always present.
        backward_residence: The holder of the layers of the flight in backward, if these are of another stage than those
            in forward; None for `residence`.
        early_release: Run the backward of `PRE` before the forward of the experts.
        num_layers_ahead: Number of layers whose parameters are acquired before their turn.
        around: A function called with each event; the event runs inside the returned context.

    Raises:
        RuntimeError: A flight has run in this direction; or no gradients were given for a backward.
        ValueError: No flight, one microbatch twice, a negative `num_layers_ahead`; or the flights have different lanes.

    Effects: runs on the lanes' streams, without a host sync. An exception out of an event drops both flights and their
        residences.
    """
    flights = {flight.microbatch: flight for flight in (forward, backward) if flight is not None}
    events = order(
        None if forward is None else forward.plans,
        None if backward is None else backward.plans,
        forward_microbatch=-1 if forward is None else forward.microbatch,
        backward_microbatch=-1 if backward is None else backward.microbatch,
        early_release=early_release,
        num_layers_ahead=num_layers_ahead,
    )
    if forward is not None and backward is not None and forward.lanes is not backward.lanes:
        raise ValueError("Expected two flights over the same lanes, got two objects. Make both flights with one Lanes.")
    lanes = next(iter(flights.values())).lanes
    if forward is not None:
        forward.check_forward()
    if backward is not None:
        backward.check_backward()
    residences = {Phase.FORWARD: residence, Phase.BACKWARD: backward_residence or residence}
    try:
        lanes.begin()
        with lanes.on_compute():
            for event in events:
                if isinstance(event, Event):
                    flights[event.microbatch].run(event, around or nothing_around)
                elif (holder := residences[event.phase]) is not None:
                    with lanes.on(event.lane):
                        step_residence(holder, event)
        lanes.end()
    except BaseException:
        lanes.join()  # tensors go back to their allocator next, whichever stream reads them
        lanes.end()  # and the caller rewrites inputs next, on a stream that may be a third
        for flight in flights.values():
            flight.drop()
        for holder in residences.values():
            if holder is not None:
                holder.drop()  # a second call for one holder changes nothing
        raise


def step_residence(residence: Residence, event: ResidenceEvent) -> None:
    """Call the method of a residence that an event names."""
    if event.action is Action.ACQUIRE:
        residence.acquire(event)
    elif event.action is Action.USED:
        residence.used(event)
    else:
        residence.finished(event)


def nothing_around(event: Event) -> AbstractContextManager[object]:
    """Return a context without an effect."""
    return NOTHING


def _begin(flight: Flight) -> torch.Tensor:
    """Begin a flight's backward from its loss, and return the loss."""
    try:
        loss = loss_of(flight.outputs, flight.microbatch)
    except BaseException:
        flight.drop()
        raise
    flight.begin_backward((torch.ones_like(loss),))
    return loss.detach()


def loss_of(outputs: Values, microbatch: int) -> torch.Tensor:
    """Return the loss among a chunk's outputs.

    Raises:
        ValueError: The outputs are not a single 0-D tensor with a gradient.
    """
    loss = outputs[0] if len(outputs) == 1 else None
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0 or not loss.requires_grad:
        descriptions = [
            f"a tensor of shape {tuple(value.shape)}{'' if value.requires_grad else ' without a gradient'}"
            if isinstance(value, torch.Tensor)
            else type(value).__name__
            for value in outputs
        ]
        raise ValueError(
            "Expected postprocess to return one 0-D loss that requires a gradient, got "
            f"{', '.join(descriptions) or 'nothing'} in microbatch {microbatch}. Return the loss alone."
        )
    return loss
