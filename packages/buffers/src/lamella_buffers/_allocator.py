"""Allocators: unsharded buffers get their bytes here, and give them back."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch


@runtime_checkable
class Allocator(Protocol):
    """Bytes come and go under tensors that stay.

    A buffer and its views (parameters among them) are made once, when a unit is built. `allocate` and `free` change
    only whether the buffer has bytes. Autograd may hold views of a freed buffer from forward to backward: after the
    next `allocate` the same views must read the new bytes. `lamella_buffers.testing.check_allocator` tests any
    implementation.

    Streams: `allocate` is called on the stream of the fill, and `free` on any stream. Before `free` the caller has made
    the fill's stream wait for the last user, so the bytes may go to the next allocation on the fill's stream.
    """

    def create(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat tensor of (numel,), born with bytes (torch makes no view of a storage that is too small)."""
        ...

    def allocate(self, buffer: torch.Tensor) -> None:
        """Give a freed buffer bytes; their contents are undefined.

        Raises:
            RuntimeError: The buffer has its bytes already.
        """
        ...

    def free(self, buffer: torch.Tensor) -> None:
        """Take the bytes back: the storage has none. The tensor and its views stay.

        Reads before the next `allocate` are errors, and must not find the bytes of another buffer.

        Raises:
            RuntimeError: The buffer has no bytes.
        """
        ...


class CachingAllocator:
    """Resizes the buffer's own storage; torch's caching allocator keeps the freed blocks, in one pool a stream."""

    def create(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Make the buffer.

        Effects: allocates numel * itemsize bytes from the current stream's pool; no host sync unless the pool grows.
        """
        return torch.empty(numel, dtype=dtype, device=device)

    def allocate(self, buffer: torch.Tensor) -> None:
        """Grow the storage to the buffer's size.

        Effects: as `create`.
        """
        storage = buffer.untyped_storage()
        if storage.nbytes() != 0:
            raise RuntimeError(f"Expected a freed buffer, got one that holds {storage.nbytes()} bytes.")
        # Resized, not replaced: the views of parameters and of autograd's graph hold this storage object.
        storage.resize_(buffer.numel() * buffer.itemsize)

    def free(self, buffer: torch.Tensor) -> None:
        """Shrink the storage to nothing; its block returns to the pool of the allocating stream.

        Effects: none on a stream.
        """
        storage = buffer.untyped_storage()
        if storage.nbytes() == 0 and buffer.numel() != 0:
            raise RuntimeError(f"Expected an allocated buffer of {buffer.numel()} elements, got one without bytes.")
        # To the allocating stream, which the caller has made wait for the last reader: the next buffer writes there.
        storage.resize_(0)


class MemPoolAllocator(CachingAllocator):
    """The caching allocator in a private `torch.cuda.MemPool`, on the device current at construction.

    Blocks of the buffers lie together, and freed blocks serve buffers only.

    Attributes:
        pool: The pool. `snapshot()` lists the contents.

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

        Effects: allocates numel * itemsize bytes from the pool, for the current stream; no host sync unless the pool
            grows.
        """
        with torch.cuda.use_mem_pool(self.pool, device.index):
            return super().create(numel, dtype, device)

    def allocate(self, buffer: torch.Tensor) -> None:
        """Grow the storage to the buffer's size.

        Effects: as `create`.
        """
        # A storage grows by blocks of the pool in use now, wherever its last block came from.
        with torch.cuda.use_mem_pool(self.pool, buffer.device.index):
            super().allocate(buffer)
