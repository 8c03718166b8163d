"""Timelines, simulated or measured: the span of each event, and what of communication no compute hides."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lamella_schedule._events import Action, Event, Kind, Lane, ResidenceEvent, Slot
from lamella_schedule._passes import PipelineEvent, TransferEvent


@dataclass(frozen=True, slots=True)
class Span:
    """An event, and its time on the lane.

    Attributes:
        event: The event: work, a gather (`Action.ACQUIRE`), a reduction (`Action.FINISHED`), or a message.
        start: Begin, in the unit of the durations.
        stop: End, in the unit of the durations.
    """

    event: PipelineEvent
    start: float
    stop: float

    @property
    def lane(self) -> Lane:
        """The lane of the work, the gather, the reduction or the message."""
        if isinstance(self.event, TransferEvent):
            return Lane.SEND
        if isinstance(self.event, ResidenceEvent):
            return Lane.GATHER if self.event.action is Action.ACQUIRE else Lane.REDUCE
        return self.event.lane


@dataclass(frozen=True, slots=True)
class Timeline:
    """The time of each event: simulated, or measured.

    Attributes:
        spans: The events' spans, in the order of the host. Residence and messages have spans where they cost time.
    """

    spans: tuple[Span, ...]

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """The lanes of a run, and the lanes with priced events."""
        lanes = {span.lane for span in self.spans}
        return tuple(lane for lane in Lane if lane in lanes or lane in (Lane.COMPUTE, Lane.COMMUNICATION))

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
            if isinstance(span.event, Event):
                durations_by_key.setdefault((span.event.slot, span.event.kind), []).append(span.stop - span.start)
        return {key: sum(spans_of_key) / len(spans_of_key) for key, spans_of_key in durations_by_key.items()}

    def busy(self, lane: Lane) -> float:
        """The time of a lane's work."""
        return sum(stop - start for start, stop in self._covered(lane))

    @property
    def exposed(self) -> float:
        """The time of communication of any lane without compute."""
        compute = self._covered(Lane.COMPUTE)
        return sum(_alone(start, stop, compute) for start, stop in self._covered(*set(Lane) - {Lane.COMPUTE}))

    def exposed_on(self, lane: Lane) -> float:
        """The time of a lane without compute: of all-to-alls, gathers, reductions or messages alone."""
        compute = self._covered(Lane.COMPUTE)
        return sum(_alone(start, stop, compute) for start, stop in self._covered(lane))

    @property
    def exposed_by(self) -> dict[tuple[int | None, Slot, Kind], float]:
        """The time of all-to-alls without compute by layer, slot and kind, summed over microbatches."""
        exposed: dict[tuple[int | None, Slot, Kind], float] = {}
        compute = self._covered(Lane.COMPUTE)
        for span in self.spans:
            if isinstance(span.event, Event) and span.lane is Lane.COMMUNICATION:
                key = span.event.layer, span.event.slot, span.event.kind
                exposed[key] = exposed.get(key, 0.0) + _alone(span.start, span.stop, compute)
        return exposed

    def _covered(self, *lanes: Lane) -> list[tuple[float, float]]:
        """The lanes' spans; spans that meet are joined."""
        joined: list[tuple[float, float]] = []
        for start, stop in sorted((span.start, span.stop) for span in self.spans if span.lane in lanes):
            if joined and start <= joined[-1][1]:
                joined[-1] = joined[-1][0], max(stop, joined[-1][1])
            else:
                joined.append((start, stop))
        return joined


@dataclass(frozen=True, slots=True)
class PipelineTimeline:
    """The time of each event on all ranks of a pipeline.

    Attributes:
        ranks: The timeline of each rank, with one zero of time.
    """

    ranks: tuple[Timeline, ...]

    @property
    def total(self) -> float:
        """From the first start on any rank to the last stop on any rank."""
        return Timeline(tuple(span for timeline in self.ranks for span in timeline.spans)).total

    @property
    def bubble(self) -> float:
        """The share of the time in which a rank does not compute, as a mean over the ranks."""
        busy = sum(timeline.busy(Lane.COMPUTE) for timeline in self.ranks)
        return 1.0 - busy / (self.total * len(self.ranks)) if self.total else 0.0


def _alone(start: float, stop: float, compute: Iterable[tuple[float, float]]) -> float:
    """The part of an interval without compute."""
    return (stop - start) - sum(max(0.0, min(stop, b) - max(start, a)) for a, b in compute)
