"""Copy engines of a step on fake ranks: memory comes and goes as in windows, and no byte moves."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lamella_buffers._exchange import arrivals_numel
from lamella_buffers._payload import Payload
from lamella_buffers._transport import FakeTransport, ReduceOp
from lamella_buffers._windows import WindowAllocator, window_nbytes


@dataclass(frozen=True)
class FakeWindow:
    """A window mapped by no peer.

    Attributes:
        nbytes: The window's size.
        idle: The bytes of the window beside the borrowing buffer: the window's memory stays taken.
    """

    nbytes: int
    idle: torch.Tensor

    def lending(self) -> AbstractContextManager[None]:
        """Give the window's bytes to the buffer allocated in the context."""
        self.idle.untyped_storage().resize_(0)  # before the buffer grows: both would count at once
        return nullcontext()


class FakeWindowAllocator(WindowAllocator):
    """Lends fake windows as a `WindowAllocator` lends windows: by the same choices, made of the same sizes.

    Args:
        device: Device of the windows.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(self._new_fake_window)
        self._device = device
        self.windows: list[FakeWindow] = []

    def allocate(self, buffer: torch.Tensor) -> None:
        """Lend the buffer a window; the window keeps the bytes beside the buffer."""
        super().allocate(buffer)
        if isinstance(window := self.window_of(buffer), FakeWindow):
            window.idle.untyped_storage().resize_(window.nbytes - buffer.nbytes)

    def free(self, buffer: torch.Tensor) -> None:
        """Give the buffer's bytes back to the window."""
        window = self.window_of(buffer)
        super().free(buffer)
        if isinstance(window, FakeWindow):
            window.idle.untyped_storage().resize_(window.nbytes)

    def _new_fake_window(self, nbytes: int) -> FakeWindow:
        nbytes = window_nbytes(nbytes)
        self.windows.append(FakeWindow(nbytes, torch.empty(nbytes, dtype=torch.uint8, device=self._device)))
        return self.windows[-1]


class FakeCopyEngineTransport(FakeTransport):
    """A group of `FAKE_GPUS` on one host, whose GPUs are taken to map one another's memory.

    A step on fake tensors then allocates on one process as a step over `CopyEngineTransport` does.

    Attributes:
        windows: Allocator of unsharded buffers.
        arrivals: Allocator of the buffers for arriving pieces of gradients.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.windows, self.arrivals = (FakeWindowAllocator(torch.device("cpu")) for _ in range(2))
        # Made once, as in the real transport, with bytes only while an exchange runs.
        self._buffers: dict[tuple[torch.dtype, tuple[int, ...]], torch.Tensor] = {}

    @property
    def idle_windows(self) -> list[torch.Tensor]:
        """For each window a tensor with the bytes lent to no buffer."""
        return [window.idle for allocator in (self.windows, self.arrivals) for window in allocator.windows]

    def _exchange(self, payloads: Sequence[Payload], op: ReduceOp) -> None:
        """Lend a window to the arriving pieces, and take it back."""
        key = payloads[0].full.dtype, tuple([shard.numel() for shard, _ in payloads])
        if key not in self._buffers:
            numel = arrivals_numel(payloads, self.num_ranks)
            self._buffers[key] = self.arrivals.create(numel, key[0], payloads[0].full.device)
            self.arrivals.free(self._buffers[key])
        self.arrivals.allocate(self._buffers[key])
        self.arrivals.free(self._buffers[key])
        self._announce_exchange(payloads)


# The process's. Weak: the windows of an estimate end with the model that holds the transports.
_transports: weakref.WeakValueDictionary[dist.ProcessGroup, FakeCopyEngineTransport] = weakref.WeakValueDictionary()


def fake_copy_engines_of(group: dist.ProcessGroup) -> FakeCopyEngineTransport:
    """The copy engines of a group of `FAKE_GPUS` on one host, the same for all units of a model."""
    if (transport := _transports.get(group)) is None:
        transport = _transports[group] = FakeCopyEngineTransport(group)
    return transport
