"""Memory that every rank of a host reaches, and gathers and exchanges by copy engines instead of kernels.

A ring's kernel takes multiprocessors from the matmuls beside it for as long as it runs. Here each rank has the copy
engines push its pieces into every peer's memory; nothing but memory and wires is used. `docs/design/0006-speed.md` has
the figures.
"""

from __future__ import annotations

import os
import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from lamella_buffers import _driver as driver
from lamella_buffers._allocator import CachingAllocator
from lamella_buffers._exchange import add_up, arrivals_numel, places_for
from lamella_buffers._payload import Payload
from lamella_buffers._transport import Done, NcclTransport, Pending, ReduceOp, copy_missing

_SMALL = 1 << 20  # bytes: up to here the caching allocator takes blocks from segments of their own
_ALIGNMENT = 2 << 20  # bytes: what it rounds larger ones to
_UNROUNDED = 10 << 20  # bytes: below, but for the small ones, it takes a segment of twice as many
_FLAG_NBYTES = 4


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
        nbytes = _SMALL if nbytes <= _SMALL else -(-nbytes // _ALIGNMENT) * _ALIGNMENT
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
        return nbytes <= self.window.nbytes and (nbytes == _SMALL) == (self.window.nbytes == _SMALL)


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
    if nbytes > _SMALL:
        nbytes = max(nbytes, _UNROUNDED)
    made: list[tuple[torch.cuda.MemPool, int]] = []

    def new_block() -> driver.Shared:
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            address = torch.zeros(nbytes, dtype=torch.uint8, device="cuda").data_ptr()
        torch.cuda.synchronize()
        made.append((pool, address))
        return driver.share(address)

    shared = _exchange(group, new_block)
    ((pool, address),) = made
    rank = group.rank()
    addresses = _exchange(
        group,
        lambda: [address if i == rank else driver.map_shared(each) for i, each in enumerate(shared)],
    )[rank]
    return PeerWindow(nbytes, pool, tuple(addresses), number)


def _exchange(group: dist.ProcessGroup, action: Callable[[], Any]) -> list[Any]:
    """What an action gives on every rank.

    Raises:
        RuntimeError: The action did on some rank; a `DriverError` on the others.
    """
    mine, failure = None, None
    try:
        mine = action()
    except RuntimeError as error:
        failure = error
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, (mine, None if failure is None else str(failure)), group=group)
    if failure is not None:
        raise failure
    for rank, (_, problem) in enumerate(found):
        if problem is not None:
            raise driver.DriverError(f"rank {rank}: {problem}")
    return [each for each, _ in found]


def _agreed(group: dist.ProcessGroup, mine: set[int]) -> set[int]:
    """What all ranks name, when their devices are done with it."""
    torch.cuda.synchronize()
    return set.intersection(*_exchange(group, lambda: mine))


class _Channel:
    """Moves of one kind between the ranks of a group, one after another.

    Note [Flags]. On the stream of a move each rank tells every peer that its memory may be written, waits until all
    have told it the same, pushes, tells every peer that it has, and waits until all have told it that. A flag is a word
    in the memory of the rank that waits. A peer writes it (by a copy, after the copies before it), and the rank that
    waited for it makes it 0. A peer writes it again only after it heard from this rank once more, which this rank says
    after it has made the flag 0.
    What is written is the move's name, made of the windows and places that it goes to, and a rank waits for its own
    move's. Ranks that disagree on where a buffer lies wait for ever, as ranks do whose collectives differ; nothing is
    written where nobody expects it. A move's name is always the same, so a captured graph can be replayed.
    A rank that dies leaves its peers' streams waiting, as in a ring, but out of sight of NCCL's watchdog.

    Args:
        flags: A window in which all words are 0.
        rank: This process's place in the group.
        index: Which channel: each has two words a rank of its own.
        device: Whose memory it moves.
    """

    def __init__(self, flags: PeerWindow, rank: int, index: int, device: torch.device) -> None:
        num_ranks = len(flags.addresses)
        self._flags = flags  # whose memory goes with it
        self.peers = [(rank + i) % num_ranks for i in range(1, num_ranks)]
        self._rank = rank
        self._words = [
            [base + _FLAG_NBYTES * (2 * index + kind) * num_ranks for base in flags.addresses] for kind in (0, 1)
        ]
        self._device = device
        self._signals: dict[int, _Signal] = {}
        self._last_stream: torch.cuda.Stream | None = None

    def open(self, name: int) -> int:
        """Begin a move: what comes next on the current stream may write to peers.

        Args:
            name: The move's, not 0.

        Returns:
            The stream, as the driver has it.

        Effects: the stream waits for the last move's, if that was another, and for all peers.
        """
        stream = torch.cuda.current_stream()
        if self._last_stream is not None and self._last_stream != stream:
            stream.wait_stream(self._last_stream)
        self._last_stream = stream
        self._meet(name, 0, stream.cuda_stream)
        return stream.cuda_stream

    def close(self, name: int, stream: int) -> None:
        """End a move: what comes next on the stream may read what peers wrote, and peers what this rank did.

        Effects: the stream waits for all peers.
        """
        self._meet(name, 1, stream)

    def _meet(self, name: int, kind: int, stream: int) -> None:
        signal = self._signals.get(name) or self._new_signal(name)
        signal.tells[kind].enqueue(stream)
        signal.waits[kind].enqueue(stream)

    def _new_signal(self, name: int) -> _Signal:
        # On this stream, which the next move's waits for.
        word = torch.full((1,), name, dtype=torch.int32, device=self._device)
        mine = _FLAG_NBYTES * self._rank
        tells = [[(bases[i] + mine, word.data_ptr(), _FLAG_NBYTES) for i in self.peers] for bases in self._words]
        flags = [[bases[self._rank] + _FLAG_NBYTES * i for i in self.peers] for bases in self._words]
        signal = _Signal(word, [driver.Copies(each) for each in tells], [driver.FlagOps(each, name) for each in flags])
        self._signals[name] = signal
        return signal


class _Signal(NamedTuple):
    """What tells peers of a move, and waits for theirs: before it, and after it."""

    word: torch.Tensor
    tells: list[driver.Copies]
    waits: list[driver.FlagOps]


def _name_of(places: Iterable[tuple[int, int, int]]) -> int:
    """A move's name: the number of each window that it goes to, where in it, and how many bytes. Not 0, and 31 bits."""
    return zlib.crc32(repr(list(places)).encode()) >> 1 | 1


class _Push(NamedTuple):
    """A gather into one place: where this rank's pieces lie in it, and the copies of them to every peer."""

    sources: list[int]
    copies: driver.Copies
    name: int


class _Arrivals(NamedTuple):
    """Where pieces arrive: a buffer whose bytes come and go, each payload's place in it, and there this rank's row."""

    buffer: torch.Tensor
    places: list[torch.Tensor]
    own: list[torch.Tensor]


class CopyEngineTransport(NcclTransport):
    """NCCL, but for gathers into windows, and sums that are wider than their wire: those are pushed by copy engines.

    Args:
        group: The axis's process group.
        windows: Where buffers that are gathered into may lie.
        arrivals: Where pieces of gradients arrive.
        flags: A window in which all words are 0.
        device: Where all of them are.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        windows: WindowAllocator,
        arrivals: WindowAllocator,
        flags: PeerWindow,
        device: torch.device,
    ) -> None:
        super().__init__(group)
        self._windows = windows
        self._arrivals = arrivals
        self._buffers: dict[tuple[torch.dtype, tuple[int, ...]], _Arrivals] = {}
        self._pushes: dict[tuple[tuple[int, int], ...], _Push] = {}
        self._gathers, self._exchanges = (_Channel(flags, self.rank, i, device) for i in (0, 1))

    def all_gather(self, payloads: Sequence[Payload]) -> Pending:
        """Gather all payloads in one call, of whatever dtypes.

        Effects: on the current stream, which is made to wait for the last gather's if that was another: copies to every
            peer, and waits for theirs. A shard that is no slice of its `full` is copied there first. A kernel of
            NCCL's, if some `full` lies in no window.
        """
        if (push := self.push_into([full for _, full in payloads])) is None:
            return super().all_gather(payloads)
        if push.sources != [shard.data_ptr() for shard, _ in payloads]:
            copy_missing([self._own(full) for _, full in payloads], [shard for shard, _ in payloads])
        stream = self._gathers.open(push.name)
        push.copies.enqueue(stream)
        self._gathers.close(push.name, stream)
        return Done()

    def push_into(self, wholes: Sequence[torch.Tensor]) -> _Push | None:
        """How this rank's pieces get to every peer, prepared the first time; None if one of the wholes is in no window.

        A buffer that gets another window has other addresses. A window stays, and nothing else is where it is.
        """
        key = tuple([(whole.data_ptr(), whole.nbytes) for whole in wholes])
        if key not in self._pushes:
            windows = [self._windows.window_of(whole) for whole in wholes]
            pairs = [(a, b) for a, b in zip(wholes, windows, strict=True) if isinstance(b, PeerWindow)]
            if len(pairs) < len(wholes):
                return None
            own = [(self._own(whole), window) for whole, window in pairs]
            moves = [
                (window.addresses[peer] + self._offset_of(piece, window), piece.data_ptr(), piece.nbytes)
                for piece, window in own
                for peer in self._gathers.peers
            ]
            name = _name_of((window.number, self._offset_of(whole, window), whole.nbytes) for whole, window in pairs)
            self._pushes[key] = _Push([piece.data_ptr() for piece, _ in own], driver.Copies(moves), name)
        return self._pushes[key]

    def _own(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.view(self.num_ranks, -1)[self.rank]

    def _exchange(self, payloads: Sequence[Payload], op: ReduceOp) -> None:
        """Push each piece to the rank that adds it up.

        On the current stream, which is made to wait for the last exchange's if that was another. A window as large as
        the payloads' `full` is lent for the time of the call.
        """
        buffer, places, own = self._arrivals_for(payloads)
        self._arrivals.allocate(buffer)
        window = self._arrivals.window_of(buffer)
        assert isinstance(window, PeerWindow)
        name = _name_of([(window.number, buffer.nbytes, len(own))])
        stream = self._exchanges.open(name)
        for mine, (_, full) in zip(own, payloads, strict=True):
            # By addresses: a view for each piece would cost the host more than the copies.
            offset, source, nbytes = self._offset_of(mine, window), full.data_ptr(), mine.nbytes
            for peer in self._exchanges.peers:
                driver.copy(window.addresses[peer] + offset, source + peer * nbytes, nbytes, stream)
        torch._foreach_copy_(own, [self._own(full) for _, full in payloads])
        self._exchanges.close(name, stream)
        add_up(places, [shard for shard, _ in payloads], op)
        self._arrivals.free(buffer)

    def _arrivals_for(self, payloads: Sequence[Payload]) -> _Arrivals:
        full = payloads[0].full
        key = full.dtype, tuple([shard.numel() for shard, _ in payloads])
        if key not in self._buffers:
            buffer = self._arrivals.create(arrivals_numel(payloads, self.num_ranks), full.dtype, full.device)
            places = places_for(payloads, self.num_ranks, buffer)
            self._buffers[key] = _Arrivals(buffer, places, [place[self.rank] for place in places])
            self._arrivals.free(buffer)
        return self._buffers[key]

    def _offset_of(self, mine: torch.Tensor, window: PeerWindow) -> int:
        """Where something lies in its window, on every rank alike."""
        offset = mine.data_ptr() - window.addresses[self.rank]
        assert 0 <= offset <= window.nbytes - mine.nbytes, "a buffer lies outside of its window"
        return offset


@dataclass(frozen=True)
class CopyEngines:
    """What gathers a group's parameters and reduces their gradients by copy engines: the memory, and the calls."""

    allocator: WindowAllocator
    transport: CopyEngineTransport


# Kept with their groups until the process ends: peers have this memory mapped, and engines hold their group.
_engines: weakref.WeakKeyDictionary[dist.ProcessGroup, CopyEngines | None] = weakref.WeakKeyDictionary()


def copy_engines_of(group: dist.ProcessGroup) -> CopyEngines | None:
    """What moves a group's parameters and gradients without multiprocessors; None where that cannot be had.

    It can over NCCL if all ranks are on one host and can map one another's memory. They cannot with torch's expandable
    segments or `backend:cudaMallocAsync`, and do not with `max_split_size_mb`, which keeps windows from being used, or
    where NCCL_P2P_DISABLE tells NCCL not to. One object serves everybody on this group; it and its windows
    stay until the process ends, and `torch.cuda.empty_cache()` does not free them.

    Effects: the first time, collective on the group, and the host waits for the device.
    """
    if group not in _engines:
        _engines[group] = _engines_for(group)
    return _engines[group]


def _engines_for(group: dist.ProcessGroup) -> CopyEngines | None:
    if group.size() == 1 or "nccl" not in dist.get_backend_config(group) or not torch.cuda.is_available():
        return None
    hosts = _exchange(group, _host)
    if None in hosts or len(set(hosts)) > 1:
        return None
    try:
        flags = new_peer_window(group, _SMALL)
    except RuntimeError:
        return None
    # Two, so that no gather waits for a reduction because it was lent a window that one had.
    numbers = count(1)
    windows, arrivals = (
        WindowAllocator(lambda nbytes: new_peer_window(group, nbytes, next(numbers)), lambda lost: _agreed(group, lost))
        for _ in range(2)
    )
    return CopyEngines(windows, CopyEngineTransport(group, windows, arrivals, flags, torch.device("cuda")))


def _host() -> str | None:
    """Which host this is; None if its ranks are not to share memory."""
    settings = "".join(os.environ.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
    if os.environ.get("NCCL_P2P_DISABLE", "0") not in ("", "0") or "max_split_size_mb" in settings:
        return None
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return None
