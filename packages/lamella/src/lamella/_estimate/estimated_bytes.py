"""An estimate: the bytes of one rank over a step, by kind and moment, with the terms of allocator and GPU."""

from collections import Counter
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass
from typing import Final

from lamella._estimate.kinds import IDLE_WINDOWS, KINDS, LIBRARIES
from lamella._estimate.live_bytes import TrackedStorage, in_blocks
from lamella._estimate.recorded_step import AT_REST, RecordedStep
from lamella._estimate.step_work import StepWork, work_of

_MIB: Final = 1 << 20
_SMALL, _SMALL_SEGMENT = 1 * _MIB, 2 * _MIB
_LARGE, _MEDIUM_SEGMENT = 10 * _MIB, 20 * _MIB
CONTEXT_NBYTES: Final = 600 * _MIB
"""Bytes of a GPU that a CUDA context, kernels and NCCL's channels take: an assumption, where nothing is measured."""
FRAGMENTATION: Final = 0.04
"""Fragmentation of the caching allocator over its blocks: an assumption. A Llama that left 3 % of the memory to it ran
out of memory on H100s, and one that left 4 % did not."""
LIBRARIES_NBYTES: Final = 64 * _MIB
"""Bytes of cuBLAS's work spaces, from the first product on: 32 MiB in each thread that computes, forward's and
backward's. torch's default for Hopper; measured on H100s, with torch 2.11."""


@dataclass(frozen=True, kw_only=True)
class MomentBytes:
    """The bytes of a moment of a step.

    Attributes:
        name: The moment, such as "backward model.layers.3".
        nbytes: The most bytes that were live on the device at once.
        kinds: These bytes by kind.
        host_nbytes: The most bytes that were live in the host's memory, for offloaded tensors.
    """

    name: str
    nbytes: int
    kinds: Mapping[str, int]
    host_nbytes: int


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The bytes of one rank over an optimizer step.

    Attributes:
        rank: The rank.
        num_ranks: The ranks of the run.
        at_rest: Bytes on the device between steps, by kind.
        host_at_rest: Bytes in the host's memory between steps, by kind.
        moments: The moments of a step, in their order.
        rounding_nbytes: Bytes that the caching allocator adds to the peak: blocks are multiples of 512 bytes.
        window_nbytes: Bytes that idle windows of copy engines add to the peak: memory that peers have mapped is not
            freed when a gather's or a reduction's buffer is.
        segment_nbytes: Bytes of the allocator's segments beyond the blocks of the peak, without fragmentation.
        context_nbytes: Bytes of the CUDA context: measured on a GPU of this machine, or an assumption.
        work: The work of the step, to compare options by.
        notes: Sentences on parts of the step that the estimate leaves out.
    """

    rank: int
    num_ranks: int
    at_rest: Mapping[str, int]
    host_at_rest: Mapping[str, int]
    moments: tuple[MomentBytes, ...]
    rounding_nbytes: int
    window_nbytes: int
    segment_nbytes: int
    context_nbytes: int
    work: StepWork
    notes: tuple[str, ...] = ()

    @property
    def peak(self) -> MomentBytes:
        """The moment with the most bytes on the device."""
        return max(self.moments, key=lambda moment: moment.nbytes)

    @property
    def allocated_nbytes(self) -> int:
        """The peak as `torch.cuda.max_memory_allocated` counts it: in blocks."""
        return self.peak.nbytes + self.rounding_nbytes

    @property
    def total_nbytes(self) -> int:
        """The peak as the GPU has to hold it: in segments, beside idle windows and the CUDA context."""
        return self.allocated_nbytes + self.window_nbytes + self.segment_nbytes + self.context_nbytes

    @property
    def needed_nbytes(self) -> int:
        """The memory that a run asks of a GPU: the peak with fragmentation, as far as it is assumed."""
        return self.total_nbytes + round(FRAGMENTATION * self.allocated_nbytes)

    @property
    def host_nbytes(self) -> int:
        """The most bytes of this rank in the host's memory."""
        return max(moment.host_nbytes for moment in self.moments)

    def to_json(self) -> dict[str, object]:
        """Return the estimate as plain values."""
        totals = {"peak_moment": self.peak.name, "allocated_nbytes": self.allocated_nbytes}
        return asdict(self) | totals | {"total_nbytes": self.total_nbytes, "host_nbytes": self.host_nbytes}


def estimate_of(
    recorded: RecordedStep,
    *,
    rank: int,
    num_ranks: int,
    host: AbstractSet[str],
    context_nbytes: int,
    libraries_nbytes: int = 0,
    notes: tuple[str, ...] = (),
) -> Estimate:
    """Replay a recorded step.

    Args:
        recorded: The step.
        rank: The rank that the step was recorded for.
        num_ranks: The ranks of the run.
        host: Kinds that lie in the host's memory.
        context_nbytes: Bytes of the CUDA context.
        libraries_nbytes: Bytes of the libraries' work spaces, in all moments and between steps.
        notes: Sentences to print.
    """
    replay = _Replay(host)
    if libraries_nbytes:
        replay.apply(TrackedStorage(LIBRARIES, (), 0), libraries_nbytes, 0, counts=False)
    for change in recorded.log.changes:
        replay.apply(change.storage, change.nbytes, change.moment, counts=change.moment >= recorded.first_moment)
    moments = [
        MomentBytes(name=recorded.log.moments[index], nbytes=nbytes, kinds=kinds, host_nbytes=replay.host[index])
        for index, (nbytes, kinds) in replay.moments.items()
        if recorded.log.moments[index] != AT_REST
    ]
    at_rest = {kind: nbytes for kind, nbytes in replay.live.items() if nbytes}
    return Estimate(
        rank=rank,
        num_ranks=num_ranks,
        at_rest=_ordered({kind: n for kind, n in at_rest.items() if kind not in host and kind != IDLE_WINDOWS}),
        host_at_rest=_ordered({kind: nbytes for kind, nbytes in at_rest.items() if kind in host}),
        moments=tuple(moments),
        rounding_nbytes=sum(map(in_blocks, replay.peak)) - sum(replay.peak),
        window_nbytes=replay.most_taken_nbytes - sum(replay.peak),
        segment_nbytes=_in_segments(replay.peak) - sum(map(in_blocks, replay.peak)),
        context_nbytes=context_nbytes,
        work=work_of(recorded, replay.live),
        notes=notes,
    )


class _Replay:
    """Live bytes while the changes of a step are applied, and the most of each moment.

    Args:
        host: Kinds that lie in the host's memory.

    Attributes:
        live: Bytes by kind now.
        moments: Index of a moment -> the most bytes on the device, by kind too.
        host: Index of a moment -> the most bytes in the host's memory.
        peak: The sizes of the device's storages at the peak.
        most_taken_nbytes: The most bytes on the device with idle windows.
    """

    def __init__(self, host: AbstractSet[str]) -> None:
        self._host_kinds = host
        self._sizes: dict[TrackedStorage, int] = {}
        self._device_nbytes = self._host_nbytes = self._peak_nbytes = 0
        self.live: Counter[str] = Counter()
        self.moments: dict[int, tuple[int, dict[str, int]]] = {}
        self.host: Counter[int] = Counter()
        self.peak: list[int] = []
        self.most_taken_nbytes = 0

    def apply(self, storage: TrackedStorage, nbytes: int, moment: int, *, counts: bool) -> None:
        self.live[storage.kind] += nbytes
        if storage.kind in self._host_kinds:
            self._host_nbytes += nbytes
        elif storage.kind != IDLE_WINDOWS:
            self._device_nbytes += nbytes
            self._sizes[storage] = self._sizes.get(storage, 0) + nbytes
        if not counts:
            return
        self.host[moment] = max(self.host[moment], self._host_nbytes)
        self.most_taken_nbytes = max(self.most_taken_nbytes, self._device_nbytes + self.live[IDLE_WINDOWS])
        if self._device_nbytes > self.moments.get(moment, (-1, {}))[0]:
            self.moments[moment] = (self._device_nbytes, _ordered(self._on_device()))
        if self._device_nbytes > self._peak_nbytes:
            self._peak_nbytes = self._device_nbytes
            self.peak = [size for size in self._sizes.values() if size]

    def _on_device(self) -> dict[str, int]:
        return {
            kind: nbytes
            for kind, nbytes in self.live.items()
            if nbytes and kind not in (*self._host_kinds, IDLE_WINDOWS)
        }


def _ordered(kinds: Mapping[str, int]) -> dict[str, int]:
    return {kind: kinds[kind] for kind in KINDS if kind in kinds}


def _in_segments(sizes: list[int]) -> int:
    """Return the bytes of the segments that blocks of these sizes fill: those of torch's caching allocator."""
    small = sum(in_blocks(size) for size in sizes if size <= _SMALL)
    medium = sum(in_blocks(size) for size in sizes if _SMALL < size < _LARGE)
    large = sum(_multiple(size, _SMALL_SEGMENT) for size in sizes if size >= _LARGE)
    return _multiple(small, _SMALL_SEGMENT) + _multiple(medium, _MEDIUM_SEGMENT) + large


def _multiple(nbytes: int, of: int) -> int:
    return -(-nbytes // of) * of
