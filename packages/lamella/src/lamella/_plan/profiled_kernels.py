"""Rates of kernels and wires from a profile; see Note [What a profile tells] in `calibration`."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Final

from lamella._plan.cluster import Cluster
from lamella._plan.intervals import Interval, covered, joined, length
from lamella._plan.works import Work, WorkKind
from lamella_trace import KernelKind, OverlapReport, PlacedKernel, Role, Trace, kernels_of

_KERNEL_US: Final = 2.0
_MOST_GAP_US: Final = 1.5
_LEAST_SHARE: Final = 0.005
"""Kinds with a smaller share of the kernels' time keep the cluster's rate."""

_LEAST_NBYTES: Final = 4 << 20
_PUSH: Final = "Memcpy PtoP"
_REDUCE: Final = "post_backward_reduce"
_LOSS: Final = re.compile("softmax|nll|crossentropy", re.IGNORECASE)
_RATES: Final[Mapping[WorkKind, str]] = {
    WorkKind.COPY: "copy_gb_s",
    WorkKind.SOFTMAX: "softmax_gb_s",
    WorkKind.ELEMENTWISE: "memory_gb_s",
    WorkKind.OPTIMIZER: "optimizer_gb_s",
}


def with_rates(report: OverlapReport, works: Sequence[Work], cluster: Cluster) -> Cluster:
    """Return the cluster with the rates of the kernels in a profile, for the works of the profiled step."""
    seconds, counts = kernel_seconds(report, cluster.slowdown)
    idle_us = max(0.0, report.total.idle - (report.total.whole.host_gaps or 0.0)) * 1e3
    gap_us = min(_MOST_GAP_US, idle_us / len(report.steps) / max(1, sum(counts.values())))
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
    return cluster.with_rates(changes)


def kernel_seconds(report: OverlapReport, slowdown: float) -> tuple[dict[WorkKind, float], dict[WorkKind, int]]:
    """Return the time of a step's kernels alone, and their number, by kind."""
    placed = [launch for launch in report.timeline.placed if not launch.is_rest]
    busy_streams = _BusyStreams(placed)
    seconds: dict[WorkKind, float] = dict.fromkeys(WorkKind, 0.0)
    counts: dict[WorkKind, int] = dict.fromkeys(WorkKind, 0)
    for launch in placed:
        kind = _kind_of(launch)
        if kind is None:
            continue
        kernel = launch.kernel
        slowed = 1.0 + (slowdown - 1.0) * busy_streams.share_of(launch)
        seconds[kind] += kernel.duration_us / slowed * 1e-6 / len(report.steps)
        counts[kind] += 1
    return seconds, {kind: round(count / len(report.steps)) for kind, count in counts.items()}


def _kind_of(launch: PlacedKernel) -> WorkKind | None:
    """Return a kernel's kind; None for collectives and their sums, and for copies from or to the host's memory."""
    kind = launch.kernel.kind
    is_sum = kind is KernelKind.ELEMENTWISE and launch.range is not None and launch.range.phase == _REDUCE
    if kind.is_collective or kind is KernelKind.TRANSFER or is_sum:
        return None
    kinds = {
        KernelKind.MATMUL: WorkKind.MATMUL,
        KernelKind.ATTENTION: WorkKind.ATTENTION,
        KernelKind.OPTIMIZER: WorkKind.OPTIMIZER,
        KernelKind.COPY: WorkKind.COPY,
    }
    is_loss = kind is KernelKind.ELEMENTWISE and _LOSS.search(launch.kernel.name) is not None
    return WorkKind.SOFTMAX if is_loss else kinds.get(kind, WorkKind.ELEMENTWISE)


class _BusyStreams:
    """The times at which each stream works."""

    def __init__(self, placed: Iterable[PlacedKernel]) -> None:
        self._streams: dict[int, list[Interval]] = defaultdict(list)
        for launch in sorted(placed, key=lambda launch: launch.kernel.start_us):
            self._streams[launch.kernel.stream].append(launch.kernel.interval)

    def share_of(self, launch: PlacedKernel) -> float:
        """Return the part of a kernel's time in which another stream works, summed over the streams."""
        kernel = launch.kernel
        if not kernel.duration_us:
            return 0.0
        total = 0.0
        for stream, intervals in self._streams.items():
            if stream != kernel.stream:
                total += covered(kernel.interval, intervals)
        return total / kernel.duration_us


def _sum(works: Sequence[Work], kind: WorkKind, attribute: str) -> float:
    return float(sum(getattr(work, attribute) for work in works if work.kind is kind))


def _count(works: Sequence[Work], kind: WorkKind) -> int:
    return sum(work.kind is kind for work in works)


def with_wires(trace: Trace, report: OverlapReport, cluster: Cluster) -> Cluster:
    """Return the cluster with the rates of gathers and reductions.

    Copies into peers' memory are counted by themselves, since a collective waits for its peers between them. Of
    collectives by kernels, which wait inside, the median counts.
    """
    pushes = [kernel for kernel in kernels_of(trace) if kernel.name.startswith(_PUSH)]
    changes: dict[str, float] = {}
    for attribute, roles in (
        ("gather_gb_s", (Role.FORWARD_GATHER, Role.BACKWARD_GATHER)),
        ("reduce_gb_s", (Role.REDUCE,)),
    ):
        collectives = _collectives(report.timeline.placed, roles)
        streams = {launch.kernel.stream for launch in collectives}
        own_pushes = [kernel for kernel in pushes if kernel.stream in streams]
        busy_us = length(joined(kernel.interval for kernel in own_pushes))
        rates = [
            sent / kernel.duration_us / 1e3
            for launch in collectives
            if (sent := (kernel := launch.kernel).sent_nbytes) and sent > _LEAST_NBYTES and kernel.duration_us
        ]
        if busy_us:
            changes[attribute] = sum(kernel.sent_nbytes or 0.0 for kernel in own_pushes) / busy_us / 1e3
        elif rates:
            changes[attribute] = median(rates)
    return cluster.with_rates(changes)


def _collectives(placed: Iterable[PlacedKernel], roles: Sequence[Role]) -> list[PlacedKernel]:
    """Return the collectives of some roles; the copies of one exchange are joined, from the first to the last."""
    chosen = [launch for launch in placed if launch.role in roles and not launch.is_rest]
    by_range: dict[int, list[PlacedKernel]] = defaultdict(list)
    for launch in chosen:
        by_range[id(launch.range)].append(launch)
    collectives = []
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
        collectives.append(replace(launches[0], kernel=kernel))
    return collectives
