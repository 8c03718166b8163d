"""A report of a profile: collectives, copies and the GPU's waits for the host, by step and by unit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from lamella_trace._host import NO_UNIT, STEP, HostRange
from lamella_trace._intervals import Interval, gaps, intersect, union
from lamella_trace._trace import Kernel, KernelKind

_COPIES = (KernelKind.COPY, KernelKind.TRANSFER)


class Role(StrEnum):
    """The purpose of a collective."""

    FORWARD_GATHER = "forward_gathers"
    BACKWARD_GATHER = "backward_gathers"
    REDUCE = "reduces"
    EXCHANGE = "exchanges"
    """Of tokens: dispatch and combine of a schedule's layers."""
    OTHER = "other_collectives"


@dataclass(frozen=True, kw_only=True)
class PlacedKernel:
    """A kernel, the host range around its launch, and a collective's role.

    A kernel across the end of a step is cut in two; the part in the next step has `is_rest`.
    """

    kernel: Kernel
    range: HostRange | None
    role: Role | None
    is_rest: bool = False

    @property
    def unit(self) -> str:
        return NO_UNIT if self.range is None else self.range.unit

    @property
    def is_copy(self) -> bool:
        """True for copies, casts and transfers launched in a unit's range."""
        return self.range is not None and self.range.phase != STEP and self.kernel.kind in _COPIES

    @property
    def is_step(self) -> bool:
        """True for kernels of an optimizer."""
        return self.kernel.kind is KernelKind.OPTIMIZER or (self.range is not None and self.range.phase == STEP)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Collectives of one role.

    Attributes:
        num: Number of gathers or reductions of the unit; outside units, the number of kernels.
        duration: Milliseconds with at least one of the collectives running.
        exposed: The part of `duration` in which the GPU ran only collectives; None when unknown.
        sent_nbytes: Bytes sent by this rank, see `Kernel.sent_nbytes`; None when unknown for any of the collectives.
    """

    num: int
    duration: float
    exposed: float | None
    sent_nbytes: float | None

    @property
    def hidden(self) -> float | None:
        """The part of `duration` overlapped with compute, in milliseconds; None when unknown."""
        return None if self.exposed is None else self.duration - self.exposed

    @property
    def gb_per_s(self) -> float | None:
        """Bytes sent per `duration`, in 10^9 bytes per second: NCCL's bus bandwidth. None when unknown."""
        return self.sent_nbytes / self.duration / 1e6 if self.sent_nbytes and self.duration else None


@dataclass(frozen=True, kw_only=True)
class UnitReport:
    """Milliseconds of one unit.

    Attributes:
        unit: Name of the unit.
        traffic: The unit's collectives by role. Exposed time shared by two units counts for both.
        copies: Copies, casts and transfers launched in the unit's ranges.
        host_gaps: Time the GPU waited for the host to launch the unit's kernels; None without a GPU.
    """

    unit: str
    traffic: Mapping[Role, Traffic]
    copies: float
    host_gaps: float | None

    @property
    def is_worth_a_line(self) -> bool:
        return bool(self.copies or self.host_gaps or any(traffic.num for traffic in self.traffic.values()))


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """The exchanges of one node of a schedule.

    Attributes:
        layer: Such as `layer 0`.
        node: `dispatch` or `combine`, and `forward` or `backward`.
        traffic: The node's collectives; `num` counts the node's runs.
    """

    layer: str
    node: str
    traffic: Traffic


@dataclass(frozen=True, kw_only=True)
class HostGap:
    """Time in which the GPU was idle because the host had not launched the next kernel. `unit` is the kernel's."""

    unit: str
    start_us: float
    end_us: float

    @property
    def interval(self) -> Interval:
        return self.start_us, self.end_us


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """Milliseconds of one step. `span` is compute + exposed + idle.

    Attributes:
        name: The profiler's name of the step.
        span: From the end of the step before, or the first kernel, to the end of the last kernel launched in the step.
        compute: At least one kernel other than a collective ran.
        exposed: Only collectives ran. Without a GPU: the main thread was in a collective.
        idle: No kernel ran.
        by_kind: Kernels of different kinds running at the same time count in each kind.
        collectives: At least one collective ran.
        optimizer: Kernels launched in an optimizer's step ran, or kernels with an optimizer's name.
        lone_copies: Copies of units ran without any other compute.
        whole: All kernels together, of units and of none.
        units: Units with traffic, copies or host gaps.
        nodes: Nodes of a schedule with exchanges, in the order of their first.
    """

    name: str
    span: float
    compute: float
    exposed: float
    idle: float
    by_kind: Mapping[KernelKind, float]
    collectives: float
    optimizer: float
    lone_copies: float
    whole: UnitReport
    units: tuple[UnitReport, ...]
    nodes: tuple[NodeReport, ...]


@dataclass(frozen=True, kw_only=True)
class OverlapReport:
    """One rank's profile.

    Attributes:
        rank: Rank of the profiled process; None when the trace holds no rank.
        num_ranks: Number of ranks; None when the trace holds no number.
        on_gpu: When False, the host's operators stand in for kernels, and overlap with gloo's threads is unknown.
        steps: One per "ProfilerStep#"; a single step without such marks.
        total: All steps together.
        timeline: The events of all steps.
    """

    rank: int | None
    num_ranks: int | None
    on_gpu: bool
    steps: tuple[StepReport, ...]
    total: StepReport
    timeline: KernelTimeline


@dataclass(frozen=True, kw_only=True)
class KernelTimeline:
    """Kernels in the order of their starts, the interval of each step, the host's ranges, and waits for the host."""

    placed: Sequence[PlacedKernel]
    windows: Mapping[str, Interval]
    ranges: Sequence[HostRange]
    host_gaps: Sequence[HostGap]

    @property
    def span(self) -> Interval:
        """The interval from the start of the first step to the end of the last step."""
        return min(start for start, _ in self.windows.values()), max(end for _, end in self.windows.values())

    @property
    def exposed(self) -> list[Interval]:
        """The times at which only collectives ran."""
        collectives = union(launch.kernel.interval for launch in self.placed if launch.kernel.kind.is_collective)
        return intersect(collectives, without_compute(self.placed, self.span))


def without_compute(placed: Iterable[PlacedKernel], window: Interval) -> list[Interval]:
    """The times without compute: no kernel ran, or only collectives."""
    return gaps(union(launch.kernel.interval for launch in placed if not launch.kernel.kind.is_collective), *window)
