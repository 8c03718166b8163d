"""Runs an order of events over the slots of layers: a pair of chunks, or all microbatches of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, cast

import torch
from torch.profiler import record_function

from lamella_schedule._events import Action, Event, Kind, LayerPlan, ResidenceEvent, Slot
from lamella_schedule._lanes import Chain, Lanes
from lamella_schedule._measure import device_of
from lamella_schedule._nodes import Gradients, Node, SlotFunction, Values
from lamella_schedule._order import order

Around: TypeAlias = Callable[[Event], AbstractContextManager[object]]

_is_profiled = torch._C._autograd._profiler_enabled
_NOTHING = nullcontext()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSlots:
    """A layer in parts. The layer is the composition of its slots.

    Each function takes the values returned by the function before, tensors or other objects, and returns a tensor or a
    flat tuple. A tensor for a later slot (the residual) is returned untouched by each slot in between, without a
    copy. Return tensors themselves: tensors inside other objects, and tensors that a function finds in its
    closure, are not marked as read by the second stream. For such a tensor call `tensor.record_stream` in the function.

    Attributes:
        pre: Before the tokens leave the rank.
        dispatch: The all-to-all to the experts; None for a dense layer.
        experts: The experts, or the MLP of a dense layer.
        combine: The all-to-all back; None for a dense layer.
        post: After the tokens are back.
        delayed: For `Slot.PRE` and `Slot.EXPERTS`: computes the weight gradients left out by the slot's backward,
            and adds the gradients to `.grad`. Called once a backward, on the compute stream.

    Raises:
        ValueError: `delayed` has another slot.
    """

    pre: SlotFunction
    experts: SlotFunction
    dispatch: SlotFunction | None = None
    combine: SlotFunction | None = None
    post: SlotFunction | None = None
    delayed: Mapping[Slot, Callable[[], object]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _ = self.plan  # refuses other slots here, not in the middle of a step

    @property
    def functions(self) -> dict[Slot, SlotFunction]:
        """The functions of the layer's slots, in the order of forward."""
        slots = {
            Slot.PRE: self.pre,
            Slot.DISPATCH: self.dispatch,
            Slot.EXPERTS: self.experts,
            Slot.COMBINE: self.combine,
            Slot.POST: self.post,
        }
        return {slot: function for slot, function in slots.items() if function is not None}

    @property
    def plan(self) -> LayerPlan:
        """The layer, for `order`."""
        return LayerPlan(frozenset(self.functions), frozenset(self.delayed))


@dataclass(frozen=True, slots=True)
class Chunk:
    """A model, or a stage of a pipeline, applied to a microbatch.

    Attributes:
        preprocess: Takes nothing; returns the values for the first layer: the embedding of this microbatch.
        layers: The layers.
        postprocess: Takes the values of the last layer; returns the loss, 0-D, or the output of the stage.
    """

    preprocess: SlotFunction
    layers: Sequence[LayerSlots]
    postprocess: SlotFunction

    @property
    def plans(self) -> list[LayerPlan]:
        """The layers, for `order`."""
        return [layer.plan for layer in self.layers]

    @property
    def functions(self) -> Iterator[tuple[int | None, Slot, SlotFunction]]:
        """Each function with its layer and slot, in the order of forward."""
        yield None, Slot.PREPROCESS, self.preprocess
        for i, layer in enumerate(self.layers):
            for slot, function in layer.functions.items():
                yield i, slot, function
        yield None, Slot.POSTPROCESS, self.postprocess


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


class Flight:
    """One chunk on its way through forward and backward: its nodes, and the values or gradients at its head.

    Args:
        chunk: The chunk.
        lanes: The streams; the same for flights that run together.
        microbatch: Index of the microbatch, for events and errors.
    """

    def __init__(self, chunk: Chunk, lanes: Lanes, microbatch: int = 0) -> None:
        self.plans = chunk.plans
        self.lanes = lanes
        self.microbatch = microbatch
        self._chain = Chain(lanes)
        self._delayed: dict[tuple[int | None, Slot], Callable[[], object]] = {
            (i, slot): call for i, layer in enumerate(chunk.layers) for slot, call in layer.delayed.items()
        }
        self._nodes = {
            (i, slot): Node(function, f"slot {slot}{_of_layer(i)} of microbatch {microbatch}", lanes)
            for i, slot, function in chunk.functions
        }
        self._at_head: Values = ()
        self._num_backwards = 0

    @property
    def outputs(self) -> Values:
        """Values returned by postprocess, detached; empty before the end of forward, and once backward has begun."""
        is_whole = all(node.has_run for node in self._nodes.values())
        return self._at_head if is_whole and not self._num_backwards else ()

    def begin_backward(self, gradients: Gradients) -> None:
        """Give the gradients of `outputs`, before the pair with this flight's backward.

        Raises:
            RuntimeError: Forward is not over, or backward has begun.
            ValueError: More or fewer gradients than outputs, a gradient of another shape than the output, or a gradient
                of an output without `requires_grad`.
        """
        if not self.outputs:
            raise RuntimeError(
                f"Expected gradients of microbatch {self.microbatch} once and after its forward, got others. "
                "Run a pair with the flight in forward first."
            )
        if len(gradients) != len(self._at_head):
            raise ValueError(
                f"Expected a gradient or None for each of the {len(self._at_head)} outputs, got {len(gradients)}. Give "
                "as many."
            )
        for place, (output, gradient) in enumerate(zip(self._at_head, gradients, strict=True)):
            _check_gradient(output, gradient, f"output {place} of microbatch {self.microbatch}")
        self._num_backwards += 1
        self._at_head = gradients

    def check_forward(self) -> None:
        """Refuse a second forward."""
        if any(node.has_run for node in self._nodes.values()) or not self._nodes:
            raise RuntimeError(
                f"Expected a flight that has not run, got microbatch {self.microbatch} a second time in forward. Make "
                "a flight for each pass."
            )

    def check_backward(self) -> None:
        """Refuse a backward without gradients."""
        if not self._num_backwards or not self._nodes:
            raise RuntimeError(
                f"Expected a flight that waits for its backward, got microbatch {self.microbatch}, which has no "
                "gradients or is over. Call begin_backward after the forward."
            )

    def run(self, event: Event, around: Around) -> None:
        """Run one event on its lane."""
        # Delayed weight gradients are outside the chain: Note [Waits].
        is_delayed = event.kind is Kind.WEIGHT_GRADIENT
        on_lane = self.lanes.on(event.lane) if is_delayed else self._chain.on(event.lane)
        with on_lane, _label(event), around(event):
            if is_delayed:
                self._delayed[event.layer, event.slot]()
            elif event.kind is Kind.FORWARD:
                self._at_head = self._nodes[event.layer, event.slot].forward(self._at_head)
            else:
                self._at_head = self._nodes.pop((event.layer, event.slot)).backward(cast(Gradients, self._at_head))

    def drop(self) -> None:
        """Let go of all tensors."""
        for node in self._nodes.values():
            node.drop()
        self._nodes.clear()
        self._delayed.clear()
        self._at_head = ()


def run(
    chunks: Sequence[Chunk],
    *,
    residence: Residence | None = None,
    early_release: bool = False,
    ahead: int = 1,
    device: torch.device | str | None = None,
    around: Around | None = None,
) -> list[torch.Tensor]:
    """Run forward and backward of a step's microbatches, each forward beside the backward before, as `run_order` says.

    Gradients are added to `.grad` of parameters, in the order of the microbatches.

    Args:
        chunks: One for each microbatch. The loss is 0-D, and scaled like the gradient: divided by the
            number of microbatches for a mean.
        residence: Keeps the layers' parameters; None for parameters that are always present.
        early_release: As in `order`.
        ahead: As in `order`.
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
                ahead=ahead,
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
    early_release: bool = False,
    ahead: int = 1,
    around: Around | None = None,
) -> None:
    """Run the forward of one flight beside the backward of another, as `order` says: for drivers of pipeline stages.

    `outputs` of the flight in forward are set afterwards. The `preprocess` of a stage returns the input as a leaf with
    `requires_grad`, and the gradient is on the leaf's `.grad` after the backward.

    Args:
        forward: A new flight, or None.
        backward: A flight after `begin_backward`, or None.
        residence: As in `run`.
        early_release: As in `order`.
        ahead: As in `order`.
        around: As in `run`.

    Raises:
        RuntimeError: A flight has run in this direction; or no gradients were given for a backward.
        ValueError: As of `order`; or the flights have different lanes.

    Effects: as of `run`. An exception out of an event drops both flights and the residence.
    """
    flights = {flight.microbatch: flight for flight in (forward, backward) if flight is not None}
    events = order(
        None if forward is None else forward.plans,
        None if backward is None else backward.plans,
        forward_microbatch=-1 if forward is None else forward.microbatch,
        backward_microbatch=-1 if backward is None else backward.microbatch,
        early_release=early_release,
        ahead=ahead,
    )
    if forward is not None and backward is not None and forward.lanes is not backward.lanes:
        raise ValueError("Expected two flights over the same lanes, got two objects. Make both flights with one Lanes.")
    lanes = next(iter(flights.values())).lanes
    if forward is not None:
        forward.check_forward()
    if backward is not None:
        backward.check_backward()
    try:
        lanes.begin()
        for event in events:
            if isinstance(event, Event):
                flights[event.microbatch].run(event, around or _nothing_around)
            elif residence is not None:
                with lanes.on(event.lane):
                    _step_of(residence, event)
        lanes.end()
    except BaseException:
        lanes.join()  # tensors go back to their allocator next, whichever stream reads them
        lanes.end()  # and the caller rewrites inputs next, on a stream that may be a third
        for flight in flights.values():
            flight.drop()
        if residence is not None:
            residence.drop()
        raise


def _step_of(residence: Residence, event: ResidenceEvent) -> None:
    if event.action is Action.ACQUIRE:
        residence.acquire(event)
    elif event.action is Action.USED:
        residence.used(event)
    else:
        residence.finished(event)


def _nothing_around(event: Event) -> AbstractContextManager[object]:
    return _NOTHING


def _label(event: Event) -> AbstractContextManager[object]:
    """A range of the profiler's, by which a report finds the exchanges of each layer; nothing without a profiler."""
    if not _is_profiled():
        return _NOTHING
    layer = "around the layers" if event.layer is None else f"layer {event.layer}"
    return record_function(f"schedule::{event.slot} {event.kind} ({layer})")


def _of_layer(layer: int | None) -> str:
    return "" if layer is None else f" of layer {layer}"


def _check_gradient(output: object, gradient: torch.Tensor | None, title: str) -> None:
    if gradient is None:
        return
    if not isinstance(output, torch.Tensor) or not output.requires_grad:
        found = "a tensor without requires_grad" if isinstance(output, torch.Tensor) else f"a {type(output).__name__}"
        raise ValueError(
            f"Expected None as gradient of {title}, which is {found}, got a gradient of shape {tuple(gradient.shape)}. "
            "Give None."
        )
    if gradient.shape != output.shape:
        raise ValueError(
            f"Expected a gradient of shape {tuple(output.shape)} for {title}, got shape {tuple(gradient.shape)}. "
            "Give a gradient of the output's shape."
        )


def _begin(flight: Flight) -> torch.Tensor:
    """Begin a flight's backward from its loss, and return the loss."""
    try:
        loss = _loss(flight.outputs, flight.microbatch)
    except BaseException:
        flight.drop()
        raise
    flight.begin_backward((torch.ones_like(loss),))
    return loss.detach()


def _loss(outputs: Values, microbatch: int) -> torch.Tensor:
    loss = outputs[0] if len(outputs) == 1 else None
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0 or not loss.requires_grad:
        found = [
            f"a tensor of shape {tuple(value.shape)}{'' if value.requires_grad else ' without a gradient'}"
            if isinstance(value, torch.Tensor)
            else type(value).__name__
            for value in outputs
        ]
        raise ValueError(
            "Expected postprocess to return one 0-D loss that requires a gradient, got "
            f"{', '.join(found) or 'nothing'} in microbatch {microbatch}. Return the loss alone."
        )
    return loss
