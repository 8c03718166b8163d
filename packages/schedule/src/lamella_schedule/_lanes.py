"""The streams behind the lanes, and the waits that order them.

Note [Waits]. Four rules order each read after the write, and each reuse of memory after the last read:
1. The nodes of a chunk are a chain over both streams: each waits for the event behind the node before. Nodes of two
   chunks wait for nothing of each other, and so overlap. One event for both chunks would run them one after the other.
2. A chain begins with an event on the caller's stream: the optimizer wrote parameters there, the caller wrote inputs
   and gradients. Without the event the communication stream could read memory that is not yet written, or hand out
   memory whose last reader on the caller's stream has not run.
3. At the end the caller's stream waits for the chain. Without the wait the optimizer could read gradients that are
   still written, and the memory of the caller's tensors could be written again while the communication stream reads.
4. A tensor that a node reads is marked by `record_stream`. Memory belongs to the stream that allocated it: a block goes
   back to this stream when the host drops the last reference, and the next write there would not wait for the reader
   on the other stream. The mark makes the allocator wait, also for tensors saved by autograd: they are dropped in the
   middle of a backward, where no wait can be placed. The price: a marked block is free when the device gets there,
   not when the host does.
Delayed weight gradients stand outside the chain, behind their slot's backward on the compute stream: in the chain, the
all-to-all that they hide would wait for them. The compute stream is the caller's, so rule 3 holds for them too.

A CPU has torch's null streams, and the same code runs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from lamella_schedule._events import Lane


class Lanes:
    """The streams of one run: the caller's for compute, another for communication.

    Args:
        device: The device of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        device = torch.empty(0, device=device).device  # with its index, as streams are made for it
        self.device = device
        self._module = _module(device)
        self._streams = {
            Lane.COMPUTE: self._module.current_stream(device),
            Lane.COMMUNICATION: _communication_stream(device),
        }
        self._has_streams = self._module is not torch.cpu

    def stream(self, lane: Lane) -> Any:
        """Return the stream of a lane."""
        return self._streams[lane]

    def on(self, lane: Lane) -> AbstractContextManager[object]:
        """Make a lane's stream current."""
        entered: AbstractContextManager[object] = self._module.stream(self._streams[lane])
        return entered

    def current(self) -> Any:
        """Return the current stream."""
        return self._module.current_stream(self.device)

    def mark_read(self, values: Iterable[object]) -> None:
        """Keep the memory of tensors from its next writer until the current stream has read it: rule 4."""
        if not self._has_streams:
            return
        stream = self.current()
        for value in values:
            if isinstance(value, torch.Tensor) and value.device.type == self.device.type:
                value.record_stream(stream)  # ignored by the allocator on the stream that allocated

    def join(self) -> None:
        """Order each stream after the other: whatever comes next may read and write anything."""
        compute, communication = self._streams.values()
        compute.wait_stream(communication)
        communication.wait_stream(compute)


class Chain:
    """The order of one chunk's nodes over both streams: Note [Waits]."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._event: Any = None

    def begin(self) -> None:
        """Order the nodes that follow after the caller's stream, and after the nodes before: rule 2."""
        stream = self._lanes.current()
        if self._event is not None:
            stream.wait_event(self._event)
        self._event = stream.record_event()

    @contextmanager
    def on(self, lane: Lane) -> Iterator[None]:
        """Run a node on a lane's stream, behind the node before."""
        stream = self._lanes.stream(lane)
        stream.wait_event(self._event)
        with self._lanes.on(lane):
            yield
        self._event = stream.record_event()

    def end(self) -> None:
        """Order the caller's stream after the last node, and after the delayed weight gradients: rule 3."""
        stream = self._lanes.current()
        stream.wait_event(self._event)
        stream.wait_stream(self._lanes.stream(Lane.COMPUTE))


def _module(device: torch.device) -> Any:
    module = torch.get_device_module(device)
    return module if hasattr(module, "Stream") else torch.cpu


@functools.cache
def _communication_stream(device: torch.device) -> Any:
    # One for all runs: memory that was allocated on a stream is used again on that stream alone. High priority, as a
    # ready all-to-all should not queue behind an independent matmul.
    module = _module(device)
    return module.Stream(priority=-1) if module is torch.cpu else module.Stream(device=device, priority=-1)
