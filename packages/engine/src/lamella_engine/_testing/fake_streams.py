"""Streams without a device, with a record of each wait: a missing wait shows on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.nn as nn

from lamella_engine._testing.readers import named_units


class FakeStream:
    """A stream as a vector clock, without a device.

    Args:
        streams: The accelerator of the stream.

    Attributes:
        seen: The amount of each stream's work before the next work on this stream.
    """

    def __init__(self, streams: FakeStreams) -> None:
        self._streams = streams
        # The stream's own work too: `FakeStreams.work` counts here, and an event is a copy of the counts.
        self.seen: dict[FakeStream, int] = {self: 0}

    def wait_stream(self, other: FakeStream) -> None:
        """Order the next work on this stream after all work of another stream."""
        _merge(self.seen, other.seen)

    def wait_event(self, event: FakeEvent) -> None:
        """Order the next work on this stream after an event."""
        _merge(self.seen, event.seen)

    def record_event(self) -> FakeEvent:
        """Record an event after the stream's present work."""
        return FakeEvent(self._streams, dict(self.seen))


class WaitingStream:
    """Lists the streams and events of the stream's waits; stands for the stream's own events.

    Attributes:
        waited: Grows with each wait: streams by themselves, events by the recording stream.
    """

    def __init__(self) -> None:
        self.waited: list[object] = []
        self.wait_event = self.wait_stream = self.waited.append

    def record_event(self) -> WaitingStream:
        """The stream itself, in place of an event."""
        return self


@dataclass
class FakeEvent:
    """An event of a `FakeStream`.

    Attributes:
        streams: The accelerator of the stream.
        seen: The stream's `seen` when the event was recorded.
    """

    streams: FakeStreams
    seen: dict[FakeStream, int]

    def synchronize(self) -> None:
        """Let the host wait for the event: `num_host_waits` counts the wait."""
        self.streams.num_host_waits += 1
        _merge(self.streams.seen_by_host, self.seen)


@dataclass
class FakeWork:
    """A piece of work on a stream.

    Attributes:
        stream: The stream.
        count: Number of the work on the stream, from 1.
    """

    stream: FakeStream
    count: int

    def is_before(self, seen: dict[FakeStream, int]) -> bool:
        """Whether a stream or event with this `seen` is ordered after the work."""
        return seen.get(self.stream, 0) >= self.count


@dataclass
class FakeStreams:
    """Stands in for `torch.cuda` or `torch.cpu` as the accelerator of a tree.

    Attributes:
        num_host_waits: Number of waits of the host.
        seen_by_host: The amount of each stream's work awaited by the host.
        compute: The first current stream.
        current: The current stream.
    """

    num_host_waits: int = 0
    seen_by_host: dict[FakeStream, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.current = self.compute = FakeStream(self)

    def current_stream(self, device: torch.device) -> FakeStream:
        """The current stream, as torch's function of the name."""
        return self.current

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        """Make a stream current, as torch's function of the name."""
        before, self.current = self.current, stream
        yield
        self.current = before

    def work(self) -> FakeWork:
        """Put work on the current stream."""
        self.current.seen[self.current] += 1
        return FakeWork(self.current, self.current.seen[self.current])

    def Stream(self, priority: int) -> FakeStream:  # noqa: N802  torch's name
        """A further stream, as from torch's class of the name."""
        return FakeStream(self)


def fake_streams(model: nn.Module) -> FakeStreams:
    """Run a model on fake streams from now on, before the first pass.

    Args:
        model: The outermost unit, on a CPU.

    Returns:
        The accelerator of the model's tree.
    """
    streams = FakeStreams()
    for _, unit in named_units(model):
        # In place of torch's module, the engine's source of new streams and of the current stream.
        unit.parameters.context.streams._accelerator = streams  # type: ignore[assignment]  # streams without a device
    return streams


def _merge(seen: dict[FakeStream, int], other_seen: dict[FakeStream, int]) -> None:
    for stream, count in other_seen.items():
        # The later point of the two: a wait takes no earlier wait back.
        seen[stream] = max(seen.get(stream, 0), count)
