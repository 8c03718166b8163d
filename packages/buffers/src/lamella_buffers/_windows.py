"""Windows: memory mapped by every rank of a host, lent to a single buffer at a time."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from lamella_buffers import _driver as driver
from lamella_buffers._allocator import CachingAllocator

# Sizes of the caching allocator. With other sizes a buffer would not fit its window's block, and the pool would grow by
# a segment unknown to the peers.
SMALL = 1 << 20  # bytes: the largest block from a segment for small blocks
_ALIGNMENT = 2 << 20  # bytes: larger segments are rounded to multiples
_UNROUNDED = 10 << 20  # bytes: smaller blocks, except small ones, come from a segment of twice as many bytes


class Window(Protocol):
    """Memory of a fixed size, for a single buffer at a time, within reach of peers."""

    @property
    def nbytes(self) -> int:
        """The window's size."""
        ...

    def lending(self) -> AbstractContextManager[None]:
        """Route torch's caching allocator to this window within the context, for allocations and frees."""
        ...


class WindowAllocator(CachingAllocator):
    """Lends a window to each buffer with bytes; freed windows stay for the next buffer.

    The choice of a window depends on the sequence of calls alone: ranks with the same calls make and use the same
    windows. A buffer may die with its bytes at a different time on each rank, so its window is used again only after
    the ranks have agreed, which they do before making a new window.

    Args:
        new_window: Makes a window of at least the given bytes, on the current stream. Called on all ranks alike; may be
            collective.
        agree: Takes the indices of windows with dead buffers on this rank; returns the windows with dead buffers on
            every rank and no reader left. Called on all ranks alike; may be collective. None: such windows stay unused.
    """

    def __init__(
        self, new_window: Callable[[int], Window], agree: Callable[[set[int]], set[int]] | None = None
    ) -> None:
        self._new_window = new_window
        self._agree = agree
        # Only grows: peers have mapped the windows, and the ranks name windows to each other by index.
        self._places: list[_WindowLease] = []
        # Weak keys: a strong reference would keep a deleted model's memory.
        self._leases: weakref.WeakKeyDictionary[torch.UntypedStorage, _WindowLease] = weakref.WeakKeyDictionary()
        # The caching allocator keeps blocks by stream. Every window's block belongs to this stream: a request on a
        # different stream would not find the block, and the pool would allocate memory unknown to the peers.
        self._home = torch.cuda.Stream() if torch.cuda.is_available() else None  # type: ignore[no-untyped-call]

    @property
    def reserved_nbytes(self) -> int:
        """Bytes of all windows, in use or not."""
        return sum(place.window.nbytes for place in self._places)

    def allocate(self, buffer: torch.Tensor) -> None:
        """Give the buffer the bytes of the smallest sufficient free window, or of a new window.

        Effects: the current stream waits for the stream of the window's last allocation, if different. Where no free
            window suffices a window is made: collective on the group, and the host waits for the device.
        """
        storage = buffer.untyped_storage()
        if buffer.nbytes == 0 or storage.nbytes() != 0:
            super().allocate(buffer)
            return
        place = self._free_place(buffer.nbytes)
        if buffer.is_cuda:
            stream = torch.cuda.current_stream(buffer.device)
            # `free` ordered the last readers before `last_stream` only. Without the wait this stream would overwrite
            # bytes still being read.
            if place.last_stream not in (None, stream):
                stream.wait_stream(place.last_stream)
            place.last_stream = stream
        with self._at_home(), place.window.lending():
            super().allocate(buffer)
        # In this order, and the reverse in `free`: an interrupt between the lines leaves a window that `free` gives
        # back. Lost on some ranks alone, it would let the ranks choose different windows.
        self._leases[storage] = place
        place.is_free = False

    def free(self, buffer: torch.Tensor) -> None:
        """Give the window back.

        Effects: none on a stream.
        """
        # On the host: readers may still be running. The next `allocate` orders its stream after them by `last_stream`.
        storage = buffer.untyped_storage()
        if (place := self._leases.get(storage)) is not None:
            place.is_free = True
        super().free(buffer)
        self._leases.pop(storage, None)

    def window_of(self, buffer: torch.Tensor) -> Window | None:
        """The window around a buffer, or around a view of a buffer; None if outside all windows."""
        place = self._leases.get(buffer.untyped_storage())
        return None if place is None else place.window

    def _free_place(self, nbytes: int) -> _WindowLease:
        nbytes = SMALL if nbytes <= SMALL else -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        fitting = self._fitting(nbytes)
        if not fitting:
            # Only here, where every rank arrives alike: the agreement is collective.
            self._take_back()
            fitting = self._fitting(nbytes)
        if fitting:
            return min(fitting, key=lambda place: place.window.nbytes)
        with self._at_home():
            self._places.append(_WindowLease(self._new_window(nbytes)))
        return self._places[-1]

    def _fitting(self, nbytes: int) -> list[_WindowLease]:
        return [place for place in self._places if place.is_free and place.serves(nbytes)]

    def _take_back(self) -> None:
        """Reclaim the windows of buffers that died with bytes, with models deleted while unsharded."""
        if self._agree is None:
            return
        leased = {id(place) for place in self._leases.values()}
        lost = {i for i, place in enumerate(self._places) if not place.is_free and id(place) not in leased}
        for i in self._agree(lost):
            # No stream to wait for: the agreement waited for every device.
            self._places[i].is_free, self._places[i].last_stream = True, None

    def _at_home(self) -> AbstractContextManager[None]:
        return nullcontext() if self._home is None else torch.cuda.stream(self._home)


@dataclass
class _WindowLease:
    """A window, free or lent, and the stream of its last allocation."""

    window: Window
    is_free: bool = True
    last_stream: torch.cuda.Stream | None = None

    def serves(self, nbytes: int) -> bool:
        return nbytes <= self.window.nbytes and (nbytes == SMALL) == (self.window.nbytes == SMALL)


@dataclass(frozen=True)
class PeerWindow:
    """A window on a GPU: a memory pool with a single block, and the block's address on every rank.

    Attributes:
        pool: Lends the block; never grows, since requests never exceed the block. The block lives as long as the pool.
        addresses: The block's address on each rank, mapped in this process.
        number: Same on every rank, unique in the group.
    """

    nbytes: int
    pool: torch.cuda.MemPool
    addresses: tuple[int, ...]
    number: int

    def lending(self) -> AbstractContextManager[None]:
        """Take memory from the pool, on the current device."""
        entered: AbstractContextManager[None] = torch.cuda.use_mem_pool(self.pool)
        return entered


def window_nbytes(nbytes: int) -> int:
    """The size of a window of at least `nbytes`."""
    return nbytes if nbytes <= SMALL else max(nbytes, _UNROUNDED)


def new_peer_window(group: dist.ProcessGroup, nbytes: int, number: int = 0) -> PeerWindow:
    """Make a window of at least `nbytes` on the current device of every rank.

    Raises:
        RuntimeError: On every rank alike. Some rank has no memory left, or its memory cannot be shared, or mapped by
            a peer.

    Effects: collective on the group; allocates the block for the current stream; the host waits for the device.
    """
    nbytes = window_nbytes(nbytes)
    blocks: list[tuple[torch.cuda.MemPool, int]] = []

    def new_block() -> driver.Shared:
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            # The tensor dies at once; its block stays in the pool, which allocates from the block later.
            address = torch.zeros(nbytes, dtype=torch.uint8, device="cuda").data_ptr()
        # Peers may write as soon as they know the address: zeros in flight would erase their first flags.
        torch.cuda.synchronize()
        blocks.append((pool, address))
        return driver.share(address)

    shared = over_ranks(group, new_block)
    ((pool, address),) = blocks
    rank = group.rank()
    addresses = over_ranks(
        group,
        lambda: [address if i == rank else driver.map_shared(block) for i, block in enumerate(shared)],
    )[rank]
    return PeerWindow(nbytes, pool, tuple(addresses), number)


def over_ranks(group: dist.ProcessGroup, action: Callable[[], Any]) -> list[Any]:
    """Run an action on every rank, and gather the results in rank order.

    Raises:
        Exception: The action's own error on this rank.
        RuntimeError: The action raised on another rank: a `DriverError`.
    """
    mine, failure = None, None
    try:
        mine = action()
    except Exception as error:  # noqa: BLE001  Raised here, before the gather, any error would leave the peers waiting.
        failure = error
    outcomes: list[Any] = [None] * group.size()
    dist.all_gather_object(outcomes, (mine, None if failure is None else str(failure)), group=group)
    if failure is not None:
        raise failure
    for rank, (_, problem) in enumerate(outcomes):
        if problem is not None:
            raise driver.DriverError(f"rank {rank}: {problem}")
    return [output for output, _ in outcomes]
