"""Memory that every rank of a host reaches, and lends to one buffer at a time."""

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

SMALL = 1 << 20  # bytes: up to here the caching allocator takes blocks from segments of their own
_ALIGNMENT = 2 << 20  # bytes: what it rounds larger ones to
_UNROUNDED = 10 << 20  # bytes: below, but for the small ones, it takes a segment of twice as many


class Window(Protocol):
    """Memory of a fixed size, for one buffer at a time, that peers reach."""

    @property
    def nbytes(self) -> int:
        """Its size."""
        ...

    def lending(self) -> AbstractContextManager[None]:
        """Make torch's caching allocator take what is allocated meanwhile from here, and what is freed go back."""
        ...


class WindowAllocator(CachingAllocator):
    """Gives each buffer a window of its own while it has bytes; windows stay for the next one.

    Ranks that make the same calls in the same order make and use the same windows: which one a buffer gets depends on
    nothing else. When a buffer dies with its bytes is a rank's own affair, so its window is used again only after ranks
    have told one another, which they do before they make a new one.

    Args:
        new_window: Makes one of at least that many bytes, on the current stream. It is called on all ranks alike, and
            may be collective.
        agree: Of windows whose buffers died here, by index, gives those whose buffers died on every rank and are read
            by nobody. It is called on all ranks alike, and may be collective. None: no such window is used again.
    """

    def __init__(
        self, new_window: Callable[[int], Window], agree: Callable[[set[int]], set[int]] | None = None
    ) -> None:
        self._new_window = new_window
        self._agree = agree
        self._places: list[_Place] = []
        self._held: weakref.WeakKeyDictionary[torch.UntypedStorage, _Place] = weakref.WeakKeyDictionary()
        # The caching allocator keeps blocks a stream. All of these belong to one, whoever uses them.
        self._home = torch.cuda.Stream() if torch.cuda.is_available() else None  # type: ignore[no-untyped-call]

    @property
    def reserved_nbytes(self) -> int:
        """What all windows weigh, in use or not."""
        return sum(place.window.nbytes for place in self._places)

    def allocate(self, buffer: torch.Tensor) -> None:
        """Give the buffer the bytes of the smallest free window that is large enough, or of a new one.

        Effects: the current stream waits for the one that the window was last allocated on, if that was another. The
            first time that so many buffers have bytes at once a window is made: collective on the group, and the host
            waits for the device.
        """
        storage = buffer.untyped_storage()
        if buffer.nbytes == 0 or storage.nbytes() != 0:
            super().allocate(buffer)
            return
        place = self._free_place(buffer.nbytes)
        if buffer.is_cuda:
            stream = torch.cuda.current_stream(buffer.device)
            if place.last_stream not in (None, stream):
                stream.wait_stream(place.last_stream)
            place.last_stream = stream
        with self._at_home(), place.window.lending():
            super().allocate(buffer)
        place.is_free = False
        self._held[storage] = place

    def free(self, buffer: torch.Tensor) -> None:
        """Give the window back.

        Effects: none on a stream.
        """
        super().free(buffer)
        if (place := self._held.pop(buffer.untyped_storage(), None)) is not None:
            place.is_free = True

    def window_of(self, buffer: torch.Tensor) -> Window | None:
        """The window that a buffer, or a view of one, lies in; None if it lies elsewhere."""
        place = self._held.get(buffer.untyped_storage())
        return None if place is None else place.window

    def _free_place(self, nbytes: int) -> _Place:
        nbytes = SMALL if nbytes <= SMALL else -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        fitting = self._fitting(nbytes)
        if not fitting:
            self._take_back()
            fitting = self._fitting(nbytes)
        if fitting:
            return min(fitting, key=lambda place: place.window.nbytes)
        with self._at_home():
            self._places.append(_Place(self._new_window(nbytes)))
        return self._places[-1]

    def _fitting(self, nbytes: int) -> list[_Place]:
        return [place for place in self._places if place.is_free and place.serves(nbytes)]

    def _take_back(self) -> None:
        """Let windows be used again whose buffers died with their bytes: with models that were deleted unsharded."""
        if self._agree is None:
            return
        held = {id(place) for place in self._held.values()}
        lost = {i for i, place in enumerate(self._places) if not place.is_free and id(place) not in held}
        for i in self._agree(lost):
            self._places[i].is_free, self._places[i].last_stream = True, None

    def _at_home(self) -> AbstractContextManager[None]:
        return nullcontext() if self._home is None else torch.cuda.stream(self._home)


@dataclass
class _Place:
    """A window, and whether somebody has it."""

    window: Window
    is_free: bool = True
    last_stream: torch.cuda.Stream | None = None

    def serves(self, nbytes: int) -> bool:
        return nbytes <= self.window.nbytes and (nbytes == SMALL) == (self.window.nbytes == SMALL)


@dataclass(frozen=True)
class PeerWindow:
    """A window on a GPU: a memory pool with one block, and where that block is on every rank.

    Attributes:
        pool: Lends the block; it never grows, as nothing larger is asked of it.
        addresses: Of the block on each rank, mapped in this process.
        number: The same on every rank, and no other window's of the group.
    """

    nbytes: int
    pool: torch.cuda.MemPool
    addresses: tuple[int, ...]
    number: int

    def lending(self) -> AbstractContextManager[None]:
        """Take memory from the pool, on the device that is current."""
        entered: AbstractContextManager[None] = torch.cuda.use_mem_pool(self.pool)
        return entered


def new_peer_window(group: dist.ProcessGroup, nbytes: int, number: int = 0) -> PeerWindow:
    """Make a window of at least so many bytes on the current device of every rank.

    Raises:
        RuntimeError: On every rank alike. Some rank has no memory left, or its memory cannot be shared, or mapped by
            some other.

    Effects: collective on the group; allocates the block for the current stream; the host waits for the device.
    """
    if nbytes > SMALL:
        nbytes = max(nbytes, _UNROUNDED)
    made: list[tuple[torch.cuda.MemPool, int]] = []

    def new_block() -> driver.Shared:
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            address = torch.zeros(nbytes, dtype=torch.uint8, device="cuda").data_ptr()
        torch.cuda.synchronize()
        made.append((pool, address))
        return driver.share(address)

    shared = over_ranks(group, new_block)
    ((pool, address),) = made
    rank = group.rank()
    addresses = over_ranks(
        group,
        lambda: [address if i == rank else driver.map_shared(each) for i, each in enumerate(shared)],
    )[rank]
    return PeerWindow(nbytes, pool, tuple(addresses), number)


def over_ranks(group: dist.ProcessGroup, action: Callable[[], Any]) -> list[Any]:
    """What an action gives on every rank.

    Raises:
        Exception: What the action raised on this rank.
        RuntimeError: It raised on another one: a `DriverError`.
    """
    mine, failure = None, None
    try:
        mine = action()
    except Exception as error:  # noqa: BLE001  Peers wait for whatever it is.
        failure = error
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, (mine, None if failure is None else str(failure)), group=group)
    if failure is not None:
        raise failure
    for rank, (_, problem) in enumerate(found):
        if problem is not None:
            raise driver.DriverError(f"rank {rank}: {problem}")
    return [each for each, _ in found]
