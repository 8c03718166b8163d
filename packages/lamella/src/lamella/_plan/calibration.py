"""Rates of a cluster from a profile of one step: the times of its kernels, over the works of the same step.

Note [What a profile tells]
    Kernels run slower beside collectives, and the host runs slower under a profiler. A rate is that of a kernel alone:
    the time of kernels beside work on other streams is divided by the cluster's slowdown first. The host's times are
    divided by an assumed factor, unless the time of a step without a profiler is given.
"""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

from lamella._plan.cluster import Cluster
from lamella._plan.step_plan import plan_of
from lamella._plan.works import Work, WorkKind
from lamella._settings.options import ConfigError
from lamella_trace import Kind, OverlapReport, PlacedKernel, Role, Trace, overlap_report

PROFILED_HOST: Final = 1.4
"""Time of the host's launches under torch's profiler, over that without: an assumption."""

_KERNEL_US: Final = 2.0
_VIEW: Final = 0.3
"""Time of a view or an allocation on the host, over that of an operator with a kernel: an assumption."""

_LEAST_SHARE: Final = 0.005
"""Kinds with a smaller share of the kernels' time keep the cluster's rate."""

_LEAST_NBYTES: Final = 4 << 20
_LONG_CALL_US: Final = 60.0
_CLEARLY_LESS, _ABOUT_AS_LONG = 0.97, 0.85
_NUM_HALVINGS: Final = 12
_REDUCE: Final = "post_backward_reduce"
_LOSS: Final = re.compile("softmax|nll|crossentropy", re.IGNORECASE)
_RATES: Final[Mapping[WorkKind, str]] = {
    WorkKind.COPY: "copy_gb_s",
    WorkKind.SOFTMAX: "softmax_gb_s",
    WorkKind.ELEMENTWISE: "memory_gb_s",
    WorkKind.OPTIMIZER: "optimizer_gb_s",
}


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Rates fitted to a step.

    Attributes:
        cluster: The description with the fitted rates.
        predicted_seconds: The plan of the profiled step with them.
        measured_seconds: The step without a profiler, where it was given; else the profiled step.
        kernel_seconds: Time of the kernels of a step in the profile, by kind.
    """

    cluster: Cluster
    predicted_seconds: float
    measured_seconds: float
    kernel_seconds: Mapping[str, float]


def calibrate(
    trace: Trace,
    works: Sequence[Work],
    cluster: Cluster,
    *,
    step_seconds: float | None = None,
    source: str = "the trace",
) -> Calibration:
    """Fit a cluster's rates to a profile of a run's steps.

    Args:
        trace: Of `torch.profiler`, of one rank and whole steps.
        works: The works of a step of the same run.
        cluster: Gives the rates that the profile does not tell.
        step_seconds: The median step without a profiler.
        source: The name of the trace in errors.

    Raises:
        ConfigError: The profile has no kernels of a GPU.
        TraceError: The trace has no kernels, or no ranges of units.
    """
    report = overlap_report(trace, source)
    if not report.on_gpu:
        raise ConfigError(f"Expected a profile of steps on GPUs in {source!r}, got one of a CPU.")
    fitted = _with_rates(report, works, cluster)
    fitted = _with_wires(report, fitted)
    fitted = _with_host(trace, report, works, fitted)
    measured = step_seconds or report.total.span / len(report.steps) / 1e3
    fitted = _met(works, fitted, measured)
    return Calibration(
        cluster=fitted,
        predicted_seconds=plan_of(works, fitted).seconds,
        measured_seconds=measured,
        kernel_seconds={kind.value: seconds for kind, seconds in _kernel_seconds(report, 1.0)[0].items()},
    )


# -- rates of kernels ------------------------------------------------------------------------------------------------


def _with_rates(report: OverlapReport, works: Sequence[Work], cluster: Cluster) -> Cluster:
    seconds, counts = _kernel_seconds(report, cluster.slowdown)
    idle_us = max(0.0, report.total.idle - (report.total.whole.host_gaps or 0.0)) * 1e3
    gap_us = min(3.0, idle_us / max(1, sum(counts.values())))
    changes: dict[str, float] = {"kernel_us": _KERNEL_US + gap_us}
    total = sum(seconds.values())
    for kind, attribute in _RATES.items():
        nbytes, num = _sum(works, kind, "nbytes"), _count(works, kind)
        remaining = seconds[kind] - num * _KERNEL_US * 1e-6
        if seconds[kind] > _LEAST_SHARE * total and nbytes and remaining > 0.2 * seconds[kind]:
            changes[attribute] = nbytes / remaining / 1e9
    for kind, attribute in ((WorkKind.MATMUL, "matmul_tflops"), (WorkKind.ATTENTION, "attention_tflops")):
        flops, num = _sum(works, kind, "flops"), _count(works, kind)
        remaining = seconds[kind] - num * _KERNEL_US * 1e-6
        if seconds[kind] > _LEAST_SHARE * total and flops and remaining > 0:
            changes[attribute] = flops / remaining / 1e12
    return replace(cluster, **changes)


def _kernel_seconds(report: OverlapReport, slowdown: float) -> tuple[dict[WorkKind, float], dict[WorkKind, int]]:
    """Return the time of a step's kernels alone, and their number, by kind."""
    placed = [launch for launch in report.timeline.placed if not launch.is_rest]
    beside = _Beside(placed)
    seconds: dict[WorkKind, float] = dict.fromkeys(WorkKind, 0.0)
    counts: dict[WorkKind, int] = dict.fromkeys(WorkKind, 0)
    for launch in placed:
        kind = _kind_of(launch)
        if kind is None:
            continue
        kernel = launch.kernel
        slowed = 1.0 + (slowdown - 1.0) * beside.share_of(launch)
        seconds[kind] += kernel.duration_us / slowed * 1e-6 / len(report.steps)
        counts[kind] += 1
    return seconds, {kind: round(count / len(report.steps)) for kind, count in counts.items()}


def _kind_of(launch: PlacedKernel) -> WorkKind | None:
    """Return a kernel's kind; None for collectives and their sums, and for copies from or to the host's memory."""
    kind = launch.kernel.kind
    is_sum = kind is Kind.ELEMENTWISE and launch.range is not None and launch.range.phase == _REDUCE
    if kind.is_collective or kind is Kind.TRANSFER or is_sum:
        return None
    kinds = {
        Kind.MATMUL: WorkKind.MATMUL,
        Kind.ATTENTION: WorkKind.ATTENTION,
        Kind.OPTIMIZER: WorkKind.OPTIMIZER,
        Kind.COPY: WorkKind.COPY,
    }
    is_loss = kind is Kind.ELEMENTWISE and _LOSS.search(launch.kernel.name) is not None
    return WorkKind.SOFTMAX if is_loss else kinds.get(kind, WorkKind.ELEMENTWISE)


class _Beside:
    """The times at which each stream works."""

    def __init__(self, placed: Iterable[PlacedKernel]) -> None:
        self._streams: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for launch in sorted(placed, key=lambda launch: launch.kernel.start_us):
            self._streams[launch.kernel.stream].append(launch.kernel.interval)

    def share_of(self, launch: PlacedKernel) -> float:
        """Return the part of a kernel's time in which another stream works."""
        kernel = launch.kernel
        if not kernel.duration_us:
            return 0.0
        covered = 0.0
        for stream, intervals in self._streams.items():
            if stream != kernel.stream:
                covered += _covered(kernel.interval, intervals)
        return min(1.0, covered / kernel.duration_us)


def _covered(interval: tuple[float, float], intervals: Sequence[tuple[float, float]]) -> float:
    begin, end = interval
    index = max(0, bisect_right(intervals, begin, key=lambda other: other[0]) - 1)
    covered = 0.0
    while index < len(intervals) and intervals[index][0] < end:
        covered += max(0.0, min(end, intervals[index][1]) - max(begin, intervals[index][0]))
        index += 1
    return covered


def _sum(works: Sequence[Work], kind: WorkKind, attribute: str) -> float:
    return float(sum(getattr(work, attribute) for work in works if work.kind is kind))


def _count(works: Sequence[Work], kind: WorkKind) -> int:
    return sum(work.kind is kind for work in works)


# -- wires -----------------------------------------------------------------------------------------------------------


def _with_wires(report: OverlapReport, cluster: Cluster) -> Cluster:
    """Take the median rate of gathers and of reductions: a few wait for a peer that computes longer."""
    changes: dict[str, float] = {}
    for attribute, roles in (
        ("gather_gb_s", (Role.FORWARD_GATHER, Role.BACKWARD_GATHER)),
        ("reduce_gb_s", (Role.REDUCE,)),
    ):
        rates = [
            sent / kernel.duration_us / 1e3
            for launch in _collectives(report.timeline.placed, roles)
            if (sent := (kernel := launch.kernel).sent_nbytes) and sent > _LEAST_NBYTES and kernel.duration_us
        ]
        if rates:
            changes[attribute] = median(rates)
    return replace(cluster, **changes)


def _collectives(placed: Iterable[PlacedKernel], roles: Sequence[Role]) -> list[PlacedKernel]:
    """Return the collectives of some roles; the copies of one exchange are joined, from the first to the last."""
    chosen = [launch for launch in placed if launch.role in roles and not launch.is_rest]
    by_range: dict[int, list[PlacedKernel]] = defaultdict(list)
    for launch in chosen:
        by_range[id(launch.range)].append(launch)
    joined = []
    for launches in by_range.values():
        start = min(launch.kernel.start_us for launch in launches)
        end = max(launch.kernel.end_us for launch in launches)
        # An operator may launch several kernels, each with the byte count of the operator.
        sent = sum(
            {
                launch.kernel.operator or launch.kernel.start_us: launch.kernel.sent_nbytes or 0.0
                for launch in launches
            }.values()
        )
        kernel = replace(launches[0].kernel, start_us=start, duration_us=end - start, sent_nbytes=sent)
        joined.append(replace(launches[0], kernel=kernel))
    return joined


# -- the host --------------------------------------------------------------------------------------------------------


def _with_host(trace: Trace, report: OverlapReport, works: Sequence[Work], cluster: Cluster) -> Cluster:
    """Take the time between the first and the last launch of a step, less the calls in which the host waits."""
    launches = sorted(
        launch.kernel.launched_us for launch in report.timeline.placed if launch.kernel.launched_us is not None
    )
    if len(launches) < 2:
        return cluster
    ranges = [
        host_range for host_range in report.timeline.ranges if host_range.depth == 0 and host_range.phase != "step"
    ]
    waits = _joined(
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in ("cuda_runtime", "cuda_driver") and _waits(event)
    )
    begin, end = launches[0], launches[-1]
    num_steps = len(report.steps)
    busy_us = (end - begin - _covered((begin, end), waits)) / num_steps
    in_ranges_us = sum(r.end_us - r.start_us - _covered((r.start_us, r.end_us), waits) for r in ranges) / num_steps
    num_collectives = max(1, sum(work.collective is not None for work in works))
    num_kernels = max(1, len(works) - num_collectives)
    num_views = sum(work.num_views for work in works)
    launch_us = max(0.5, (busy_us - in_ranges_us) / PROFILED_HOST / (num_kernels + _VIEW * num_views))
    return replace(
        cluster,
        launch_us=launch_us,
        view_us=launch_us * _VIEW,
        collective_launch_us=in_ranges_us / PROFILED_HOST / num_collectives,
    )


def _joined(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for start, stop in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    return joined


def _waits(event: Mapping[str, object]) -> bool:
    """Whether a call waits for the GPU: to synchronize, or for room in the queue of launches."""
    name, duration = str(event.get("name")), float(event["dur"])  # type: ignore[arg-type]
    return "Synchronize" in name or duration > _LONG_CALL_US


# -- the whole step --------------------------------------------------------------------------------------------------


def _met(works: Sequence[Work], cluster: Cluster, measured: float) -> Cluster:
    """Scale the host's times, or else the kernels' rates, until the plan of the step is the measured step.

    The host decides where its launches take about as long as the step, and the kernels alone would take less.
    """
    without_host = plan_of(works, _scaled_host(cluster, 0.0)).seconds
    host_seconds = plan_of(works, cluster).host_seconds
    if without_host < _CLEARLY_LESS * measured and host_seconds > _ABOUT_AS_LONG * measured:
        return _bisected(works, cluster, measured, _scaled_host, (0.0, 1.5))
    return _bisected(works, cluster, measured, _scaled_kernels, (0.5, 2.0))


def _bisected(
    works: Sequence[Work],
    cluster: Cluster,
    measured: float,
    scaled: Callable[[Cluster, float], Cluster],
    factors: tuple[float, float],
) -> Cluster:
    low, high = factors
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        if plan_of(works, scaled(cluster, middle)).seconds > measured:
            high = middle
        else:
            low = middle
    return scaled(cluster, (low + high) / 2)


def _scaled_host(cluster: Cluster, factor: float) -> Cluster:
    names = ("launch_us", "view_us", "collective_launch_us")
    return replace(cluster, **{name: getattr(cluster, name) * factor for name in names})


def _scaled_kernels(cluster: Cluster, factor: float) -> Cluster:
    names = ("matmul_tflops", "attention_tflops", "memory_gb_s", "copy_gb_s", "softmax_gb_s", "optimizer_gb_s")
    changes = {name: getattr(cluster, name) / factor for name in names}
    return replace(cluster, kernel_us=cluster.kernel_us * factor, **changes)
