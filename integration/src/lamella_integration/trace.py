"""Reading a profile: what each kernel is, where the time goes, and what was copied.

Pure functions on lists of kernels; running the profiler is `profile`'s part.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Kind(Enum):
    """What a kernel does, told by its name. The order is the order of the tests: the first that matches wins."""

    ALL_GATHER = r"(nccl|c10d::|gloo::).*all_?gather"
    REDUCE_SCATTER = r"(nccl|c10d::|gloo::).*reduce_?scatter"
    ALL_TO_ALL = r"(nccl|c10d::|gloo::).*(all_?to_?all|sendrecv)"
    COLLECTIVE = r"nccl|c10d::|gloo::"
    ATTENTION = r"flash|fmha|sdpa|attention"
    MATMUL = r"gemm|nvjet|xmma|splitkreduce|cutlass|cublas|aten::(add)?mm|aten::bmm"
    OPTIMIZER = r"adam"
    TRANSFER = r"memcpy (htod|dtoh)"
    COPY = r"copy|catarray|chunk_cat|memcpy|aten::cat"
    FILL = r"memset|fillfunctor|zerofunctor|aten::(fill|zero)_"
    ELEMENTWISE = r""

    @property
    def is_collective(self) -> bool:
        return self in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL, Kind.COLLECTIVE)


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One run of a kernel. `numels` are of the tensors given to the operator that launched it, () if unknown."""

    name: str
    stream: int
    start_us: float
    duration_us: float
    numels: tuple[int, ...] = ()
    operator: int | None = None

    @property
    def kind(self) -> Kind:
        return classify(self.name)

    @property
    def end_us(self) -> float:
        return self.start_us + self.duration_us


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """Milliseconds of a profile. Kernels that run at the same time count in each of their kinds."""

    span: float
    by_kind: dict[Kind, float]
    collectives: float
    exposed: float  # collectives run and nothing else does
    idle: float  # nothing runs


@dataclass(frozen=True, kw_only=True)
class ParameterSizes:
    """What tells copies of parameters from casts of shards and from copies of activations.

    Args:
        full_numels: Of each matrix that divides. Vectors are as small as much else that is copied.
        largest_shard_numel: Of a unit: nothing cast at once is larger.
        cast_numel: Elements that casts between shards and wires may copy in the whole profile. None for any number.
        num_tokens: A prime: the sizes of activations are multiples of it, those of parameters are not.
    """

    full_numels: frozenset[int]
    largest_shard_numel: int
    cast_numel: int | None
    num_tokens: int


def classify(name: str) -> Kind:
    """The kind of kernel that a name tells. On a CPU, operators stand in for kernels."""
    return next(kind for kind in Kind if re.search(kind.value, name.lower()))


def kernels_of(trace: dict[str, Any]) -> list[Kernel]:
    """The kernels of a Chrome trace that `torch.profiler` wrote with `record_shapes`.

    Each is given the tensor sizes of the operator that launched it, by the trace's "External id".
    """
    numels = {event["args"].get("External id"): _numels(event) for event in _events(trace, "cpu_op")}
    return [
        _kernel(event, numels.get(event["args"].get("External id"), ()))
        for event in _events(trace, "kernel", "gpu_memcpy", "gpu_memset")
    ]


def operators_of(trace: dict[str, Any]) -> list[Kernel]:
    """What stands in for kernels on a CPU: the main thread's operators that call no other.

    Collectives count as such and other threads are left out, because what gloo and its transport copy is their affair.
    """
    leaves: list[dict[str, Any]] = []
    opaque_until = -math.inf
    labels = (event for event in _events(trace, "user_annotation") if event["name"].startswith("gloo::"))
    ours = (event for event in (*_events(trace, "cpu_op"), *labels) if event["tid"] == event["pid"])
    for event in sorted(ours, key=lambda event: (event["ts"], -event["dur"])):
        if event["ts"] < opaque_until:
            continue
        if leaves and event["ts"] < leaves[-1]["ts"] + leaves[-1]["dur"]:
            leaves.pop()
        leaves.append(event)
        if classify(event["name"]).is_collective:
            opaque_until = event["ts"] + event["dur"]
    return [_kernel(event, _numels(event)) for event in leaves]


def breakdown(kernels: Sequence[Kernel]) -> Breakdown:
    """Where the time goes."""
    everything = _union(kernels)
    compute = _union(kernel for kernel in kernels if not kernel.kind.is_collective)
    collectives = _union(kernel for kernel in kernels if kernel.kind.is_collective)
    span = max(kernel.end_us for kernel in kernels) - min(kernel.start_us for kernel in kernels)
    busy = _length(everything)
    return Breakdown(
        span=span / 1e3,
        by_kind={kind: _length(_union(k for k in kernels if k.kind is kind)) / 1e3 for kind in Kind},
        collectives=_length(collectives) / 1e3,
        exposed=(busy - _length(compute)) / 1e3,
        idle=(span - busy) / 1e3,
    )


def streams_of(kernels: Iterable[Kernel], *kinds: Kind) -> set[int]:
    """The streams that kernels of these kinds ran on."""
    return {kernel.stream for kernel in kernels if kernel.kind in kinds}


def parameter_copies(kernels: Iterable[Kernel], sizes: ParameterSizes) -> list[Kernel]:
    """Copies that a zero-copy step has no reason to make: whole parameters, or more than a unit's shard.

    A copy of unknown size is taken for one: a proof has no unknowns.
    """
    return [kernel for kernel in kernels if kernel.kind is Kind.COPY and _is_parameter_copy(kernel, sizes)]


def copied_numel(kernels: Iterable[Kernel], sizes: ParameterSizes) -> int:
    """Elements copied in all, activations left out: parameters copied piece by piece show here."""
    by_operator = {
        kernel.operator: sum(numel for numel in kernel.numels if not _is_activation(numel, sizes)) // 2
        for kernel in kernels
        if kernel.kind is Kind.COPY
    }
    return sum(by_operator.values())  # A copy names its source and its destination: half of the sum.


def check_zero_copy(kernels: Sequence[Kernel], sizes: ParameterSizes) -> None:
    """Raise unless the only copies of parameters and gradients are casts of shards.

    Raises:
        RuntimeError: Names the offending kernels.
    """
    offenders = parameter_copies(kernels, sizes)
    if offenders:
        lines = [f"  {k.duration_us:8.1f} us  stream {k.stream}  {list(k.numels)}  {k.name[:100]}" for k in offenders]
        raise RuntimeError("Expected no copies of parameter size, got:\n" + "\n".join(lines))
    copied = copied_numel(kernels, sizes)
    if sizes.cast_numel is not None and copied > sizes.cast_numel:
        raise RuntimeError(f"Expected casts of at most {sizes.cast_numel} elements of shards, got {copied} copied.")


def _is_parameter_copy(kernel: Kernel, sizes: ParameterSizes) -> bool:
    return not kernel.numels or any(
        numel in sizes.full_numels or numel > sizes.largest_shard_numel
        for numel in kernel.numels
        if not _is_activation(numel, sizes)
    )


def _is_activation(numel: int, sizes: ParameterSizes) -> bool:
    return numel % sizes.num_tokens == 0


def _events(trace: dict[str, Any], *categories: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event.get("ph") == "X" and event.get("cat") in categories]


def _kernel(event: dict[str, Any], numels: tuple[int, ...]) -> Kernel:
    # NCCL runs a group of unlike sizes in a kernel of no particular name; the trace still knows what was called.
    collective = event["args"].get("Collective name", "")
    return Kernel(
        name=f"{event['name']} {collective}".strip(),
        stream=int(event["args"].get("stream", 0)),
        start_us=float(event["ts"]),
        duration_us=float(event["dur"]),
        numels=numels,
        operator=event["args"].get("External id"),
    )


def _numels(event: dict[str, Any]) -> tuple[int, ...]:
    """Elements of each tensor given to an operator: () if shapes were not recorded, (1,) if all are scalars.

    In "Input Dims" a tensor is a list of its dims, a list of tensors is nested one deeper, and anything else is empty.
    """
    if "Input Dims" not in event["args"]:
        return ()
    numels: list[int] = []
    for argument in event["args"]["Input Dims"]:
        if argument and isinstance(argument[0], list):
            numels.extend(math.prod(dims) for dims in argument)
        elif argument:
            numels.append(math.prod(argument))
    return tuple(numels) or (1,)


def _union(kernels: Iterable[Kernel]) -> list[tuple[float, float]]:
    """Disjoint intervals in which at least one kernel runs."""
    intervals: list[tuple[float, float]] = []
    for kernel in sorted(kernels, key=lambda kernel: kernel.start_us):
        if intervals and kernel.start_us <= intervals[-1][1]:
            intervals[-1] = (intervals[-1][0], max(intervals[-1][1], kernel.end_us))
        else:
            intervals.append((kernel.start_us, kernel.end_us))
    return intervals


def _length(intervals: Iterable[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)
