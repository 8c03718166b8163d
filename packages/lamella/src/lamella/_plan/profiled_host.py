"""Times of the host from a profile; see Note [What a profile tells] in `calibration`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from lamella._plan.cluster import Cluster
from lamella._plan.intervals import covered, joined
from lamella._plan.works import Work
from lamella_trace import OverlapReport, Trace

PROFILED_HOST: Final = 1.45
"""Time of the host's launches under torch's profiler, over that without: an assumption."""

_VIEW: Final = 0.3
"""Time of a view or an allocation on the host, over that of an operator with a kernel: an assumption."""

_LONG_CALL_US: Final = 60.0


def with_host(trace: Trace, report: OverlapReport, works: Sequence[Work], cluster: Cluster) -> Cluster:
    """Return the cluster with the host's times: from a step's first launch to its last, without its waits."""
    launches = sorted(
        launch.kernel.launched_us for launch in report.timeline.placed if launch.kernel.launched_us is not None
    )
    if len(launches) < 2:
        return cluster
    ranges = [
        host_range for host_range in report.timeline.ranges if host_range.depth == 0 and host_range.phase != "step"
    ]
    waits = joined(
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in ("cuda_runtime", "cuda_driver") and _waits(event)
    )
    begin, end = launches[0], launches[-1]
    num_steps = len(report.steps)
    busy_us = (end - begin - covered((begin, end), waits)) / num_steps
    in_ranges_us = sum(r.end_us - r.start_us - covered((r.start_us, r.end_us), waits) for r in ranges) / num_steps
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


def _waits(event: Mapping[str, object]) -> bool:
    """Whether a call waits for the GPU: to synchronize, or for room in the queue of launches."""
    name, duration = str(event.get("name")), float(event["dur"])  # type: ignore[arg-type]
    return "Synchronize" in name or duration > _LONG_CALL_US
