"""The streams of a tree of units: Note [Streams], the waits between streams, and the tensors held for reductions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import NamedTuple, Protocol

import torch


class Reduction(NamedTuple):
    """A collective in flight, and the tensors of other streams read by the collective.

    `Streams` drops the tensors only after their allocating streams wait for `event`: freed earlier, the memory would be
    written while the collective still reads.
    """

    event: torch.Event
    reads: Sequence[torch.Tensor | None]
    allocated_on: Sequence[torch.Stream] = ()  # the caller's at the time, and delayed gradients
    frees: Sequence[Callable[[], None]] = ()  # called when dropped: free buffers with other references


class Accelerator(Protocol):
    """The part of `torch.cuda` and `torch.cpu` that a tree's streams use."""

    def current_stream(self, device: int | None) -> torch.Stream:
        """Return the current stream of a device."""
        ...

    def stream(self, stream: torch.Stream) -> AbstractContextManager[None]:
        """Make a stream current in the block."""
        ...

    def Stream(self, *, priority: int) -> torch.Stream:  # noqa: N802  torch's name
        """Make a stream."""
        ...


class Streams:
    """The streams of a tree, and the work in flight on them.

    Note [Streams]. Gathers run on the gather stream and reductions on the reduce stream: both overlap with compute and
    with each other. Ten rules order each read of a buffer after the writes, and each reuse of memory after the last
    read:
    1. When a pass begins, and at each gather outside of passes, the gather stream waits for the compute stream: the
       optimizer, a load or the user wrote the shards there. A gather inside an optimizer's step waits too: the step has
       updated the unit's shards by then, and the shards updated later belong to other units.
    2. Before a module reads an unsharded buffer, the compute stream waits for the gather's event.
    3. Before an unsharded buffer is freed, the gather stream waits for the compute stream. The gather stream allocated
       the buffer, so the next user of the memory is ordered after the last reader. This wait also bounds memory: a
       gather cannot run ahead of the compute that frees the gather's place.
    4. Before gradients are read, or added to earlier gradients, the reduce stream waits for the compute stream.
    5. Before a reduction's input gradients are freed, their allocating streams wait for the reduction's event.
    6. Second reductions (over replicas or the outer axis) and casts run on the all-reduce stream, which waits for the
       first reduction of the same gradients. A cast on the reduce stream would delay the next reduction.
    7. Before the input of an older second reduction or cast is freed, the reduce stream, which allocated the input,
       waits for the all-reduce stream's event.
    8. At the end of a step's last backward, the compute stream waits for the reduce and all-reduce streams. An
       optimizer may take over this wait: its step waits for some units' gradients before updating these units, and for
       all gradients before going on. Every other reader of gradients waits for all reductions first.
    9. Offloaded shards are copied to the device on the gather stream, and gradients to the CPU on the stream that
       reduced or cast them. The device ends of these copies are allocated and read on these streams alone.
    10. The host waits once, at the end of backward, for the compute stream, which has waited for both kinds of copies
       by then. Now the optimizer may read gradients on the CPU, and write shards without a copy still reading them.
       After another forward in between, the step of a `torch.optim` optimizer waits for the later gathers.
    The compute stream is the current stream. A schedule with several compute streams calls the verbs on a stream that
    is ordered after all users of the unit. The engine itself also waits for streams on which a hold was released or a
    delayed gradient was made.
    On CPU torch's own null streams stand in, and the same code runs.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.shown: dict[object, object] = {}  # the view of the streams that torch's tools get
        # torch.cuda, or torch.cpu with streams that do nothing
        self._accelerator: Accelerator = torch.get_device_module(device)
        # The user's (`set_post_optim_event`), for the gathers of one forward; cleared when they have waited for it, and
        # where shards are written after it was recorded.
        self.post_optim_event: torch.Event | None = None
        # In the order of the reduce stream, oldest first: an event stands for all reductions before it. Trees that
        # share streams share both queues.
        self._reductions: deque[Reduction] = deque()
        self._all_reductions: deque[Reduction] = deque()
        # From a reduction's copy to the CPU until the host has waited at the end of backward.
        self._are_gradients_arriving = False
        self.reads_shards = False  # the gather stream read CPU shards since the host last waited for the stream
        # Hooks of `register_post_accumulate_grad_hook`, called after that wait. A dict: each once, in their order.
        self._on_arrival: dict[Callable[[], None], None] = {}

    @cached_property
    def all_gather_stream(self) -> torch.Stream:
        """Allocates, fills and frees unsharded buffers."""
        return self._new_stream()

    @cached_property
    def reduce_scatter_stream(self) -> torch.Stream:
        """Stages and reduces gradients."""
        return self._new_stream()

    @cached_property
    def all_reduce_stream(self) -> torch.Stream:
        """Reduces gradients a second time, over replicas or the outer axis, and casts gradients."""
        return self._new_stream()

    @property
    def compute_stream(self) -> torch.Stream:
        """The stream that the caller runs on."""
        # By index: torch takes microseconds to find a device's own.
        stream: torch.Stream = self._accelerator.current_stream(self.device.index)
        return stream

    def on(self, stream: torch.Stream) -> AbstractContextManager[None]:
        """Make a stream current."""
        entered: AbstractContextManager[None] = self._accelerator.stream(stream)
        return entered

    def _new_stream(self) -> torch.Stream:
        # High priority: otherwise a ready collective queues behind an independent matmul.
        stream: torch.Stream = self._accelerator.Stream(priority=-1)
        return stream

    @property
    def is_captured(self) -> bool:
        """Whether work put on the compute stream goes into a CUDA graph, and does not run now."""
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def run_on(self, accelerator: Accelerator) -> None:
        """Ask an accelerator for streams from now on. No work may be in flight on earlier streams."""
        self._accelerator = accelerator
        for name in ("all_gather_stream", "reduce_scatter_stream", "all_reduce_stream"):
            self.__dict__.pop(name, None)  # of the former accelerator, in the cached properties

    def use_streams_of(self, other: Streams) -> None:
        """Put later work on another tree's streams, and count both trees' reductions in flight together.

        No work may be in flight on the own streams: the shared streams would not wait.
        """
        self.all_gather_stream = other.all_gather_stream
        self.reduce_scatter_stream = other.reduce_scatter_stream
        self.all_reduce_stream = other.all_reduce_stream
        self._reductions = other._reductions
        self._all_reductions = other._all_reductions
        self.shown = other.shown  # a view of the streams left behind would show tools streams without work

    # -- gathers -----------------------------------------------------------------------------------------------------

    def order_gathers_after_compute(self) -> None:
        """Make later work on the gather stream wait for all work on the compute stream so far."""
        self.all_gather_stream.wait_stream(self.compute_stream)

    def order_gathers_after_updates(self) -> None:
        """The same, or wait only for the event that the user recorded after the optimizer's step."""
        if self.post_optim_event is None:
            self.order_gathers_after_compute()
        else:
            self.all_gather_stream.wait_event(self.post_optim_event)
            self.post_optim_event = None  # kept, the event would let gathers pass the next update

    # -- reductions --------------------------------------------------------------------------------------------------

    def hold(self, reduction: Reduction) -> None:
        """Keep a reduction's gradients alive until `retire_all_but` pops the reduction."""
        self._reductions.append(reduction)

    def retire_all_but(self, num_in_flight: int) -> None:
        """Release the gradients of earlier reductions, but for as many reductions as may stay in flight.

        One reduction may stay in flight beside a new one unless a unit asked for more, so at most two units' gradients
        are alive: one unit's being reduced, the next unit's being made.

        Effects: the compute stream waits for the reductions; no host sync.
        """
        while len(self._reductions) > num_in_flight:
            # The last reference to the gradients, whose memory goes back to the allocating streams. Without the waits
            # backward would write new gradients there while the collective still reads.
            reduction = self._reductions[0]
            for stream in {self.compute_stream, *reduction.allocated_on}:
                stream.wait_event(reduction.event)
            self._reductions.popleft()  # only now: an interrupt before the waits leaves the reduction to wait for
            for free in reduction.frees:
                free()

    def hold_all_reduce(self, reduction: Reduction) -> None:
        """Hold the input of a second reduction until the allocating stream, the reduce stream, waits for the event."""
        self._all_reductions.append(reduction)
        if len(self._all_reductions) > 2:
            self.reduce_scatter_stream.wait_event(self._all_reductions[0].event)
            self._all_reductions.popleft()

    def finish_reductions(self) -> None:
        """Order the compute stream after every reduction, and release the reductions' inputs.

        Effects: where gradients go to the CPU, the host waits for the compute stream.
        """
        if self._reductions:
            # The events are not enough: divisions, casts and adds of gradients come later on the stream.
            self.compute_stream.wait_stream(self.reduce_scatter_stream)
        self.retire_all_but(0)
        while self._all_reductions:
            event = self._all_reductions[0].event
            self.compute_stream.wait_event(event)
            self.reduce_scatter_stream.wait_event(event)  # allocated the input, and may hand out the memory next
            self._all_reductions.popleft()
        self._wait_for_gradients()

    # -- the host ----------------------------------------------------------------------------------------------------

    @property
    def are_gradients_arriving(self) -> bool:
        """Whether gradients are on their way to the CPU."""
        return self._are_gradients_arriving

    @property
    def has_arrival_hooks(self) -> bool:
        """Whether hooks wait for gradients to arrive on the CPU."""
        return bool(self._on_arrival)

    def forget_arrivals(self) -> None:
        """Drop the hooks that wait for gradients: the step was dropped."""
        self._on_arrival.clear()

    def expect_gradients(self, on_arrival: Sequence[Callable[[], None]]) -> None:
        """Note that gradients are on their way to the CPU.

        Args:
            on_arrival: Called after arrival, at the end of this backward; once, however often a hook is noted.
        """
        self._are_gradients_arriving = True
        self._on_arrival.update(dict.fromkeys(on_arrival))

    def _wait_for_gradients(self) -> None:
        """Let the host wait for the compute stream, which has waited for the copies of gradients to the CPU."""
        if not self._are_gradients_arriving:
            return
        _wait_on_host(self.compute_stream)
        self._are_gradients_arriving = self.reads_shards = False
        on_arrival, self._on_arrival = self._on_arrival, {}
        with torch.no_grad():
            for call in on_arrival:
                call()

    def wait_for_shards(self) -> None:
        """Let the host wait until gathers have read the shards on the CPU: the caller may write the shards next.

        Effects: a host sync if a gather started since the last host sync, else none.
        """
        if self.reads_shards:
            _wait_on_host(self.all_gather_stream)
            self.reads_shards = False


def _wait_on_host(stream: torch.Stream) -> None:
    event: torch.Event | None = stream.record_event()
    if event is not None:  # torch's CPU streams record none
        event.synchronize()
