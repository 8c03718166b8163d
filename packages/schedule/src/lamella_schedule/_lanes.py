"""The streams behind the lanes, and the waits that order them.

Note [Waits]. Four rules order each read after the write, and each reuse of memory after the last read:
1. The nodes of a chunk are a chain over both streams: each node waits for the event recorded after the node before.
   Nodes of two chunks wait for nothing of each other, and so overlap. With a single event for both chunks, each node
   would wait for both chunks.
2. A pair begins with the compute stream behind the caller's: the optimizer wrote parameters there, the caller wrote
   inputs and gradients. Without the wait, lanes made under a different stream would read unwritten memory. The
   communication stream follows, as the first node of a pass is on the compute stream: no communication reads
   parameters too early, or reuses memory before the last reader on the caller's stream.
3. A pair ends with the caller's stream behind the compute stream, which runs the last node of a pass, and so behind the
   communication stream too. Without the wait the optimizer could read unfinished gradients, and memory of the caller's
   tensors could be written while the communication stream reads.
4. A node marks the tensors of its input by `record_stream`. Memory belongs to the stream of its allocation: when the
   host drops the last reference, the next write from this stream would not wait for a reader on the second stream. The
   mark makes the allocator wait, also for tensors saved by autograd, which drops saved tensors in the middle of a
   backward, where no wait can be placed. The price: marked memory is free when the device gets there, not when the
   host does.
Delayed weight gradients stay outside the chain, behind their slot's backward on the compute stream: inside the chain,
the hidden all-to-all would wait for the weight gradients. Rule 3 holds for weight gradients too.

A CPU has torch's null streams, and the same code runs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from lamella_schedule._events import Lane

NOTHING = nullcontext()


class Lanes:
    """The streams of a run: the current stream for compute, a second stream for communication.

    Args:
        device: The device of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        device = torch.empty(0, device=device).device  # with an index, for the streams
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

    def on_compute(self) -> AbstractContextManager[object]:
        """Make the compute stream current, around the events of a pair: most are on this stream, and switch nothing."""
        entered: AbstractContextManager[object] = self._module.stream(self._streams[Lane.COMPUTE])
        return entered

    def on(self, lane: Lane) -> AbstractContextManager[object]:
        """Make a lane's stream current, inside `on_compute`."""
        if lane is Lane.COMPUTE:
            return NOTHING
        entered: AbstractContextManager[object] = self._module.stream(self._streams[lane])
        return entered

    def current(self) -> Any:
        """Return the current stream."""
        return self._module.current_stream(self.device)

    def mark_read(self, values: Iterable[object]) -> None:
        """Mark the memory of tensors as read by the current stream: rule 4.

        Raises:
            ValueError: A tensor is on another device of the lanes' type.
        """
        if not self._has_streams:
            return
        stream = self.current()
        for value in values:
            if isinstance(value, torch.Tensor) and value.device.type == self.device.type:
                if value.device != self.device:  # the lanes' streams order nothing on another device
                    raise ValueError(
                        f"Expected tensors on the device of the lanes, {self.device}, got a tensor on {value.device}. "
                        "Give device=, or call set_device before the run."
                    )
                value.record_stream(stream)  # ignored by the allocator for the stream of the allocation

    def begin(self) -> None:
        """Order later work after the caller's stream: rule 2."""
        compute, caller = self._streams[Lane.COMPUTE], self.current()
        if compute != caller:
            compute.wait_stream(caller)

    def end(self) -> None:
        """Order the caller's stream after all passes that are over: rule 3."""
        compute, caller = self._streams[Lane.COMPUTE], self.current()
        if compute != caller:
            caller.wait_stream(compute)

    def join(self) -> None:
        """Order each stream after all work so far, before memory is freed out of turn."""
        compute, communication = self._streams.values()
        compute.wait_stream(communication)
        communication.wait_stream(compute)


class Chain:
    """The order of one chunk's nodes over both streams: rule 1."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._event: Any = None

    def begin(self, lane: Lane) -> None:
        """Order a lane's stream behind the node before."""
        if self._event is not None:
            self._lanes.stream(lane).wait_event(self._event)

    def end(self, lane: Lane) -> None:
        """Take a lane's work so far as the node that the next one waits for."""
        self._event = self._lanes.stream(lane).record_event()


def _module(device: torch.device) -> Any:
    module = torch.get_device_module(device)
    return module if hasattr(module, "Stream") else torch.cpu


@functools.cache
def _communication_stream(device: torch.device) -> Any:
    # The same stream for all runs: memory allocated on a stream is reused on this stream alone. High priority, as a
    # ready all-to-all should not queue behind an independent matmul.
    module = _module(device)
    return module.Stream(priority=-1) if module is torch.cpu else module.Stream(device=device, priority=-1)
