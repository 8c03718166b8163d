"""Host memory that a training process copies its state to, and that another process reads."""

import math
import mmap
import os
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Final, NamedTuple

import torch

from lamella_checkpoint._state.shares import Item
from lamella_checkpoint._training.copies import Copy

_ALIGNMENT: Final = 64


class Slot(NamedTuple):
    """Where a tensor lies in the memory, in bytes, and what it is."""

    offset: int
    sizes: tuple[int, ...]
    dtype: torch.dtype


class Memory:
    """Anonymous memory that other processes map by its descriptor; it lives as long as one of them has it.

    No file of it is seen anywhere, and `/dev/shm` may be as small as it likes. Its tensors are no inference tensors,
    whoever asks for them: threads write to them, and later saves.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        """Make new memory, of no bytes yet; or map somebody's."""
        self._descriptor = descriptor
        self.nbytes = 0
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._last: tuple[list[Slot], list[torch.Tensor]] = ([], [])
        self._is_pinned = False

    @property
    def descriptor(self) -> int:
        """By which another process maps it. Effects: makes it, the first time."""
        if self._descriptor is None:
            self._descriptor = os.memfd_create("lamella-checkpoint")
        return self._descriptor

    def grow(self, nbytes: int) -> None:
        """Have at least `nbytes`; what was there stays.

        Raises:
            OSError: There is not so much memory.

        Effects: allocates and touches the memory; unpins it.
        """
        if nbytes > self.nbytes:
            os.posix_fallocate(self.descriptor, 0, nbytes)
            self.map(nbytes)

    @torch.inference_mode(mode=False)
    def map(self, nbytes: int) -> None:
        """See the first `nbytes`, which somebody has allocated."""
        if nbytes != self.nbytes:
            self._unpin()
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            self._last = ([], [])
            self._bytes = torch.frombuffer(mmap.mmap(self.descriptor, nbytes, flags=flags), dtype=torch.uint8)
            self.nbytes = nbytes

    def pin(self) -> None:
        """Let CUDA copy to it while the host goes on. Effects: a driver call, the first time and after growth."""
        if self._is_pinned or not self.nbytes:
            return
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(int(cudart.cudaHostRegister(self._bytes.data_ptr(), self.nbytes, 0)))
        self._is_pinned = True

    def close(self) -> None:
        """Give it back. Effects: waits for nothing; copies to it have to be over."""
        self._unpin()
        self._last = ([], [])
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self.nbytes = 0
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    @torch.inference_mode(mode=False)
    def tensor(self, slot: Slot) -> torch.Tensor:
        """A slot as a tensor, a view of the memory."""
        return self._bytes.narrow(0, slot.offset, _nbytes(slot)).view(slot.dtype).view(slot.sizes)

    def tensors(self, slots: list[Slot]) -> list[torch.Tensor]:
        """A save's slots. Made once: the next save's are the same, as a rule."""
        if slots != self._last[0]:
            self._last = (slots, [self.tensor(slot) for slot in slots])
        return self._last[1]

    def _unpin(self) -> None:
        if self._is_pinned:
            cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(int(cudart.cudaHostUnregister(self._bytes.data_ptr())))
            self._is_pinned = False


def lay_out(items: Sequence[Item], memory: Memory) -> tuple[list[Item], list[Copy]]:
    """Give each of the items' tensors a place in the memory.

    Returns:
        The items with a `Slot` in place of each tensor, and plain data as it is now; and what is to be copied.

    Raises:
        NotImplementedError: A tensor is of a class of its own, whose elements need not be all it has.
        OSError: There is not enough memory.

    Effects: grows the memory where it has to, and pins it if a tensor is on CUDA. Copies nothing.
    """
    tensors = [(item, item.value) for item in items if isinstance(item.value, torch.Tensor)]
    slots = _slots(tensors)
    memory.grow(max((slot.offset + _nbytes(slot) for slot in slots), default=0))
    placed = [replace(item, value=deepcopy(item.value)) for item in items if not isinstance(item.value, torch.Tensor)]
    copies = []
    for (item, value), slot, target in zip(tensors, slots, memory.tensors(slots), strict=True):
        placed.append(Item(names=item.names, value=slot, shape=item.shape, chunk=item.chunk))
        copies.append(Copy(item.names[0], value, target))
    if any(copy.source.is_cuda for copy in copies):
        memory.pin()
    return placed, copies


def _slots(tensors: Sequence[tuple[Item, torch.Tensor]]) -> list[Slot]:
    """A place for each tensor, one after another."""
    slots = []
    offset = 0
    for item, tensor in tensors:
        if type(tensor) is not torch.Tensor:
            raise NotImplementedError(
                f"Expected plain tensors and DTensors of them to save in the background, got {type(tensor).__name__} "
                f"for {item.names[0]!r}. Use `save`, which waits."
            )
        slots.append(Slot(offset, tuple(tensor.shape), tensor.dtype))
        offset = -(-(offset + tensor.nbytes) // _ALIGNMENT) * _ALIGNMENT
    return slots


def _nbytes(slot: Slot) -> int:
    return math.prod(slot.sizes) * slot.dtype.itemsize
