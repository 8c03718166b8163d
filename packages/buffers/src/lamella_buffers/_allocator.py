"""Who gives unsharded buffers their bytes, and takes them back."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch


@runtime_checkable
class Allocator(Protocol):
    """Storage that comes and goes under tensors that stay.

    A buffer is created once, when a unit is built, and views of it (parameters among them) are made once too. What
    `allocate` and `free` change is only whether the buffer has bytes. Autograd may hold views of a freed buffer from
    forward to backward: after the next `allocate` the same views must read the new bytes.
    `lamella_buffers.testing.check_allocator` tests any implementation.

    Streams: `allocate` is called with the stream current that fills the buffer, and `free` with any. Before `free` the
    caller has made the first wait for the last user, so the bytes may go to whatever is allocated on it next.
    """

    def create(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat tensor of (numel,), born with bytes (torch makes no view of a storage that is too small)."""
        ...

    def allocate(self, buffer: torch.Tensor) -> None:
        """Give a freed buffer bytes; what they hold is undefined.

        Raises:
            RuntimeError: The buffer has its bytes already.
        """
        ...

    def free(self, buffer: torch.Tensor) -> None:
        """Take the bytes back, so that the storage has none. The tensor and its views stay.

        They must not be read before the next `allocate`; who does it all the same must not find another's bytes.

        Raises:
            RuntimeError: The buffer has no bytes.
        """
        ...


class CachingAllocator:
    """Resizes the buffer's own storage; torch's caching allocator keeps the freed blocks, in one pool a stream."""

    def create(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Make the buffer.

        Effects: allocates numel * itemsize bytes from the current stream's pool; no host sync unless it must grow.
        """
        return torch.empty(numel, dtype=dtype, device=device)

    def allocate(self, buffer: torch.Tensor) -> None:
        """Grow the storage to the buffer's size.

        Effects: as `create`.
        """
        storage = buffer.untyped_storage()
        if storage.nbytes() != 0:
            raise RuntimeError(f"Expected a freed buffer, got one that holds {storage.nbytes()} bytes.")
        storage.resize_(buffer.numel() * buffer.itemsize)

    def free(self, buffer: torch.Tensor) -> None:
        """Shrink the storage to nothing; its block goes back to the pool of the stream it came from.

        Effects: none on a stream.
        """
        storage = buffer.untyped_storage()
        if storage.nbytes() == 0 and buffer.numel() != 0:
            raise RuntimeError(f"Expected an allocated buffer of {buffer.numel()} elements, got one without bytes.")
        storage.resize_(0)


class MemPoolAllocator(CachingAllocator):
    """The caching allocator in a `torch.cuda.MemPool` of its own, on the device that is current when it is made.

    Nothing else gets a block between the buffers', and their freed blocks serve nothing else.

    Attributes:
        pool: The pool. Its `snapshot()` tells what it holds.

    Raises:
        RuntimeError: There is no CUDA device.
    """

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError(
                "Expected a CUDA device, got none: torch has memory pools there only. "
                "Take CachingAllocator or PoolAllocator."
            )
        self.pool = torch.cuda.MemPool()

    def create(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Make the buffer.

        Effects: allocates numel * itemsize bytes from the pool, for the current stream; no host sync unless it must
            grow.
        """
        with torch.cuda.use_mem_pool(self.pool, device.index):
            return super().create(numel, dtype, device)

    def allocate(self, buffer: torch.Tensor) -> None:
        """Grow the storage to the buffer's size.

        Effects: as `create`.
        """
        with torch.cuda.use_mem_pool(self.pool, buffer.device.index):
            super().allocate(buffer)
