"""An order with durations becomes a timeline, before any device runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, overload

from lamella_schedule._events import Action, Event, Kind, Lane, Phase, ResidenceEvent, Slot
from lamella_schedule._order import AnyEvent
from lamella_schedule._passes import PassKind, PipelineEvent, StagePass, TransferAction, TransferEvent, WorkEvent

Durations: TypeAlias = Mapping[tuple[Slot, Kind], float] | Callable[[Event], float]
PassDurations: TypeAlias = Durations | Mapping[PassKind, float] | Callable[[WorkEvent], float]
ResidencePrice: TypeAlias = float | Callable[[ResidenceEvent], float]
TransferPrice: TypeAlias = float | Callable[[TransferEvent], float]


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
        ValueError: A mapping lacks an event's slot and kind, or a duration is negative.
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
        ValueError: A duration is missing or negative, or ranks wait for messages that nobody sends.
    """
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
        if duration < 0:
            raise ValueError(f"Expected durations from 0 on, got {duration} for {event}. Give the time that it takes.")
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


def _alone(start: float, stop: float, compute: Iterable[tuple[float, float]]) -> float:
    """The part of an interval without compute."""
    return (stop - start) - sum(max(0.0, min(stop, b) - max(start, a)) for a, b in compute)


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


@overload
def peak(events: Iterable[PipelineEvent], kept_nbytes: Callable[[Event], float]) -> float: ...


@overload
def peak(events: Iterable[PipelineEvent], kept_nbytes: Callable[[StagePass], float]) -> float: ...


def peak(events: Iterable[PipelineEvent], kept_nbytes: Callable[..., float]) -> float:
    """Compute the peak of the tensors kept by forwards for backwards, in the order of the host.

    Args:
        events: An order, or the events of one rank of a pipeline.
        kept_nbytes: Bytes (or any other unit) kept by the forward of a slot, or of a pass in one piece, until its
            backward is over. Called with the event of the forward.

    Returns:
        The peak of the sum, in the same unit. A slot or pass with delayed weight gradients keeps its share until the
            weight gradients are computed.
    """
    works = [event for event in events if isinstance(event, WorkEvent)]
    last = {_owner(event): place for place, event in enumerate(works)}
    present = highest = 0.0
    shares: dict[_Owner, float] = {}
    for place, event in enumerate(works):
        if event.phase is Phase.FORWARD:
            shares[_owner(event)] = kept_nbytes(event)
            present += shares[_owner(event)]
            highest = max(highest, present)
        elif last[_owner(event)] == place:
            present -= shares.pop(_owner(event), 0.0)
    return highest


def peak_parameters(events: Iterable[PipelineEvent], nbytes: Callable[[ResidenceEvent], float]) -> float:
    """Compute the peak of the parameters that are present, in the order of the host.

    Args:
        events: An order with residence, or the events of one rank of a pipeline.
        nbytes: Bytes (or any other unit) of a layer's parameters, or those around a stage's layers. Called with the
            `Action.ACQUIRE` that finds them absent.

    Returns:
        The peak of the sum, in the same unit. Passes that overlap share one copy, which the last to finish frees.
    """
    present = highest = 0.0
    holders: dict[tuple[int, int | None], list[float]] = {}
    for event in events:
        if not isinstance(event, ResidenceEvent):
            continue
        shares = holders.setdefault((event.stage, event.layer), [])
        if event.action is Action.ACQUIRE:
            shares.append(0.0 if shares else nbytes(event))
            present += shares[-1]
            highest = max(highest, present)
        elif event.action is Action.FINISHED:
            present -= shares.pop()  # the first share, the copy's bytes, is the last in the list
    return highest


_Owner: TypeAlias = tuple[int, int, int | None, Slot | None]  # stage, microbatch, layer and slot


def _owner(event: WorkEvent) -> _Owner:
    return event.stage, event.microbatch, event.layer, event.slot if isinstance(event, Event) else None
