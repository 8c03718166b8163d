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
    """An event, and when its lane works on it.

    Attributes:
        event: The event.
        start: In the unit of the durations.
        stop: The same.
    """

    event: Event
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """When each event runs: simulated, or measured.

    Attributes:
        spans: In the order of the host.
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
        """The mean duration by slot and kind, as `simulate` takes it."""
        found: dict[tuple[Slot, Kind], list[float]] = {}
        for span in self.spans:
            found.setdefault((span.event.slot, span.event.kind), []).append(span.stop - span.start)
        return {key: sum(each) / len(each) for key, each in found.items()}

    def busy(self, lane: Lane) -> float:
        """The time in which a lane works."""
        return sum(stop - start for start, stop in self._covered(lane))

    @property
    def exposed(self) -> float:
        """The time in which communication works and compute does not."""
        compute = self._covered(Lane.COMPUTE)
        return sum(
            (stop - start) - sum(max(0.0, min(stop, b) - max(start, a)) for a, b in compute)
            for start, stop in self._covered(Lane.COMMUNICATION)
        )

    def _covered(self, lane: Lane) -> list[tuple[float, float]]:
        """The lane's spans, joined where they meet."""
        joined: list[tuple[float, float]] = []
        for start, stop in sorted((span.start, span.stop) for span in self.spans if span.event.lane is lane):
            if joined and start <= joined[-1][1]:
                joined[-1] = joined[-1][0], max(stop, joined[-1][1])
            else:
                joined.append((start, stop))
        return joined


def simulate(events: Iterable[AnyEvent], durations: Durations, *, host: float = 0.0) -> Timeline:
    """Run an order over two lanes that each work in order.

    An event starts when its lane is free, the event before it in its microbatch has stopped (for delayed weight
    gradients, the backward of their slot), and the host has issued it.

    Args:
        events: An order. Residence is taken to cost nothing.
        durations: Of each event, in any unit: by slot and kind, or a function of the event.
        host: Time in which the host issues one event, in the same unit.

    Raises:
        ValueError: A mapping lacks an event's slot and kind, or a duration is negative.
    """
    free = dict.fromkeys(Lane, 0.0)
    ends: dict[int, float] = {}
    spans = []
    for place, event in enumerate(work(events)):
        duration = _duration(event, durations)
        # The lane has run the backward of the slot: weight gradients need not be told.
        is_delayed = event.kind is Kind.WEIGHT_GRADIENT
        start = max(free[event.lane], 0.0 if is_delayed else ends.get(event.microbatch, 0.0), host * (place + 1))
        free[event.lane] = start + duration
        if not is_delayed:
            ends[event.microbatch] = start + duration
        spans.append(Span(event, start, start + duration))
    return Timeline(tuple(spans))


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


def peak(events: Iterable[AnyEvent], kept: Callable[[Event], float]) -> float:
    """Compute the most that forwards keep for backwards at one time, in the order of the host.

    Args:
        events: An order.
        kept: What the forward of a slot keeps until the slot's backward is over, in bytes or any other unit. Asked with
            the event of the forward.

    Returns:
        The peak of the sum, in the same unit. Delayed weight gradients keep a slot's share until they are computed.
    """
    events = work(events)
    last = {(event.microbatch, event.layer, event.slot): place for place, event in enumerate(events)}
    present = highest = 0.0
    shares: dict[tuple[int, int | None, Slot], float] = {}
    for place, event in enumerate(events):
        slot = event.microbatch, event.layer, event.slot
        if event.kind is Kind.FORWARD:
            shares[slot] = kept(event)
            present += shares[slot]
            highest = max(highest, present)
        elif last[slot] == place:
            present -= shares.pop(slot, 0.0)
    return highest
