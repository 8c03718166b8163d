"""An order with durations becomes a timeline, before any device runs it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from lamella_schedule._events import Action, Event, Kind, Lane, Phase, ResidenceEvent, Slot
from lamella_schedule._order import AnyEvent
from lamella_schedule._passes import PassKind, PipelineEvent, StagePass, TransferAction, TransferEvent, WorkEvent
from lamella_schedule._timeline import PipelineTimeline, Span, Timeline

Durations: TypeAlias = Mapping[tuple[Slot, Kind], float] | Callable[[Event], float]
PassDurations: TypeAlias = Durations | Mapping[PassKind, float] | Callable[[WorkEvent], float]
ResidencePrice: TypeAlias = float | Callable[[ResidenceEvent], float]
TransferPrice: TypeAlias = float | Callable[[TransferEvent], float]


def simulate(
    events: Iterable[AnyEvent],
    durations: Durations,
    *,
    host: float = 0.0,
    gather: ResidencePrice = 0.0,
    reduce: ResidencePrice = 0.0,
) -> Timeline:
    """Run an order over its lanes; each lane works in order.

    An event starts when the lane is free, the host has issued the event, and the microbatch's event before has
    stopped (for delayed weight gradients, the backward of the slot). A gather starts when compute has come to the place
    of `Action.ACQUIRE`, and the lane of `Action.USED` waits for the gather. A reduction starts behind the event before
    `Action.FINISHED`, and nothing waits for the reduction. Lanes do not slow each other down.

    Args:
        events: An order.
        durations: Each event's duration, in any unit: by slot and kind, or a function of the event.
        host: Time of the host for each event, in the same unit.
        gather: Time of the gather at each `Action.ACQUIRE`: a number, or a function of the event. 0 where parameters
            are present anyhow, as after the first gather of a step under ZeRO-1 and ZeRO-2.
        reduce: Time of the reduction at each `Action.FINISHED` of a backward: a number, or a function of the event.

    Raises:
        ValueError: A mapping lacks an event's slot and kind, or a duration or `host` is negative or not finite.
    """
    return simulate_pipeline([events], durations, host=host, gather=gather, reduce=reduce).ranks[0]


def simulate_pipeline(
    events: Sequence[Iterable[PipelineEvent]],
    durations: PassDurations,
    *,
    host: float = 0.0,
    gather: ResidencePrice = 0.0,
    reduce: ResidencePrice = 0.0,
    send: TransferPrice = 0.0,
) -> PipelineTimeline:
    """Run the events of all ranks of a pipeline, each over lanes of its own, as `simulate` does for one rank.

    A message starts when the sender's lane is free and the pass is over, and the receiving pass waits for the message.
    Stages of one rank wait for each other without a message. A receiver is always ready.

    Args:
        events: The events of each rank, of `pipeline_events`.
        durations: Each event's duration, in any unit: by slot and kind, by `PassKind` for passes in one piece, or a
            function of the event.
        host: Time of the host for each slot or pass, in the same unit.
        gather: Time of each gather, as in `simulate`.
        reduce: Time of each reduction, as in `simulate`.
        send: Time of each message: a number, or a function of the sending event.

    Raises:
        ValueError: A duration is missing, a duration or `host` is negative or not finite, or ranks wait for messages
            that nobody sends.
    """
    if not 0 <= host < math.inf:
        raise ValueError(f"Expected host to be a finite time from 0 on, got {host}. Give 0 for a host without a cost.")
    prices = _Prices(durations, gather, reduce, send)
    messages: _Messages = {}
    clocks = [_RankClock(events_of_rank, prices, host, messages) for events_of_rank in events]
    while not all(clock.is_over for clock in clocks):
        # A list: each rank advances in each turn.
        if not any([clock.advance() for clock in clocks]):
            waiting = ", ".join(
                f"rank {rank} at {clock.head}" for rank, clock in enumerate(clocks) if not clock.is_over
            )
            raise ValueError(
                f"Expected a message for each pass that receives one, got none for {waiting}. Give the events of all "
                "ranks of a pipeline."
            )
    return PipelineTimeline(tuple(Timeline(tuple(clock.spans)) for clock in clocks))


_Messages: TypeAlias = dict[tuple[int, int, Phase], float]  # receiving stage, microbatch, phase: the arrival


@dataclass(frozen=True, slots=True)
class _Prices:
    durations: PassDurations
    gather: ResidencePrice
    reduce: ResidencePrice
    send: TransferPrice

    def of(self, event: PipelineEvent) -> float:
        """Return the duration of an event on its lane, 0 for one that only waits or frees."""
        if isinstance(event, TransferEvent):
            price = 0.0 if event.action is TransferAction.RECEIVE else self.send
            duration = price(event) if callable(price) else price
        elif isinstance(event, ResidenceEvent):
            duration = self._residence_duration(event)
        else:
            duration = _duration(event, self.durations)
        if not 0 <= duration < math.inf:  # NaN, or a difference of infinite times, would spread to all later events
            raise ValueError(
                f"Expected finite durations from 0 on, got {duration} for {event}. Give the time that it takes."
            )
        return duration

    def _residence_duration(self, event: ResidenceEvent) -> float:
        price: ResidencePrice = 0.0
        if event.action is Action.ACQUIRE:
            price = self.gather
        elif event.action is Action.FINISHED and event.phase is Phase.BACKWARD:
            price = self.reduce
        return price(event) if callable(price) else price


class _RankClock:
    """The lanes of one rank, and the time at which each is free."""

    def __init__(self, events: Iterable[PipelineEvent], prices: _Prices, host: float, messages: _Messages) -> None:
        self.spans: list[Span] = []
        self._events = list(events)
        self._place = 0
        self._prices = prices
        self._host, self._num_issued = host, 0
        self._free = dict.fromkeys(Lane, 0.0)
        self._chains: dict[tuple[int, int], float] = {}  # stage, microbatch: the end of the last event
        self._gathers: dict[tuple[int, int, int | None, Phase], float] = {}
        self._messages, self._awaited = messages, set[tuple[int, int, Phase]]()

    @property
    def is_over(self) -> bool:
        return self._place == len(self._events)

    @property
    def head(self) -> PipelineEvent:
        return self._events[self._place]

    def advance(self) -> bool:
        """Run events up to one that waits for a message not sent yet; return whether any event ran."""
        place = self._place
        while not self.is_over and self._run(self.head):
            self._place += 1
        return self._place > place

    def _run(self, event: PipelineEvent) -> bool:
        if isinstance(event, ResidenceEvent):
            self._run_residence(event)
        elif isinstance(event, TransferEvent):
            self._run_transfer(event)
        else:
            ready = self._ready(event)
            if ready is None:
                return False
            self._num_issued += 1
            stop = self._span(event, max(ready, self._host * self._num_issued))
            if not _is_delayed(event):
                self._chains[event.stage, event.microbatch] = stop
        return True

    def _run_residence(self, event: ResidenceEvent) -> None:
        key = event.stage, event.microbatch, event.layer, event.phase
        if event.action is Action.USED:
            self._free[event.lane] = max(self._free[event.lane], self._gathers.pop(key, 0.0))
        elif self._prices.of(event):
            stop = self._span(event, self._free[event.lane])
            if event.action is Action.ACQUIRE:
                self._gathers[key] = stop

    def _run_transfer(self, event: TransferEvent) -> None:
        message = event.receiver, event.microbatch, event.phase
        if event.action is TransferAction.RECEIVE:
            self._awaited.add(message)
            return
        stop = self._chains[event.stage, event.microbatch]
        if self._prices.of(event):
            stop = self._span(event, stop)
        self._messages[message] = stop

    def _span(self, event: PipelineEvent, ready: float) -> float:
        span = Span(event, ready, ready)
        start = max(self._free[span.lane], ready)
        stop = self._free[span.lane] = start + self._prices.of(event)
        self.spans.append(Span(event, start, stop))
        return stop

    def _ready(self, event: WorkEvent) -> float | None:
        """The time from which an event may run; None for one whose message has not been sent yet."""
        if _is_delayed(event):
            return 0.0  # the lane, which works in order, has run the backward of the slot before
        ready = self._chains.get((event.stage, event.microbatch), 0.0)
        if not _begins_pass(event):
            return ready
        message = event.stage, event.microbatch, event.phase
        if message in self._awaited:
            arrival = self._messages.get(message)
            return None if arrival is None else max(ready, arrival)
        neighbour = event.stage + (-1 if event.phase is Phase.FORWARD else 1)
        return max(ready, self._chains.get((neighbour, event.microbatch), 0.0))


def _is_delayed(event: WorkEvent) -> bool:
    return event.kind in (Kind.WEIGHT_GRADIENT, PassKind.WEIGHT_GRADIENT)


def _begins_pass(event: WorkEvent) -> bool:
    """Whether an event reads the values, or the gradients, of the stage before."""
    if isinstance(event, StagePass):
        return True
    return event.slot is (Slot.PREPROCESS if event.phase is Phase.FORWARD else Slot.POSTPROCESS)


def _duration(event: WorkEvent, durations: PassDurations) -> float:
    if callable(durations):
        return durations(event)  # type: ignore[arg-type]  # a function of slots gets slots, from the orders it is for
    key = event.kind if isinstance(event, StagePass) else (event.slot, event.kind)
    prices: Mapping[PassKind | tuple[Slot, Kind], float] = dict(durations.items())
    if key not in prices:
        title = event.kind if isinstance(event, StagePass) else f"{event.slot} {event.kind}"
        kinds = "kind of pass" if isinstance(event, StagePass) else "slot and kind"
        raise ValueError(
            f"Expected a duration for every {kinds} of the order, got none for {title}. Give it, 0.0 if it costs "
            "nothing."
        )
    return prices[key]
