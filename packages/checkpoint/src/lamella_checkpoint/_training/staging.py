"""Host memory shared by a training process, which copies state in, and a writer process, which reads."""

import math
import mmap
import os
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Final, NamedTuple

import torch

from lamella_checkpoint._state.shares import Item
from lamella_checkpoint._training.copies import HostCopy

_ALIGNMENT: Final = 64


class MemorySlot(NamedTuple):
    """A tensor's place in the memory, in bytes, with sizes and dtype."""

    offset: int
    sizes: tuple[int, ...]
    dtype: torch.dtype


class Memory:
    """Anonymous memory that other processes map by descriptor; it lives as long as any process maps it.

    The memory has no visible file, and the size of `/dev/shm` does not matter. Tensors over the memory are never
    inference tensors, even under `inference_mode`: threads and later saves write to them.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        """Create empty memory; or attach to the memory behind `descriptor`."""
        self._descriptor = descriptor
        self.nbytes = 0
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._last: tuple[list[MemorySlot], list[torch.Tensor]] = ([], [])
        self._is_pinned = False

    @property
    def descriptor(self) -> int:
        """The descriptor by which another process maps the memory. Effects: creates the memory on the first call."""
        if self._descriptor is None:
            self._descriptor = os.memfd_create("lamella-checkpoint")
        return self._descriptor

    def grow(self, nbytes: int) -> None:
        """Reserve at least `nbytes`; the contents stay.

        Raises:
            OSError: Not enough memory.

        Effects: allocates and touches the memory; unpins it.
        """
        if nbytes > self.nbytes:
            os.posix_fallocate(self.descriptor, 0, nbytes)
            self.map(nbytes)

    # Outside inference mode: an inference tensor could not be written in place by threads and later saves.
    @torch.inference_mode(mode=False)
    def map(self, nbytes: int) -> None:
        """Map the first `nbytes`, allocated by `grow` here or in the other process."""
        if nbytes != self.nbytes:
            self._unpin()  # CUDA must not keep pages registered after their mapping is gone.
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            self._last = ([], [])  # Cached views are over the old mapping, which is no longer pinned.
            self._bytes = torch.frombuffer(mmap.mmap(self.descriptor, nbytes, flags=flags), dtype=torch.uint8)
            self.nbytes = nbytes

    def pin(self) -> None:
        """Pin the memory for asynchronous copies by CUDA. Effects: a driver call, the first time and after growth."""
        if self._is_pinned or not self.nbytes:
            return
        # Registers the shared mapping itself: torch's `pin_memory` would copy into memory that no other process maps.
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(int(cudart.cudaHostRegister(self._bytes.data_ptr(), self.nbytes, 0)))
        self._is_pinned = True

    def close(self) -> None:
        """Free the memory. Effects: waits for nothing; all copies into the memory must have completed."""
        self._unpin()
        self.nbytes = 0  # First: an interrupt must leave no size without its mapping.
        self._last = ([], [])
        self._bytes = torch.empty(0, dtype=torch.uint8)
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    @torch.inference_mode(mode=False)
    def tensor(self, slot: MemorySlot) -> torch.Tensor:
        """A slot as a tensor, a view of the memory."""
        return self._bytes.narrow(0, slot.offset, _nbytes(slot)).view(slot.dtype).view(slot.sizes)

    def tensors(self, slots: list[MemorySlot]) -> list[torch.Tensor]:
        """A save's slots as tensors, cached: the next save usually has the same slots."""
        if slots != self._last[0]:
            self._last = (slots, [self.tensor(slot) for slot in slots])
        return self._last[1]

    def _unpin(self) -> None:
        if self._is_pinned:
            cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(int(cudart.cudaHostUnregister(self._bytes.data_ptr())))
            self._is_pinned = False


def lay_out(items: Sequence[Item], memory: Memory) -> tuple[list[Item], list[HostCopy]]:
    """Assign each item's tensor a slot in the memory.

    Returns:
        The items with a `MemorySlot` in place of each tensor, and a deep copy of plain data; and the copies to perform.

    Raises:
        NotImplementedError: A tensor is of a subclass, which may hold more than its elements.
        OSError: Not enough memory.

    Effects: grows the memory as needed, and pins it if a tensor is on CUDA. Copies nothing.
    """
    tensors = [(item, item.value) for item in items if isinstance(item.value, torch.Tensor)]
    slots = _slots(tensors)
    memory.grow(max((slot.offset + _nbytes(slot) for slot in slots), default=0))
    placed = [replace(item, value=deepcopy(item.value)) for item in items if not isinstance(item.value, torch.Tensor)]
    copies = []
    for (item, value), slot, target in zip(tensors, slots, memory.tensors(slots), strict=True):
        placed.append(Item(names=item.names, value=slot, shape=item.shape, chunk=item.chunk))
        copies.append(HostCopy(item.names[0], value, target))
    if any(copy.source.is_cuda for copy in copies):
        memory.pin()
    return placed, copies


def _slots(tensors: Sequence[tuple[Item, torch.Tensor]]) -> list[MemorySlot]:
    """A slot for each tensor, in order."""
    slots = []
    offset = 0
    for item, tensor in tensors:
        if type(tensor) is not torch.Tensor:
            raise NotImplementedError(
                f"Expected plain tensors and DTensors of them to save in the background, got {type(tensor).__name__} "
                f"for {item.names[0]!r}. Use `save`, which waits."
            )
        slots.append(MemorySlot(offset, tuple(tensor.shape), tensor.dtype))
        offset = -(-(offset + tensor.nbytes) // _ALIGNMENT) * _ALIGNMENT
    return slots


def _nbytes(slot: MemorySlot) -> int:
    return math.prod(slot.sizes) * slot.dtype.itemsize
