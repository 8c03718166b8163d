"""A plan: the time of a step on a cluster, the part of it in which collectives are exposed, and the bytes sent."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lamella._plan.cluster import Cluster
from lamella._plan.intervals import Interval, covered, joined
from lamella._plan.pricing import launch_seconds, operations_of, seconds_of
from lamella._plan.works import Work, WorkKind
from lamella_schedule import StreamOperation, StreamSpan, simulate_streams


@dataclass(frozen=True, kw_only=True)
class UnitTraffic:
    """The collectives of a unit in a step.

    Attributes:
        sent_nbytes: Bytes that a rank sends, by kind: "gather" and "reduce".
        seconds: Time of the collectives, by kind.
        exposed_seconds: The part in which the rank computes nothing, by kind.
    """

    sent_nbytes: Mapping[str, float]
    seconds: Mapping[str, float]
    exposed_seconds: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The time of a step of one rank, between steps alike.

    Attributes:
        seconds: The step.
        host_seconds: Time of the host for its launches: a step takes no less.
        kinds: Time of works alone, by kind, without regard to overlap.
        flops: Floating-point operations of a rank.
        units: The traffic of each unit, in the order of the first collectives.
    """

    seconds: float
    host_seconds: float
    kinds: Mapping[str, float]
    flops: float
    units: Mapping[str, UnitTraffic]

    @property
    def sent_nbytes(self) -> float:
        """Bytes that a rank sends in a step."""
        return sum(sum(traffic.sent_nbytes.values()) for traffic in self.units.values())

    @property
    def communication_seconds(self) -> float:
        """Time of all collectives."""
        return sum(sum(traffic.seconds.values()) for traffic in self.units.values())

    @property
    def exposed_seconds(self) -> float:
        """Time in which a rank communicates and computes nothing."""
        return sum(sum(traffic.exposed_seconds.values()) for traffic in self.units.values())


def plan_of(works: Sequence[Work], cluster: Cluster) -> StepPlan:
    """Price the works of a step, and simulate two steps, of which the second counts.

    The host of a step launches while the GPU still works on the step before.
    """
    step = operations_of(works, cluster)
    num = len(step)
    # The second step's first works wait for nothing of the first: the compute stream orders them.
    doubled = [*step, *(_later(operation, num) for operation in step)]
    spans = simulate_streams(doubled, slowdown=cluster.slowdown)
    ends = [max(span.stop for span in part) for part in (spans[:num], spans[num:])]
    kinds: dict[str, float] = defaultdict(float)
    for work in works:
        kinds[work.kind.value] += seconds_of(work, cluster)
    return StepPlan(
        seconds=ends[1] - ends[0],
        host_seconds=sum(launch_seconds(work, cluster) for work in works),
        kinds=dict(kinds),
        flops=sum(work.flops for work in works),
        units=_traffic(works, spans[num:], _busy(works, spans)),
    )


def _later(operation: StreamOperation, num: int) -> StreamOperation:
    """Return the operation of the step after, of `num` operations."""
    return replace(operation, after=tuple(index + num for index in operation.after))


def _busy(works: Sequence[Work], spans: Sequence[StreamSpan]) -> list[Interval]:
    """Return the times in which kernels run, joined."""
    kernels = [span for work, span in zip([*works, *works], spans, strict=True) if not work.kind.communicates]
    return joined((span.start, span.stop) for span in kernels)


class _AmountsByUnit(defaultdict[str, defaultdict[str, float]]):
    """Unit -> kind -> amount."""

    def __init__(self) -> None:
        super().__init__(lambda: defaultdict(float))


def _traffic(works: Sequence[Work], spans: Sequence[StreamSpan], busy: Sequence[Interval]) -> dict[str, UnitTraffic]:
    sent, seconds, exposed = _AmountsByUnit(), _AmountsByUnit(), _AmountsByUnit()
    for work, span in zip(works, spans, strict=True):
        if work.collective is None:
            continue
        kind = WorkKind(work.kind).value
        for table, amount in (
            (sent, work.collective.sent_nbytes),
            (seconds, span.stop - span.start),
            (exposed, _alone(span, busy)),
        ):
            table[work.unit][kind] += amount
    return {
        unit: UnitTraffic(
            sent_nbytes=dict(sent[unit]), seconds=dict(seconds[unit]), exposed_seconds=dict(exposed[unit])
        )
        for unit in sent
    }


def _alone(span: StreamSpan, busy: Sequence[Interval]) -> float:
    return span.stop - span.start - covered((span.start, span.stop), busy)
