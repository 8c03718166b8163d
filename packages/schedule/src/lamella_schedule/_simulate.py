"""An order with durations becomes a timeline, before any device runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from lamella_schedule._events import Event, Kind, Lane, Slot
from lamella_schedule._order import AnyEvent, work

Durations: TypeAlias = Mapping[tuple[Slot, Kind], float] | Callable[[Event], float]


@dataclass(frozen=True, slots=True)
class Span:
    """An event, and its time on the lane.

    Attributes:
        event: The event.
        start: Begin, in the unit of the durations.
        stop: End, in the unit of the durations.
    """

    event: Event
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The time of each event: simulated, or measured.

    Attributes:
        spans: The events' spans, in the order of the host.
    """

    spans: tuple[Span, ...]

    @property
    def total(self) -> float:
        """From the first start to the last stop."""
        if not self.spans:
            return 0.0
        return max(span.stop for span in self.spans) - min(span.start for span in self.spans)

    @property
    def durations(self) -> dict[tuple[Slot, Kind], float]:
        """The mean duration by slot and kind, for `simulate`."""
        durations_by_key: dict[tuple[Slot, Kind], list[float]] = {}
        for span in self.spans:
            durations_by_key.setdefault((span.event.slot, span.event.kind), []).append(span.stop - span.start)
        return {key: sum(spans_of_key) / len(spans_of_key) for key, spans_of_key in durations_by_key.items()}

    def busy(self, lane: Lane) -> float:
        """The time of a lane's work."""
        return sum(stop - start for start, stop in self._covered(lane))

    @property
    def exposed(self) -> float:
        """The time of communication without compute."""
        compute = self._covered(Lane.COMPUTE)
        return sum(_alone(start, stop, compute) for start, stop in self._covered(Lane.COMMUNICATION))

    @property
    def exposed_by(self) -> dict[tuple[int | None, Slot, Kind], float]:
        """The time of communication without compute by layer, slot and kind, summed over microbatches."""
        exposed: dict[tuple[int | None, Slot, Kind], float] = {}
        compute = self._covered(Lane.COMPUTE)
        for span in self.spans:
            if span.event.lane is Lane.COMMUNICATION:
                key = span.event.layer, span.event.slot, span.event.kind
                exposed[key] = exposed.get(key, 0.0) + _alone(span.start, span.stop, compute)
        return exposed

    def _covered(self, lane: Lane) -> list[tuple[float, float]]:
        """The lane's spans; spans that meet are joined."""
        joined: list[tuple[float, float]] = []
        for start, stop in sorted((span.start, span.stop) for span in self.spans if span.event.lane is lane):
            if joined and start <= joined[-1][1]:
                joined[-1] = joined[-1][0], max(stop, joined[-1][1])
            else:
                joined.append((start, stop))
        return joined


def simulate(events: Iterable[AnyEvent], durations: Durations, *, host: float = 0.0) -> Timeline:
    """Run an order over two lanes; each lane works in order.

    An event starts when the lane is free, the host has issued the event, and the microbatch's event before has
    stopped (for delayed weight gradients, the backward of the slot).

    Args:
        events: An order. Residence is taken to cost nothing.
        durations: Each event's duration, in any unit: by slot and kind, or a function of the event.
        host: Time of the host for each event, in the same unit.

    Raises:
        ValueError: A mapping lacks an event's slot and kind, or a duration is negative.
    """
    free = dict.fromkeys(Lane, 0.0)
    ends: dict[int, float] = {}
    spans = []
    for place, event in enumerate(work(events)):
        duration = _duration(event, durations)
        # The lane, which works in order, has run the backward of the slot before.
        is_delayed = event.kind is Kind.WEIGHT_GRADIENT
        start = max(free[event.lane], 0.0 if is_delayed else ends.get(event.microbatch, 0.0), host * (place + 1))
        free[event.lane] = start + duration
        if not is_delayed:
            ends[event.microbatch] = start + duration
        spans.append(Span(event, start, start + duration))
    return Timeline(tuple(spans))


def _alone(start: float, stop: float, compute: Iterable[tuple[float, float]]) -> float:
    """The part of an interval without compute."""
    return (stop - start) - sum(max(0.0, min(stop, b) - max(start, a)) for a, b in compute)


def _duration(event: Event, durations: Durations) -> float:
    if callable(durations):
        duration = durations(event)
    elif (event.slot, event.kind) in durations:
        duration = durations[event.slot, event.kind]
    else:
        raise ValueError(
            f"Expected a duration for every slot and kind of the order, got none for {event.slot} {event.kind}. Give "
            "it, 0.0 if it costs nothing."
        )
    if duration < 0:
        raise ValueError(f"Expected durations from 0 on, got {duration} for {event}. Give the time that it takes.")
    return duration


def peak(events: Iterable[AnyEvent], kept_nbytes: Callable[[Event], float]) -> float:
    """Compute the peak of the tensors kept by forwards for backwards, in the order of the host.

    Args:
        events: An order.
        kept_nbytes: Bytes (or any other unit) kept by the forward of a slot until the slot's backward is over. Called
            with the event of the forward.

    Returns:
        The peak of the sum, in the same unit. A slot with delayed weight gradients keeps its share until the weight
            gradients are computed.
    """
    events = work(events)
    last = {(event.microbatch, event.layer, event.slot): place for place, event in enumerate(events)}
    present = highest = 0.0
    shares: dict[tuple[int, int | None, Slot], float] = {}
    for place, event in enumerate(events):
        slot = event.microbatch, event.layer, event.slot
        if event.kind is Kind.FORWARD:
            shares[slot] = kept_nbytes(event)
            present += shares[slot]
            highest = max(highest, present)
        elif last[slot] == place:
            present -= shares.pop(slot, 0.0)
    return highest
