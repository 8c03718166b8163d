"""Recording the works of a step on streams, while an estimate runs the step on tensors without memory.

Note [Streams of a recording]
    The engine asks an accelerator for streams, and orders the streams by waits. The recording's accelerator hands out
    streams without a device, and each operator becomes a work of the current stream: the order of the works and the
    waits are the engine's own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lamella._estimate.announced_kernels import announced_kernels
from lamella._estimate.live_bytes import LiveBytes
from lamella._estimate.recorded_step import TrainingStep
from lamella._plan.operators import cost_of
from lamella._plan.works import Work, WorkKind
from lamella_buffers import FakeCollective, fake_collectives
from lamella_engine.extending import run_on, watched_ranges

_KINDS: Final[Mapping[str, WorkKind]] = {
    "all_gather": WorkKind.GATHER,
    "reduce_scatter": WorkKind.REDUCE,
    "exchange": WorkKind.REDUCE,
    "all_reduce": WorkKind.REDUCE,
}


class RecordedStream:
    """A stream of a recording: the last work, and the works awaited by the next."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.last: int | None = None
        self.pending: frozenset[int] = frozenset()

    def record_event(self) -> "RecordedEvent":
        """Return an event behind the stream's present work."""
        return RecordedEvent(self.pending | ({self.last} if self.last is not None else set()))

    def wait_event(self, event: "RecordedEvent") -> None:
        """Order later work after an event."""
        self.pending |= event.works

    def wait_stream(self, other: "RecordedStream") -> None:
        """Order later work after the present work of another stream."""
        if other is not self:
            self.wait_event(other.record_event())


class RecordedEvent:
    """The works before an event."""

    def __init__(self, works: frozenset[int]) -> None:
        self.works = works

    def synchronize(self) -> None:
        """Nothing: the host does not wait in a recording."""


class RecordedStreams:
    """Stands in for `torch.cuda`: see Note [Streams of a recording]."""

    def __init__(self) -> None:
        self._num_streams = 1
        self.current = RecordedStream(0)

    def current_stream(self, device: int | None) -> Any:
        """Return the current stream."""
        return self.current

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        """Make a stream current."""
        former, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = former

    def Stream(self, *, priority: int) -> Any:  # noqa: N802  torch's name
        """Return a further stream."""
        self._num_streams += 1
        return RecordedStream(self._num_streams - 1)


class WorkRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the works of a step in the block.

    Args:
        moments: The names of the moments, a growing list: the last is the present.

    Attributes:
        works: The recorded works.
        moment_of: The index of each work's moment.
    """

    def __init__(self, moments: Sequence[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.works: list[Work] = []
        self.moment_of: list[int] = []
        self.streams = RecordedStreams()
        self._moments = moments
        self._units: list[str] = []
        self._num_views = 0

    def __torch_dispatch__(  # type: ignore[no-untyped-def]
        self, func, types, args=(), kwargs=None
    ):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # The operators on the tensors inside come here again.
        output = func(*args, **(kwargs or {}))
        cost = cost_of(func, args, kwargs or {}, output)
        if cost is None:
            self._num_views += 1
        else:
            self._append(cost.kind, func.__name__, cost.flops, cost.nbytes, dtype=cost.dtype)
        return output

    def note_kernel(self, name: str, nbytes: int) -> None:
        """Record a kernel announced by the estimate's stand-ins."""
        kind = WorkKind.OPTIMIZER if name.startswith("_fused") else WorkKind.ELEMENTWISE
        self._append(kind, name, 0.0, nbytes)

    def note_collective(self, collective: FakeCollective) -> None:
        """Record a collective on the current stream."""
        kind = _KINDS[collective.kind]
        self._append(kind, collective.kind, 0.0, collective.sum_nbytes, collective=collective)

    @contextmanager
    def in_range(self, phase: str, unit: str) -> Iterator[None]:
        """Take the collectives of the block as a unit's."""
        self._units.append(unit or "(root)")
        try:
            yield
        finally:
            self._units.pop()

    def _append(
        self,
        kind: WorkKind,
        name: str,
        flops: float,
        nbytes: float,
        *,
        collective: FakeCollective | None = None,
        dtype: str = "",
    ) -> None:
        stream = self.streams.current
        after = tuple(sorted(stream.pending))
        unit = self._units[-1] if self._units else ""
        moment = self._moments[-1]
        self.moment_of.append(len(self._moments) - 1)
        self.works.append(
            Work(
                kind=kind,
                name=name,
                stream=stream.number,
                after=after,
                flops=flops,
                nbytes=nbytes,
                moment=moment,
                unit=unit,
                collective=collective,
                num_views=self._num_views,
                dtype=dtype,
            )
        )
        stream.last, stream.pending, self._num_views = len(self.works) - 1, frozenset(), 0


def recorder_watch(recorders: list[WorkRecorder]) -> Callable[[TrainingStep, LiveBytes], Any]:
    """Return a watch of `record_recipe` that appends each recorder to a list."""

    @contextmanager
    def watch(step: TrainingStep, live: LiveBytes) -> Iterator[None]:
        recorder = WorkRecorder(live.log.moments)
        recorders.append(recorder)
        run_on(step.model, recorder.streams)
        with ExitStack() as contexts:
            contexts.enter_context(fake_collectives(recorder.note_collective))
            contexts.enter_context(announced_kernels(recorder.note_kernel))
            contexts.enter_context(watched_ranges(recorder.in_range))
            contexts.enter_context(recorder)
            yield

    return watch
