"""The streams of a tree of units, what waits for what on them, and what is held until they are done with it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import NamedTuple

import torch


class Reduction(NamedTuple):
    """A collective that was put on a stream, and the tensors of other streams that it reads.

    They are held here, and dropped only after the streams that allocated them were made to wait for `event`: freed
    earlier, their memory would be written while it is still read.
    """

    event: torch.Event
    reads: list[torch.Tensor]
    allocated_on: tuple[torch.Stream, ...] = ()  # the caller's at the time, and others
    frees: tuple[Callable[[], None], ...] = ()  # to call when dropped: buffers that somebody else still refers to


class Streams:
    """The streams of a tree, and what is under way on them.

    Note [Streams]. Gathers run on one stream and reductions on another, so that each overlaps with compute and with
    the other. These waits make this right:
    1. The gather stream waits for the compute stream when a pass begins, and at each gather outside of passes: the
       optimizer, a load or the user wrote the shards there. So does a gather inside an optimizer's step, which comes
       behind the update of what it reads; what the step updates after that, no such gather reads.
    2. The gather stream waits for the compute stream before an unsharded buffer is freed: the buffer was allocated on
       the gather stream, so whatever gets its memory next is ordered after the last reader. This is also what bounds
       memory: a gather cannot run ahead of the compute that frees its place.
    3. The reduce stream waits for the compute stream before it reads gradients (and before it adds to earlier ones).
    4. What is reduced once more, over replicas or the outer axis, is so on the all-reduce stream, which waits for each
       reduction; and what is only cast is cast there, so that the next reduction does not wait for it. The reduce
       stream waits for an older one before what that read is freed, and the compute stream for all of them at the end
       of the step's last backward. Where an optimizer was asked to, it waits in its place: for the gradients of some
       units before it updates these, and for all before it goes on. Who else looks at gradients waits for all before.
    5. Shards that rest on the CPU are copied from there on the gather stream, and their gradients to there on the
       stream that reduced or cast them. What the copies have on the device is allocated and read on these streams
       alone. The host waits once: at the end of backward, for the compute stream, which has waited for both by then.
       After it the optimizer may read gradients, and write shards that no copy reads any more. If there was another
       forward in between, it waits for that one's gathers when an optimizer of torch's steps.
    The compute stream is whatever stream is current. A schedule that uses several calls the verbs on one that is
    ordered after those that used the unit; where the engine knows of others (who let go of a hold, where a delayed
    gradient was made), it waits for them too.
    On CPU torch's own null streams stand in, and the same code runs.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.shown: dict[object, object] = {}  # what torch's tools see of the streams
        self._accelerator = torch.get_device_module(device)  # torch.cuda, or torch.cpu with streams that do nothing
        self.post_optim_event: torch.Event | None = None
        self._reductions: deque[Reduction] = deque()
        self._all_reductions: deque[Reduction] = deque()
        self.leaves_reductions = False  # at the end of this backward: to an optimizer that waits for them
        self.is_left = False  # gradients of the last backward are still being reduced, and nobody has waited for them
        self._awaits_gradients = False
        self.reads_shards = False
        self._on_arrival: dict[Callable[[], None], None] = {}

    @cached_property
    def all_gather_stream(self) -> torch.Stream:
        """Where buffers are allocated, filled and freed."""
        return self._new_stream()

    @cached_property
    def reduce_scatter_stream(self) -> torch.Stream:
        """Where gradients are staged and reduced."""
        return self._new_stream()

    @cached_property
    def all_reduce_stream(self) -> torch.Stream:
        """Where reduced gradients are reduced again, over replicas or the outer axis, and cast."""
        return self._new_stream()

    @property
    def compute_stream(self) -> torch.Stream:
        """The stream that the caller runs on."""
        stream: torch.Stream = self._accelerator.current_stream(self.device)
        return stream

    def on(self, stream: torch.Stream) -> AbstractContextManager[None]:
        """Make a stream current."""
        entered: AbstractContextManager[None] = self._accelerator.stream(stream)
        return entered

    def _new_stream(self) -> torch.Stream:
        # High priority: a collective that is ready should not queue behind a matmul that is not waiting for it.
        stream: torch.Stream = self._accelerator.Stream(priority=-1)
        return stream

    @property
    def is_captured(self) -> bool:
        """Whether what is put on the compute stream goes into a CUDA graph, and does not run now."""
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def use_streams_of(self, other: Streams) -> None:
        """Put what comes on another tree's streams, and let its reductions in flight and ours count as one.

        Nothing may be under way on the streams so far.
        """
        self.all_gather_stream = other.all_gather_stream
        self.reduce_scatter_stream = other.reduce_scatter_stream
        self.all_reduce_stream = other.all_reduce_stream
        self._reductions = other._reductions
        self._all_reductions = other._all_reductions
        self.shown = other.shown

    # -- gathers -----------------------------------------------------------------------------------------------------

    def order_gathers_after_compute(self) -> None:
        """Make what comes on the gather stream wait for what was put on the compute stream so far."""
        self.all_gather_stream.wait_stream(self.compute_stream)

    def order_gathers_after_updates(self) -> None:
        """The same, or only for the event after which the optimizer was said to be done."""
        if self.post_optim_event is None:
            self.order_gathers_after_compute()
        else:
            self.all_gather_stream.wait_event(self.post_optim_event)
            self.post_optim_event = None

    # -- reductions --------------------------------------------------------------------------------------------------

    def hold(self, reduction: Reduction) -> None:
        """Keep a reduction's gradients alive until it is retired."""
        self._reductions.append(reduction)

    def _retire_all_but(self, num_left: int) -> None:
        while len(self._reductions) > num_left:
            reduction = self._reductions.popleft()
            for stream in {self.compute_stream, *reduction.allocated_on}:
                stream.wait_event(reduction.event)
            for free in reduction.frees:
                free()

    def hold_all_reduce(self, reduction: Reduction) -> None:
        """Keep what a second reduction reads until the reduce stream, which allocated it, was made to wait for it."""
        self._all_reductions.append(reduction)
        if len(self._all_reductions) > 2:
            self.reduce_scatter_stream.wait_event(self._all_reductions.popleft().event)

    def finish_reductions(self) -> None:
        """Order the compute stream after every reduction, and let go of what they read.

        Effects: where gradients go to the CPU, the host waits for the compute stream.
        """
        self.is_left = False
        self.leaves_reductions = False
        if self._reductions:
            # For more than their events: gradients are divided, cast and added to after those.
            self.compute_stream.wait_stream(self.reduce_scatter_stream)
        self._retire_all_but(0)
        while self._all_reductions:
            event = self._all_reductions.popleft().event
            self.compute_stream.wait_event(event)
            self.reduce_scatter_stream.wait_event(event)
        self._wait_for_gradients()

    def leave_reductions(self) -> None:
        """Leave the last backward's reductions to whoever looks at gradients next."""
        self.leaves_reductions = False
        self.is_left = True

    def finish_left(self) -> None:
        """Finish what the last backward has left; nothing if nothing is.

        Effects: those of `finish_reductions`.
        """
        if self.is_left:
            self.finish_reductions()

    # -- the host ----------------------------------------------------------------------------------------------------

    def expect_gradients(self, on_arrival: Sequence[Callable[[], None]]) -> None:
        """Note that gradients are on their way to the CPU.

        Args:
            on_arrival: What to call when they are there, at the end of this backward; once, however often it is noted.
        """
        self._awaits_gradients = True
        self._on_arrival.update(dict.fromkeys(on_arrival))

    def _wait_for_gradients(self) -> None:
        """Let the host wait for the compute stream, which has waited for the gradients that go to the CPU."""
        if not self._awaits_gradients:
            return
        self._awaits_gradients = self.reads_shards = False
        _wait_on_host(self.compute_stream)
        on_arrival, self._on_arrival = self._on_arrival, {}
        with torch.no_grad():
            for call in on_arrival:
                call()

    def note_shards_are_read(self) -> None:
        """Note that the gather stream will read shards on the CPU."""
        if not self.reads_shards:
            self.reads_shards = True

    def wait_for_shards(self) -> None:
        """Let the host wait until shards on the CPU have been read: somebody may be about to write them.

        Effects: a host sync if there was a gather since the last one, else none.
        """
        if self.reads_shards:
            self.reads_shards = False
            _wait_on_host(self.all_gather_stream)


def _wait_on_host(stream: torch.Stream) -> None:
    event: torch.Event | None = stream.record_event()
    if event is not None:  # torch's CPU streams record none
        event.synchronize()
