"""The schedule as data: one pure function from layers to events in the order in which the host issues them.

Note [Order of a pair]. A layer of one microbatch in forward (f) runs beside a layer of another in backward (b):

    communication   b combine bwd | f dispatch fwd                   b dispatch bwd | f combine fwd
    compute         f pre fwd     | b experts bwd, b experts wgrad,  f experts fwd  | b pre bwd, f post fwd, b pre wgrad

A lane runs its events in order, so a position in the host's order decides what an all-to-all hides behind. Delayed
weight gradients of the experts stand behind the backward all-to-all's chance to start: `b dispatch bwd` needs
`b experts bwd` alone.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, TypeAlias, TypeVar

from lamella_schedule._events import Action, Event, Kind, Lane, LayerPlan, Phase, ResidenceEvent, Slot
from lamella_schedule._passes import PipelineEvent, StagePass, TransferEvent

EventT = TypeVar("EventT", bound=Event | StagePass | TransferEvent)
AnyEvent: TypeAlias = Event | ResidenceEvent
Layers: TypeAlias = int | Sequence[LayerPlan]
Plans: TypeAlias = tuple[LayerPlan, ...]

_F, _B = Phase.FORWARD, Phase.BACKWARD
_PAIR: Final = (
    (_B, Slot.POST, Kind.BACKWARD),
    (_B, Slot.COMBINE, Kind.BACKWARD),
    (_F, Slot.PRE, Kind.FORWARD),
    (_B, Slot.EXPERTS, Kind.BACKWARD),
    (_F, Slot.DISPATCH, Kind.FORWARD),
    (_B, Slot.EXPERTS, Kind.WEIGHT_GRADIENT),
    (_B, Slot.DISPATCH, Kind.BACKWARD),
    (_F, Slot.EXPERTS, Kind.FORWARD),
    (_F, Slot.COMBINE, Kind.FORWARD),
    (_B, Slot.PRE, Kind.BACKWARD),
    (_F, Slot.POST, Kind.FORWARD),
    (_B, Slot.PRE, Kind.WEIGHT_GRADIENT),
)
# Tensors saved by attention's forward are freed before f's experts allocate, and f's combine hides behind less compute.
_PAIR_WITH_EARLY_RELEASE: Final = (*_PAIR[:7], _PAIR[9], *_PAIR[7:9], *_PAIR[10:])


def order(
    forward: Layers | None,
    backward: Layers | None,
    *,
    forward_microbatch: int = 1,
    backward_microbatch: int = 0,
    early_release: bool = False,
    delayed: bool = True,
    num_layers_ahead: int = 1,
) -> tuple[AnyEvent, ...]:
    """List the events of one chunk's forward beside another chunk's backward, in the order of the host.

    The forward's layer i runs beside the backward's layer n-1-i. Layers left over run alone, backward first.

    Args:
        forward: The layers of the chunk in forward: plans, or a number of layers with all four slots and delayed weight
            gradients. None for no chunk.
        backward: The layers of the chunk in backward, in the order of forward. None for no chunk.
        forward_microbatch: The microbatch in forward.
        backward_microbatch: The microbatch in backward.
        early_release: Run the backward of `PRE` before the forward of the experts: memory saved by attention is free
            earlier, and the combine of the forward hides behind less compute.
        delayed: False computes all weight gradients in the slots' backward, whatever the plans say.
        num_layers_ahead: Number of layers whose parameters are acquired before their turn.

    Returns:
        The events. Events of one microbatch depend on each other in this order, weight gradients excepted: they
        depend on the backward of their slot alone.

    Raises:
        ValueError: Both chunks are None, the microbatches are equal, or `num_layers_ahead` is negative.
    """
    if forward is None and backward is None:
        raise ValueError("Expected a chunk in forward, in backward, or both, got None twice. Give one its layers.")
    if forward is not None and backward is not None and forward_microbatch == backward_microbatch:
        raise ValueError(
            f"Expected two microbatches, got forward_microbatch and backward_microbatch {forward_microbatch}. A "
            "microbatch's backward cannot run beside its own forward."
        )
    if num_layers_ahead < 0:
        raise ValueError(
            f"Expected num_layers_ahead to be a number of layers, got {num_layers_ahead}. Give 0 for no layer ahead."
        )
    forward, backward = _plans(forward), _plans(backward)
    return _events(forward, forward_microbatch, backward, backward_microbatch, early_release, delayed, num_layers_ahead)


def run_order(
    num_microbatches: int,
    layers: Layers,
    *,
    early_release: bool = False,
    delayed: bool = True,
    num_layers_ahead: int = 1,
) -> tuple[AnyEvent, ...]:
    """List the events of a step without pipeline stages: the forward of each microbatch beside the backward before.

    The first forward and the last backward run alone.

    Args:
        num_microbatches: At least 1.
        layers: The layers' plans, or their number for layers with all slots.
        early_release: Run the backward of `PRE` before the forward of the experts.
        delayed: False computes all weight gradients in the slots' backward.
        num_layers_ahead: Number of layers whose parameters are acquired before their turn.

    Raises:
        ValueError: `num_microbatches` is below 1, or `num_layers_ahead` negative.
    """
    if num_microbatches < 1:
        raise ValueError(f"Expected num_microbatches to be 1 or more, got {num_microbatches}. Give the step data.")
    return tuple(
        event
        for i in range(num_microbatches + 1)
        for event in order(
            layers if i < num_microbatches else None,
            layers if i > 0 else None,
            forward_microbatch=i,
            backward_microbatch=i - 1,
            early_release=early_release,
            delayed=delayed,
            num_layers_ahead=num_layers_ahead,
        )
    )


def work(events: Iterable[PipelineEvent]) -> tuple[Event, ...]:
    """Return the events that run a slot, without residence and messages."""
    return tuple(event for event in events if isinstance(event, Event))


@functools.lru_cache(maxsize=256)  # each step repeats the pairs of the step before
def _events(
    forward: Plans | None,
    forward_microbatch: int,
    backward: Plans | None,
    backward_microbatch: int,
    early_release: bool,
    delayed: bool,
    num_layers_ahead: int,
) -> tuple[AnyEvent, ...]:
    template = _PAIR_WITH_EARLY_RELEASE if early_release else _PAIR
    pair = _Pair(forward, forward_microbatch, backward, backward_microbatch, delayed)
    return tuple(with_residence(pair.events(template), num_layers_ahead=num_layers_ahead))


def _plans(layers: Layers | None) -> Plans | None:
    if isinstance(layers, int):
        if layers < 0:
            raise ValueError(f"Expected a number of layers, got {layers}. Give 0 for a chunk without layers.")
        return (LayerPlan(),) * layers
    return None if layers is None else tuple(layers)


class _Pair:
    """Two chunks, and the events of both."""

    def __init__(
        self,
        forward: Plans | None,
        forward_microbatch: int,
        backward: Plans | None,
        backward_microbatch: int,
        delayed: bool,
    ) -> None:
        self._plans = {_F: forward, _B: backward}
        self._microbatch = {_F: forward_microbatch, _B: backward_microbatch}
        self._delayed = delayed

    def events(self, template: tuple[tuple[Phase, Slot, Kind], ...]) -> Iterator[Event]:
        forward, backward = self._plans[_F], self._plans[_B]
        num_forward, num_backward = len(forward or ()), len(backward or ())
        yield from self._around(_F, Slot.PREPROCESS)
        yield from self._around(_B, Slot.POSTPROCESS)
        for i in range(max(num_forward, num_backward)):
            layers = {_F: i if i < num_forward else None, _B: num_backward - 1 - i if i < num_backward else None}
            yield from self._layers(layers, template)
        # The first layer's delayed gradients hide the sends of a pipeline stage at the end of its layers.
        if backward:
            yield from self._slot(_B, 0, Slot.PRE, Kind.WEIGHT_GRADIENT)
        yield from self._around(_F, Slot.POSTPROCESS)
        yield from self._around(_B, Slot.PREPROCESS)

    def _around(self, phase: Phase, slot: Slot) -> Iterator[Event]:
        if self._plans[phase] is not None:
            yield Event(self._microbatch[phase], None, slot, Kind.FORWARD if phase is _F else Kind.BACKWARD)

    def _layers(
        self, layers: dict[Phase, int | None], template: tuple[tuple[Phase, Slot, Kind], ...]
    ) -> Iterator[Event]:
        for phase, slot, kind in template:
            layer = layers[phase]
            is_deferred = layer == 0 and slot is Slot.PRE and kind is Kind.WEIGHT_GRADIENT
            if layer is not None and not is_deferred:
                yield from self._slot(phase, layer, slot, kind)

    def _slot(self, phase: Phase, layer: int, slot: Slot, kind: Kind) -> Iterator[Event]:
        plan = (self._plans[phase] or ())[layer]
        is_there = self._delayed and slot in plan.delayed if kind is Kind.WEIGHT_GRADIENT else slot in plan.slots
        if is_there:
            yield Event(self._microbatch[phase], layer, slot, kind)


def with_residence(events: Iterable[EventT], *, num_layers_ahead: int = 1) -> Iterator[EventT | ResidenceEvent]:
    """Put the residence of parameters among the events of any order.

    Parameters of a layer are acquired for a pass when the layer `num_layers_ahead` earlier begins the pass, at the
    earliest with the first event of the pass; they are used from the layer's first event on, and finished after the
    last. Parameters around the layers (layer None) stay from the first event of a pass to the last, apart from delayed
    weight gradients of layers.

    Args:
        events: Slots' events in the order of the host, or a rank's passes and messages in a pipeline.
        num_layers_ahead: Number of layers whose parameters are acquired before their turn.
    """
    events = list(events)
    spans: dict[tuple[int, int, Phase], dict[int | None, list[int]]] = {}
    lanes: dict[int, Lane] = {}
    for place, event in enumerate(events):
        if isinstance(event, TransferEvent):
            continue
        lanes[place] = event.lane
        stay = spans.setdefault((event.stage, event.microbatch, event.phase), {None: [place, place]})
        if event.layer is not None:
            stay.setdefault(event.layer, [place, place])[1] = place
        # Zero bubbles leave weight gradients to a time when the next microbatch has gradients around the layers.
        if event.layer is None or event.kind is not Kind.WEIGHT_GRADIENT:
            stay[None][1] = place
    before: dict[int, list[ResidenceEvent]] = {}
    after: dict[int, list[ResidenceEvent]] = {}
    for (stage, microbatch, phase), stays in spans.items():
        starts = [first for first, _ in stays.values()]  # those around the layers come first
        for turn, (layer, (first, last)) in enumerate(stays.items()):
            acquired = starts[max(0, turn - num_layers_ahead)]
            for place, action, residence_events in (
                (acquired, Action.ACQUIRE, before),
                (first, Action.USED, before),
                (last, Action.FINISHED, after),
            ):
                lane = Lane.COMPUTE if action is Action.ACQUIRE else lanes[place]
                step = ResidenceEvent(microbatch, layer, phase, action, lane, stage)
                residence_events.setdefault(place, []).append(step)
    for place, event in enumerate(events):
        yield from sorted(before.get(place, ()), key=lambda step: step.action is not Action.ACQUIRE)
        yield event
        # A layer before the parameters around the layers, as gradients of both may come from the same event.
        yield from sorted(after.get(place, ()), key=lambda step: step.layer is None)
