"""Reading a Chrome trace of `torch.profiler`: each kernel's kind and launch, and a breakdown of the time."""

import gzip
import json
import math
import re
import reprlib
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from lamella_trace._intervals import Interval, length, union

Trace = dict[str, Any]

_COMMUNICATES = r"nccl|c10d::|gloo::|multimem|memcpy ptop"
_GZIP = b"\x1f\x8b"
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_CALLS = ("cuda_runtime", "cuda_driver")
_CATEGORIES = (*_DEVICE, *_CALLS, "cpu_op", "user_annotation", "gpu_user_annotation")
_ITEM_NBYTES = {"Long": 8, "Double": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2, "Short": 2}  # else 1


class TraceError(ValueError):
    """A trace is unreadable, lacks kernels or ranges, or is of several processes.

    The message is one line: the file and the way out.
    """


class KernelKind(Enum):
    """A kernel's kind, from its name. The values are patterns, tried in order: the first match wins."""

    ALL_GATHER = rf"({_COMMUNICATES}).*all_?gather"
    REDUCE_SCATTER = rf"({_COMMUNICATES}).*reduce_?scatter"
    ALL_TO_ALL = rf"({_COMMUNICATES}).*(all_?to_?all|sendrecv)"
    COLLECTIVE = _COMMUNICATES
    ATTENTION = r"flash|fmha|sdpa|attention"
    MATMUL = r"gemm|nvjet|xmma|splitkreduce|cutlass|cublas|cijk_|aten::(add)?mm|aten::bmm"
    OPTIMIZER = r"adam"
    TRANSFER = r"memcpy (htod|dtoh)"
    COPY = r"copy|catarray|chunk_cat|memcpy|aten::cat"
    FILL = r"memset|fillfunctor|zerofunctor|aten::(fill|zero)_"
    ELEMENTWISE = r""

    @property
    def is_collective(self) -> bool:
        return self in (KernelKind.ALL_GATHER, KernelKind.REDUCE_SCATTER, KernelKind.ALL_TO_ALL, KernelKind.COLLECTIVE)

    @property
    def includes_calls(self) -> bool:
        """True for kinds whose operators count as one kernel, with all operators that they call."""
        return self.is_collective or self in (KernelKind.ATTENTION, KernelKind.MATMUL, KernelKind.OPTIMIZER)


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One run of a kernel.

    Attributes:
        name: Name of the kernel, with the collective's name where the trace has one.
        stream: Stream of the device.
        start_us: Start in microseconds.
        duration_us: Duration in microseconds.
        numels: Elements of each tensor argument of the launching operator; () when unknown.
        operator: The trace's number of the launching operator.
        thread: Launching thread of the host.
        launched_us: Time of the launch in microseconds.
        sent_nbytes: Bytes sent by each rank in a collective: among N ranks, (N-1)/N of the whole tensors, twice as much
            in an all-reduce. None when unknown.
    """

    name: str
    stream: int
    start_us: float
    duration_us: float
    numels: tuple[int, ...] = ()
    operator: int | None = None
    thread: int | None = None
    launched_us: float | None = None
    sent_nbytes: float | None = None

    @property
    def kind(self) -> KernelKind:
        return classify(self.name)

    @property
    def end_us(self) -> float:
        return self.start_us + self.duration_us

    @property
    def interval(self) -> Interval:
        return self.start_us, self.end_us


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """Milliseconds of a profile. Kernels of different kinds running at the same time count in each kind."""

    span: float
    by_kind: dict[KernelKind, float]
    collectives: float
    exposed: float  # only collectives run
    idle: float  # no kernel runs


def read_trace(path: Path) -> Trace:
    """Read a trace exported by `export_chrome_trace`, gzipped or not.

    Raises:
        TraceError: The file cannot be read, or holds no trace.
    """
    expected = f"Expected what export_chrome_trace() wrote in {str(path)!r}, got"
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if content.startswith(_GZIP) else content
        trace = json.loads(content.decode(errors="replace"), strict=False)
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        got = (
            f"{error.strerror}"
            if isinstance(error, OSError) and error.strerror
            else f"no JSON ({str(error).rstrip('.')})"
        )
        raise TraceError(f"{expected} {got}.") from error
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise TraceError(f"{expected} JSON without a list of traceEvents.")
    for event in trace["traceEvents"]:
        if not _is_event(event):
            raise TraceError(f"{expected} a malformed event: {reprlib.repr(event)}.")
    if not isinstance(info := trace.get("distributedInfo", {}), dict):
        raise TraceError(f"{expected} a malformed distributedInfo: {reprlib.repr(info)}.")
    return trace


def _is_event(event: object) -> bool:
    """True for events outside the categories read here, and for events whose fields and arguments can be read."""
    if not isinstance(event, dict):
        return False
    if event.get("ph") != "X" or event.get("cat") not in _CATEGORIES:
        return True
    args = event.get("args", {})
    return (
        isinstance(event.get("name"), str)
        and isinstance(event.get("pid"), (int, str))
        and isinstance(event.get("tid"), (int, str))
        and _is_number(event.get("ts"))
        and _is_number(event.get("dur"))
        and event["dur"] >= 0
        and isinstance(args, dict)
        and all(_ARGUMENTS[name](value) for name, value in args.items() if name in _ARGUMENTS)
    )


def _is_number(value: object) -> bool:
    """True for finite numbers that a float can hold."""
    return isinstance(value, (int, float)) and abs(value) <= sys.float_info.max


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _are_shapes(value: object) -> bool:
    """True for a list of the dims of tensors, or of lists of tensors."""
    if not isinstance(value, list):
        return False
    return all(_are_dims(one) or (isinstance(one, list) and all(_are_dims(dims) for dims in one)) for one in value)


def _are_dims(value: object) -> bool:
    return isinstance(value, list) and all(_is_number(dim) for dim in value)


_ARGUMENTS: dict[str, Callable[[object], bool]] = {
    **dict.fromkeys(("External id", "correlation", "stream", "bytes"), _is_number),
    **dict.fromkeys(("Group size", "In msg nelems", "Out msg nelems"), _is_number),
    **dict.fromkeys(("Collective name", "dtype"), _is_text),
    "Input Dims": _are_shapes,
}


@cache
def classify(name: str) -> KernelKind:
    """Return the kind of a kernel of this name, or of an operator on a CPU."""
    return next(kind for kind in KernelKind if re.search(kind.value, name.lower()))


def kernels_of(trace: Trace) -> list[Kernel]:
    """Return the kernels of a trace.

    The trace's "External id" links a kernel to its operator, whose tensor sizes are known if the profile was recorded
    with `record_shapes`; "correlation" links a kernel to its launching call.
    """
    numels = {args_of(event).get("External id"): _numels(event) for event in events_of(trace, "cpu_op")}
    calls = events_of(trace, *_CALLS)
    launches = {event["args"]["correlation"]: event for event in calls if "correlation" in args_of(event)}
    return [
        _kernel(event, numels.get(args.get("External id"), ()), launches.get(args.get("correlation")))
        for event in events_of(trace, *_DEVICE)
        for args in [args_of(event)]
    ]


def operators_of(trace: Trace) -> list[Kernel]:
    """Return the main thread's operators, in place of kernels on a CPU: leaves, and operators counted as one.

    Operators of other threads are omitted: copies by gloo and its transport are no part of the model.
    """
    leaves: list[dict[str, Any]] = []
    opaque_until = -math.inf
    labels = (event for event in events_of(trace, "user_annotation") if event["name"].startswith("gloo::"))
    main_thread_events = (event for event in (*events_of(trace, "cpu_op"), *labels) if event["tid"] == event["pid"])
    for event in sorted(main_thread_events, key=lambda event: (event["ts"], -event["dur"])):
        if event["ts"] < opaque_until:
            continue
        if leaves and event["ts"] < leaves[-1]["ts"] + leaves[-1]["dur"]:
            leaves.pop()
        leaves.append(event)
        if classify(event["name"]).includes_calls:
            opaque_until = event["ts"] + event["dur"]
    return [_kernel(event, _numels(event), event) for event in leaves]


def breakdown(kernels: Sequence[Kernel], window: Interval | None = None) -> Breakdown:
    """Break the time of a window down by kinds of kernels.

    Args:
        kernels: Kernels inside the window.
        window: Start and end in microseconds. None: from the first kernel's start to the last kernel's end.
    """
    by_kind: dict[KernelKind, list[Interval]] = {kind: [] for kind in KernelKind}
    for kernel in kernels:
        by_kind[kernel.kind].append(kernel.interval)
    busy = {kind: union(intervals) for kind, intervals in by_kind.items()}
    everything = length(union(chain(*busy.values())))
    compute = length(union(chain(*(busy[kind] for kind in KernelKind if not kind.is_collective))))
    collectives = length(union(chain(*(busy[kind] for kind in KernelKind if kind.is_collective))))
    start, end = window or (min(kernel.start_us for kernel in kernels), max(kernel.end_us for kernel in kernels))
    return Breakdown(
        span=(end - start) / 1e3,
        by_kind={kind: length(intervals) / 1e3 for kind, intervals in busy.items()},
        collectives=collectives / 1e3,
        exposed=(everything - compute) / 1e3,
        idle=(end - start - everything) / 1e3,
    )


def streams_of(kernels: Iterable[Kernel], *kinds: KernelKind) -> set[int]:
    """Return the streams of the kernels of these kinds."""
    return {kernel.stream for kernel in kernels if kernel.kind in kinds}


def events_of(trace: Trace, *categories: str) -> list[dict[str, Any]]:
    """Return the complete events (phase "X": start and duration) of some categories."""
    return [event for event in trace["traceEvents"] if event.get("ph") == "X" and event.get("cat") in categories]


def _kernel(event: dict[str, Any], numels: tuple[int, ...], launch: dict[str, Any] | None) -> Kernel:
    # NCCL runs a group of unlike sizes in a kernel of generic name: take the collective's name from the arguments.
    args = args_of(event)
    name = f"{event['name']} {args.get('Collective name', '')}".strip()
    return Kernel(
        name=name,
        stream=args.get("stream", 0),
        start_us=float(event["ts"]),
        duration_us=float(event["dur"]),
        numels=numels,
        operator=args.get("External id"),
        thread=None if launch is None else launch["tid"],
        launched_us=None if launch is None else float(launch["ts"]),
        sent_nbytes=_sent_nbytes(name, args),
    )


def args_of(event: dict[str, Any]) -> Mapping[str, Any]:
    """Return an event's arguments in the trace."""
    args: Mapping[str, Any] = event.get("args", {})
    return args


def _sent_nbytes(name: str, args: Mapping[str, Any]) -> float | None:
    num_ranks, kind = args.get("Group size"), classify(name)
    if kind is KernelKind.COLLECTIVE and "bytes" in args:  # a copy into a peer's memory
        return float(args["bytes"])
    times = 2 if "allreduce" in name.lower() else 1 if kind.is_collective and kind is not KernelKind.COLLECTIVE else 0
    if not num_ranks or not times or "Out msg nelems" not in args:
        return None
    tensor_nbytes = max(args["Out msg nelems"], args.get("In msg nelems", 0)) * _ITEM_NBYTES.get(
        args.get("dtype", ""), 1
    )
    return float(times * tensor_nbytes * (num_ranks - 1) / num_ranks)


def _numels(event: dict[str, Any]) -> tuple[int, ...]:
    """Return the elements of each tensor argument: () without recorded shapes, (1,) if all arguments are scalars.

    In "Input Dims" a tensor is a list of dims, a list of tensors is a nested list, and any other argument is empty.
    """
    if "Input Dims" not in args_of(event):
        return ()
    numels: list[int] = []
    for argument in args_of(event)["Input Dims"]:
        if argument and isinstance(argument[0], list):
            numels.extend(math.prod(dims) for dims in argument)
        elif argument:
            numels.append(math.prod(argument))
    return tuple(numels) or (1,)
