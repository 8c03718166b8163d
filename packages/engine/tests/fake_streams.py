"""Streams that do nothing but know what they were ordered after, so that a missing wait shows on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from engine_models import units
from torch import nn


class Stream:
    """What was put on it is counted; `seen` is how much of each stream comes before whatever is put on it next."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.seen: dict[Stream, int] = {self: 0}

    def wait_stream(self, other: Stream) -> None:
        _merge(self.seen, other.seen)

    def wait_event(self, event: Event) -> None:
        _merge(self.seen, event.seen)

    def record_event(self) -> Event:
        return Event(self._streams, dict(self.seen))


class WaitingStream:
    """Writes down what it is made to wait for: streams by themselves, events by the stream that recorded them."""

    def __init__(self) -> None:
        self.waited: list[object] = []
        self.wait_event = self.wait_stream = self.waited.append

    def record_event(self) -> WaitingStream:
        return self


@dataclass
class Event:
    streams: Streams
    seen: dict[Stream, int]

    def synchronize(self) -> None:
        self.streams.num_host_waits += 1
        _merge(self.streams.seen_by_host, self.seen)


@dataclass
class Work:
    """The last thing on a stream when it was noted."""

    stream: Stream
    count: int

    def is_before(self, seen: dict[Stream, int]) -> bool:
        return seen.get(self.stream, 0) >= self.count


@dataclass
class Streams:
    """Stands in for `torch.cpu` in a context."""

    num_host_waits: int = 0
    seen_by_host: dict[Stream, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.current = self.compute = Stream(self)

    def current_stream(self, device: torch.device) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def work(self) -> Work:
        """Put something on the current stream."""
        self.current.seen[self.current] += 1
        return Work(self.current, self.current.seen[self.current])

    # The last method: below it this name is the method's in the class.
    def Stream(self, priority: int) -> Stream:  # noqa: N802  torch's name
        return Stream(self)


def fake_streams(model: nn.Module) -> Streams:
    """Give a model that has not run yet such streams."""
    streams = Streams()
    for _, unit in units(model):
        unit.parameters.context.streams._accelerator = streams
    return streams


def _merge(into: dict[Stream, int], other: dict[Stream, int]) -> None:
    for stream, count in other.items():
        into[stream] = max(into.get(stream, 0), count)
