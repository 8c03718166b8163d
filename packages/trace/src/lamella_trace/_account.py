"""From a trace to its report: each kernel's unit and role, and the time of each step accounted for."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from lamella_trace._host import GATHER, OPTIMIZER, REDUCE, Host, HostRange
from lamella_trace._intervals import Interval, gaps, intersect, length, union
from lamella_trace._report import (
    HostGap,
    KernelTimeline,
    NodeReport,
    OverlapReport,
    PlacedKernel,
    Role,
    StepReport,
    Traffic,
    UnitReport,
    without_compute,
)
from lamella_trace._trace import (
    Kernel,
    KernelKind,
    Trace,
    TraceError,
    breakdown,
    events_of,
    kernels_of,
    operators_of,
)

_NUM_NAMED = 4


def overlap_report(trace: Trace, source: str = "the trace") -> OverlapReport:
    """Account for the time of a profile, recorded by `torch.profiler` during steps of sharded units.

    Units of lamella and of FSDP2 leave ranges of the same names. A step ends with the last kernel launched in the step.

    Args:
        trace: Trace from `read_trace`.
        source: Name of the trace in errors.

    Raises:
        TraceError: The trace has no kernels, or no ranges of units, or is merged from several processes.
    """
    _check_processes(trace, source)
    kernels = kernels_of(trace)
    on_gpu = bool(kernels)
    kernels = kernels or _stand_ins(trace, source)
    host = Host(trace)
    if not host.has_nodes and not any(host_range.unit != OPTIMIZER for host_range in host.ranges):
        raise TraceError(
            f"Expected ranges of sharded units (FSDP::...) in {source!r}, got none. Record with ProfilerActivity.CPU "
            "steps of a model under fully_shard, without replays of a CUDA graph."
        )
    placed = _one_a_push(_place(kernel, host) for kernel in kernels)
    placed.sort(key=lambda launch: launch.kernel.start_us)
    kernels = [launch.kernel for launch in placed]
    timeline = KernelTimeline(
        placed=placed,
        windows=_windows(trace, kernels, source),
        ranges=host.ranges,
        host_gaps=_host_gaps(kernels, host) if on_gpu else (),
    )
    info = trace.get("distributedInfo", {})
    return OverlapReport(
        rank=info.get("rank"),
        num_ranks=info.get("world_size"),
        on_gpu=on_gpu,
        steps=tuple(_step(name, window, timeline, on_gpu) for name, window in timeline.windows.items()),
        total=_step("all steps", timeline.span, timeline, on_gpu),
        timeline=timeline,
    )


def _check_processes(trace: Trace, source: str) -> None:
    """Refuse a trace merged from several ranks: a kernel would find its launch, and its unit, among another rank's.

    Operators of the host tell the processes: the threads of autograd share their process, GPUs and tools do not count.
    """
    processes = {event["pid"]: None for event in events_of(trace, "cpu_op")}
    if len(processes) > 1:
        names = ", ".join(map(str, [*processes][:_NUM_NAMED])) + " and more" * (len(processes) > _NUM_NAMED)
        raise TraceError(
            f"Expected the trace of one rank in {source!r}, got operators of {len(processes)} processes: {names}. Read "
            "each rank's trace by itself."
        )


def _stand_ins(trace: Trace, source: str) -> list[Kernel]:
    """Return the operators of a CPU's trace, in place of kernels."""
    names = [event["name"] for event in events_of(trace, "user_annotation")]
    if trace.get("distributedInfo", {}).get("backend") == "nccl" or any(name.startswith("nccl:") for name in names):
        raise TraceError(
            f"Expected GPU kernels in {source!r}, got none. Record with ProfilerActivity.CUDA; if the profile was "
            "recorded with CUDA, CUPTI does not work on the profiled machine."
        )
    operators = operators_of(trace)
    if not operators:
        raise TraceError(
            f"Expected kernels, or operators of the main thread, in {source!r}, got none. Profile steps of training, "
            "on a CPU in the program's main thread."
        )
    return operators


def _place(kernel: Kernel, host: Host) -> PlacedKernel:
    host_range = host.launching(kernel)
    if host_range is not None and kernel.launched_us is None:  # The range's start is the earliest possible launch.
        kernel = replace(kernel, thread=host_range.thread, launched_us=host_range.start_us)
    node = host.node_about(kernel, host_range) if kernel.kind.is_collective else None
    if node is not None:
        return PlacedKernel(kernel=kernel, range=node, role=Role.EXCHANGE)
    return PlacedKernel(kernel=kernel, range=host_range, role=_role(kernel, host_range, host))


def _one_a_push(placed: Iterable[PlacedKernel]) -> list[PlacedKernel]:
    """Join the copies into peers' memory of one gather: between copies the gather waits until peers are ready."""
    launches: list[PlacedKernel] = []
    pushes: dict[int, list[PlacedKernel]] = defaultdict(list)
    for launch in placed:
        is_push = (
            launch.kernel.name.startswith("Memcpy PtoP") and launch.range is not None and launch.range.phase == GATHER
        )
        (pushes[id(launch.range)] if is_push else launches).append(launch)
    return launches + [_joined(copies) for copies in pushes.values()]


def _joined(copies: Sequence[PlacedKernel]) -> PlacedKernel:
    start = min(copy.kernel.start_us for copy in copies)
    end = max(copy.kernel.end_us for copy in copies)
    sent = sum(copy.kernel.sent_nbytes or 0.0 for copy in copies)
    kernel = replace(copies[0].kernel, start_us=start, duration_us=end - start, operator=None, sent_nbytes=sent)
    return replace(copies[0], kernel=kernel)


def _role(kernel: Kernel, host_range: HostRange | None, host: Host) -> Role | None:
    """Return a collective's role, from the kernel's kind, or from the range's phase for kernels of generic names."""
    if not kernel.kind.is_collective:
        return None
    if host_range is None or host_range.unit == OPTIMIZER:
        return Role.OTHER
    if kernel.kind is KernelKind.ALL_GATHER or host_range.phase == GATHER:
        return Role.BACKWARD_GATHER if host.in_backward(host_range.start_us) else Role.FORWARD_GATHER
    return Role.REDUCE if kernel.kind is KernelKind.REDUCE_SCATTER or host_range.phase == REDUCE else Role.OTHER


def _windows(trace: Trace, kernels: Sequence[Kernel], source: str) -> dict[str, Interval]:
    """Return the interval of each step with kernels; intervals are contiguous."""
    marks = [event for event in events_of(trace, "user_annotation") if event["name"].startswith("ProfilerStep#")]
    marks.sort(key=lambda event: event["ts"])
    names = [mark["name"] for mark in marks] or ["whole trace"]
    begins = [float(mark["ts"]) for mark in marks[1:]]
    ends: dict[str, float] = {}
    for kernel in kernels:
        launched = kernel.start_us if kernel.launched_us is None else kernel.launched_us
        name = names[bisect_right(begins, launched)]
        ends[name] = max(kernel.end_us, ends.get(name, kernel.end_us))
    start, windows = kernels[0].start_us, {}
    for name in names:
        if (end := ends.get(name, start)) > start:
            windows[name] = start, end
            start = end
    if not windows:
        raise TraceError(f"Expected kernels that took some time in {source!r}, got none. Profile steps of training.")
    return windows


def _host_gaps(kernels: Sequence[Kernel], host: Host) -> list[HostGap]:
    """Return the idle times at whose start the next kernel had not been launched.

    In other idle times the GPU needed the time to start a launched kernel.
    """
    busy = union(kernel.interval for kernel in kernels)
    waits: list[HostGap] = []
    for start, end in gaps(busy, busy[0][0], busy[-1][1]):
        following = kernels[bisect_left(kernels, end, key=lambda kernel: kernel.start_us)]
        if following.launched_us is not None and following.launched_us > start:
            waits.append(HostGap(unit=host.unit_about(following), start_us=start, end_us=end))
    return waits


def _step(name: str, window: Interval, timeline: KernelTimeline, on_gpu: bool) -> StepReport:
    placed = _clip(timeline.placed, window)
    waits = [gap for gap in timeline.host_gaps if window[0] <= gap.start_us < window[1]]
    times = breakdown([launch.kernel for launch in placed], window)
    uncovered = without_compute(placed, window) if on_gpu else None
    by_unit: dict[str, list[PlacedKernel]] = {}
    by_node: dict[tuple[str, str], list[PlacedKernel]] = {}
    for launch in placed:
        if launch.role is Role.EXCHANGE and launch.range is not None:
            by_node.setdefault((launch.range.unit, launch.range.phase), []).append(launch)
            continue
        by_unit.setdefault(launch.unit, []).append(launch)
    for gap in waits:
        by_unit.setdefault(gap.unit, [])
    units = [
        _unit(unit, launches, [gap for gap in waits if gap.unit == unit], uncovered)
        for unit, launches in by_unit.items()
    ]
    compute = union(
        launch.kernel.interval for launch in placed if not launch.kernel.kind.is_collective and not launch.is_copy
    )
    return StepReport(
        name=name,
        span=times.span,
        compute=times.span - times.exposed - times.idle,
        exposed=times.exposed,
        idle=times.idle,
        by_kind=times.by_kind,
        collectives=times.collectives,
        optimizer=_ms(launch for launch in placed if launch.is_step),
        lone_copies=_ms((launch for launch in placed if launch.is_copy), gaps(compute, *window)),
        whole=_unit("all", placed, waits, uncovered),
        units=tuple(unit for unit in units if unit.is_worth_a_line),
        nodes=tuple(
            NodeReport(layer=layer, node=node, traffic=_traffic(launches, uncovered))
            for (layer, node), launches in by_node.items()
        ),
    )


def _clip(placed: Iterable[PlacedKernel], window: Interval) -> list[PlacedKernel]:
    """Return the kernels in a window, cut at its ends."""
    start, end = window
    return [
        launch if start <= launch.kernel.start_us and launch.kernel.end_us <= end else _cut(launch, window)
        for launch in placed
        if launch.kernel.start_us < end and start < launch.kernel.end_us
    ]


def _cut(placed: PlacedKernel, window: Interval) -> PlacedKernel:
    kernel = placed.kernel
    start, end = max(kernel.start_us, window[0]), min(kernel.end_us, window[1])
    cut = replace(kernel, start_us=start, duration_us=end - start)
    return replace(placed, kernel=cut, is_rest=kernel.start_us < window[0])


def _unit(
    unit: str, placed: Sequence[PlacedKernel], waits: Sequence[HostGap], uncovered: Sequence[Interval] | None
) -> UnitReport:
    by_role: dict[Role, list[PlacedKernel]] = {role: [] for role in Role}
    for launch in placed:
        if launch.role is not None:
            by_role[launch.role].append(launch)
    return UnitReport(
        unit=unit,
        traffic={role: _traffic(collectives, uncovered) for role, collectives in by_role.items()},
        copies=_ms(launch for launch in placed if launch.is_copy),
        host_gaps=None if uncovered is None else length(gap.interval for gap in waits) / 1e3,
    )


def _traffic(placed: Sequence[PlacedKernel], uncovered: Sequence[Interval] | None) -> Traffic:
    begun = [launch for launch in placed if not launch.is_rest]
    calls = {
        id(launch.range)
        for launch in begun
        if launch.range is not None and (launch.range.phase in (GATHER, REDUCE) or launch.role is Role.EXCHANGE)
    }
    # An operator may launch several kernels, each with the byte count of the whole operator: count one of them.
    sent = {launch.kernel.operator or launch.kernel.start_us: launch.kernel.sent_nbytes for launch in begun}
    known_nbytes = [nbytes for nbytes in sent.values() if nbytes is not None]
    return Traffic(
        num=len(calls) or len(begun),
        duration=_ms(placed),
        exposed=None if uncovered is None else _ms(placed, uncovered),
        sent_nbytes=sum(known_nbytes) if known_nbytes and len(known_nbytes) == len(sent) else None,
    )


def _ms(placed: Iterable[PlacedKernel], within: Sequence[Interval] | None = None) -> float:
    """Return the milliseconds with at least one of the kernels running."""
    busy = union(launch.kernel.interval for launch in placed)
    return length(busy if within is None else intersect(busy, within)) / 1e3
