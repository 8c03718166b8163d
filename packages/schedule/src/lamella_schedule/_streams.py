"""The work of a step on the streams of a GPU becomes a timeline: operations, their waits, and the host's launches."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOperation:
    """A kernel, a copy or a collective on a stream.

    Attributes:
        stream: The number of the stream. Operations of a stream run in order.
        seconds: Duration alone on the GPU.
        after: Indices of awaited earlier operations, of other streams.
        launch_seconds: Time of the host from the launch before to the operation's launch.
        is_slowed: Whether work on other streams takes multiprocessors or memory bandwidth from the operation.
    """

    stream: int
    seconds: float
    after: tuple[int, ...] = ()
    launch_seconds: float = 0.0
    is_slowed: bool = True


@dataclass(frozen=True, slots=True)
class StreamSpan:
    """The time of an operation: launched by the host, begun and ended on its stream, in seconds."""

    launched: float
    start: float
    stop: float


def simulate_streams(
    operations: Sequence[StreamOperation], *, slowdown: float = 1.0, most_launched: int = 1024
) -> list[StreamSpan]:
    """Run operations on their streams.

    An operation starts after the host's launch, the stop of the operation before on the stream, and the stops of all
    awaited operations. Beside an operation of another stream, a slowed operation takes `slowdown` times as long, and
    longer by the same part for each further stream.

    Args:
        operations: The operations of all streams, in the order of the host's launches.
        slowdown: From 1 on.
        most_launched: Operations launched ahead of the GPU at most, from 1 on: CUDA's queue.

    Returns:
        The span of each operation.

    Raises:
        ValueError: An operation waits for itself or a later operation, or its time is negative or not finite; or
            `slowdown` or `most_launched` is below 1.
    """
    if not 1 <= slowdown < math.inf:
        raise ValueError(f"Expected a finite slowdown from 1 on, got {slowdown}. Give 1 for streams that run freely.")
    if most_launched < 1:
        raise ValueError(f"Expected most_launched to be 1 or more, got {most_launched}. Give room for one operation.")
    for index, operation in enumerate(operations):
        if any(not 0 <= other < index for other in operation.after):
            raise ValueError(
                f"Expected operation {index} to wait for earlier operations, got {operation.after}. List operations "
                "in the order of their launches."
            )
        for seconds in (operation.seconds, operation.launch_seconds):
            if not 0 <= seconds < math.inf:  # the simulation would never come to a stop after NaN
                raise ValueError(
                    f"Expected finite seconds from 0 on, got {seconds} in operation {index}. Give the measured time."
                )
    return _StreamSimulation(operations, slowdown, most_launched).run()


class _StreamSimulation:
    """The simulation: launched operations, running operations, and the present."""

    def __init__(self, operations: Sequence[StreamOperation], slowdown: float, most_launched: int) -> None:
        self._operations, self._slowdown, self._most_launched = operations, slowdown, most_launched
        self._now = 0.0
        self._queues: dict[int, deque[int]] = {}
        self._running: dict[int, list[float]] = {}  # index -> remaining seconds, and start
        self._launched: list[float] = []
        self._next_launch: float | None = None  # None while the queue is full, and at the end
        self._num_stopped = 0
        self._spans: list[StreamSpan | None] = [None] * len(operations)

    def run(self) -> list[StreamSpan]:
        self._plan_launch()
        while self._num_stopped < len(self._operations):
            self._start_ready()
            self._advance()
        return [span for span in self._spans if span is not None]

    def _plan_launch(self) -> None:
        index = len(self._launched)
        has_room = index - self._num_stopped < self._most_launched
        if self._next_launch is None and index < len(self._operations) and has_room:
            self._next_launch = self._now + self._operations[index].launch_seconds

    def _start_ready(self) -> None:
        for queue in self._queues.values():
            if queue and queue[0] not in self._running:
                operation = self._operations[queue[0]]
                if all(self._spans[other] is not None for other in operation.after):
                    self._running[queue[0]] = [operation.seconds, self._now]

    def _advance(self) -> None:
        """Go on to the next stop or launch."""
        slowdown = 1.0 + (self._slowdown - 1.0) * max(0, len(self._running) - 1)
        rates = {i: 1 / slowdown if self._operations[i].is_slowed else 1.0 for i in self._running}
        stops = [remaining / rates[i] for i, (remaining, _) in self._running.items()]
        step = min([*stops, *([] if self._next_launch is None else [self._next_launch - self._now])])
        is_launch = self._next_launch is not None and self._next_launch - self._now <= step
        for i, progress in [*self._running.items()]:
            is_over = progress[0] / rates[i] <= step
            progress[0] -= step * rates[i]
            if is_over:
                self._stop(i, self._now + step)
        self._now += step
        if is_launch:
            self._queues.setdefault(self._operations[len(self._launched)].stream, deque()).append(len(self._launched))
            self._launched.append(self._now)
            self._next_launch = None
        self._plan_launch()

    def _stop(self, index: int, now: float) -> None:
        _, start = self._running.pop(index)
        self._queues[self._operations[index].stream].popleft()
        self._spans[index] = StreamSpan(self._launched[index], start, now)
        self._num_stopped += 1
