"""A pooled allocator: learns buffers' lifetimes, then gives each allocation a planned place."""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import torch

from lamella_buffers._allocator import Allocator, CachingAllocator
from lamella_buffers._lifetimes import Lifetime, extent, peak_nbytes, place
from lamella_buffers._memory import can_swap_memory, swap_memory

_ALIGNMENT = 512  # bytes, as torch's caching allocator has it
_MOST_EVENTS = 1 << 16
_NUM_REMEMBERED = 64


@dataclass(frozen=True)
class PoolReport:
    """A pool's plan and its use.

    Attributes:
        planned_nbytes: The plan's extent, over all streams.
        bound_nbytes: The most bytes alive at once in any planned round: a lower bound for plans. Summed over streams.
        reserved_nbytes: Bytes of the plan allocated so far. Parts without a request are not allocated.
        live_nbytes: The most bytes ever alive at once, in the plan and outside.
        num_inside: Allocations in the plan, since the plan was made.
        num_outside: Allocations outside the plan, since then.
        num_plans: Number of plans made.
    """

    planned_nbytes: int
    bound_nbytes: int
    reserved_nbytes: int
    live_nbytes: int
    num_inside: int
    num_outside: int
    num_plans: int

    def __str__(self) -> str:
        return (
            f"pool: {_mib(self.planned_nbytes)} planned where {_mib(self.bound_nbytes)} were alive at once, "
            f"{_mib(self.reserved_nbytes)} reserved, {_mib(self.live_nbytes)} alive at most; "
            f"plan {self.num_plans}: {self.num_inside} allocations inside, {self.num_outside} outside"
        )


class PoolAllocator:
    """Learns buffers' lifetimes, plans a place for each allocation, and from then on allocates nothing.

    A *round* lasts from the first allocation until nothing is allocated: with ZeRO-3 a forward with its backward, or a
    validation. Each round starts anew: the number of microbatches, and rounds of different kinds, do not matter. A
    round outside the plan is planned when it occurs a second time. A first step, without prefetch, and a step ended by
    an exception are therefore never planned.

    In a round the k-th allocation of a buffer on a stream has a place. The buffer gets the place if no live buffer
    overlaps it at the time, whatever the plan says; all further allocations come from `source`, as without a plan.

    Bytes move under a buffer's storage: views follow, and the storage cannot be resized meanwhile. `record_stream` has
    no effect on a tensor in the plan.

    An object may serve several models; their units must not run in several threads at a time.

    Note [Interrupted moves]. A KeyboardInterrupt may end `allocate` or `free` between two lines. Memory moves in one
    call; `allocate` records the move before, and `free` after. So a buffer with bytes is always recorded, and a buffer
    recorded without bytes was interrupted: its next `allocate` drops the record, and no plan is made of the round.

    Args:
        source: Allocates the plan's memory, and everything outside the plan. None means a `CachingAllocator`.

    Raises:
        RuntimeError: This torch cannot move memory between storages.
    """

    def __init__(self, source: Allocator | None = None) -> None:
        if not can_swap_memory():
            raise RuntimeError(
                "Expected a torch that can move memory between storages (UntypedStorage._swap_data_ptr_), got "
                f"{torch.__version__}. Take torch 2.12 or later, or CachingAllocator."
            )
        self._source = CachingAllocator() if source is None else source
        self._serials = count()  # never given out twice: a plan must not take a new buffer for a dead one
        self._buffers: dict[int, _Buffer] = {}  # by the address of a storage; `_forget` drops dead ones
        self._live_nbytes: dict[int, int] = {}  # by serial, of the buffers with bytes
        # Replaced when the last live buffer is freed: turns of allocations count from there.
        self._round = _Round(0)
        # Hashes of rounds outside the plan, the oldest forgotten first: a second occurrence makes a plan due.
        self._seen: deque[int] = deque(maxlen=_NUM_REMEMBERED)
        # The traces of rounds that came twice; gone with the last buffer.
        self._learned: list[_Trace] = []
        # Set at a round's end or at a buffer's death, heeded between rounds alone: live buffers lie in the old plan.
        self._plan_is_due = False
        self._plan = _PoolPlan([])
        self._num_plans = self._num_inside = self._num_outside = 0
        self._peak_nbytes = 0

    def create(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Make the buffer, outside of the plan.

        Effects: as the source's `create`.
        """
        buffer = self._source.create(numel, dtype, device)
        storage = buffer.untyped_storage()
        if buffer.nbytes:
            # By the C++ storage's address, which a later storage may reuse: the weak reference's callback removes the
            # entry when this storage dies.
            gone = _caller(weakref.ref(self), storage._cdata)
            mine = _Buffer(weakref.ref(storage, gone), next(self._serials), buffer.nbytes)
            self._buffers[storage._cdata] = mine
            self._count(mine)
        return buffer

    def allocate(self, buffer: torch.Tensor) -> None:
        """Put the buffer in its planned place if free; else give it bytes of the source.

        Effects: the first use of a chunk of the plan allocates the chunk on the current stream.
        """
        storage = buffer.untyped_storage()
        if storage.nbytes() != 0:
            raise RuntimeError(f"Expected a freed buffer, got one that holds {storage.nbytes()} bytes.")
        mine = self._buffer_of(buffer, storage)
        if mine is None:
            return
        if mine.serial in self._live_nbytes:
            self._retract(mine)
        # Only between rounds: a buffer in the old plan would overlap places of the new.
        if self._plan_is_due and not self._live_nbytes:
            self._make_plan()
        stream = _current_stream(buffer.device)
        place = self._plan.free_place(_AllocationTurn(stream, mine.serial, self._round.turn_of(mine)))
        # Recorded before the memory moves: Note [Interrupted moves].
        mine.place, mine.is_new = place, False
        self._count(mine)
        self._round.note(_AllocationEvent(mine.serial, stream))
        if place is None:
            self._source.allocate(buffer)
            self._num_outside += 1
            self._round.left_plan = True
        else:
            place.lend_to(buffer, self._source)
            self._num_inside += 1

    def free(self, buffer: torch.Tensor) -> None:
        """Take the bytes back.

        Effects: none on a stream.
        """
        storage = buffer.untyped_storage()
        mine = self._buffer_of(buffer, storage)
        if mine is None:
            return
        if storage.nbytes() == 0:
            raise RuntimeError(f"Expected an allocated buffer of {buffer.numel()} elements, got one without bytes.")
        if mine.place is None:
            self._source.free(buffer)
        else:
            # On the host: readers may still be running. Only the same stream, ordered after the readers by the caller,
            # reuses the place.
            mine.place.take_back(storage)
        if not mine.is_new:
            self._round.note(_AllocationEvent(mine.serial))
        self._uncount(mine)

    def report(self) -> PoolReport:
        """Bytes planned and used so far, without a host sync."""
        return PoolReport(
            planned_nbytes=self._plan.nbytes,
            bound_nbytes=self._plan.bound_nbytes,
            reserved_nbytes=self._plan.reserved_nbytes,
            live_nbytes=self._peak_nbytes,
            num_inside=self._num_inside,
            num_outside=self._num_outside,
            num_plans=self._num_plans,
        )

    def _buffer_of(self, buffer: torch.Tensor, storage: torch.UntypedStorage) -> _Buffer | None:
        """The pool's record of a buffer; None for a buffer without elements."""
        mine = self._buffers.get(storage._cdata)
        if mine is None and buffer.nbytes:
            raise ValueError("Expected a buffer that this pool made, got another. Its own allocator takes it.")
        return mine

    # -- rounds -----------------------------------------------------------------------------------------------------

    def _count(self, mine: _Buffer) -> None:
        self._live_nbytes[mine.serial] = mine.nbytes
        self._peak_nbytes = max(self._peak_nbytes, sum(self._live_nbytes.values()))

    def _uncount(self, mine: _Buffer) -> None:
        mine.place = None
        self._live_nbytes.pop(mine.serial, None)
        if not self._live_nbytes:
            self._end_round()

    def _retract(self, mine: _Buffer) -> None:
        """Drop the record of a move that an interrupt ended: Note [Interrupted moves]."""
        self._round.is_complete = False
        if mine.place is not None:
            mine.place.vacate()
        self._uncount(mine)

    def _end_round(self) -> None:
        ended, self._round = self._round, _Round(self._round.number + 1)
        if not ended.left_plan or not ended.is_complete:
            return
        # Hashes: rounds that never repeat hold no memory. A hash collision costs a needless plan.
        signature = hash(tuple(ended.events))
        if signature in self._seen:
            self._learned.append(_trace(ended.events, {mine.serial: mine.nbytes for mine in self._known_buffers()}))
            self._plan_is_due = True
        else:
            self._seen.append(signature)

    def _make_plan(self) -> None:
        alive = {mine.serial for mine in self._known_buffers()}
        self._learned = [[life for life in trace if life.key.serial in alive] for trace in self._learned]
        self._plan = _PoolPlan(self._learned)
        self._plan_is_due = False
        self._num_plans += 1
        self._num_inside = self._num_outside = 0

    def _known_buffers(self) -> list[_Buffer]:
        """All known buffers, copied: the cyclic collector may free a model, and its buffers, during iteration."""
        return list(self._buffers.values())

    def _forget(self, key: int) -> None:
        """Forget a dead buffer: the next plan omits it. The last buffer's death drops the plan."""
        mine = self._buffers.pop(key)
        if mine.place is not None:
            # The dead storage took the place's memory along, so `home` is empty for good. Serials are never reused: no
            # request leads to this place again.
            mine.place.vacate()
        if self._live_nbytes:
            self._round.is_complete = False
        if mine.serial in self._live_nbytes:
            self._uncount(mine)
        self._plan_is_due = bool(self._learned)
        if not self._buffers:
            self._learned, self._plan, self._plan_is_due = [], _PoolPlan([]), False


# -- events and rounds ------------------------------------------------------------------------------------------------


class _AllocationEvent(NamedTuple):
    """Allocation of a buffer on a stream, or a free (None)."""

    serial: int
    stream: Hashable = None


class _AllocationTurn(NamedTuple):
    """The turn-th allocation of a buffer in a round."""

    stream: Hashable
    serial: int
    turn: int


_Trace = list[Lifetime[_AllocationTurn]]


@dataclass(eq=False, slots=True)
class _Buffer:
    """The pool's record of a buffer. The storage is held weakly: it must die with the model."""

    storage: weakref.ref[torch.UntypedStorage]
    serial: int
    nbytes: int
    is_new: bool = True  # still with the bytes of `create`, which belong to no round
    place: _PoolReservation | None = None
    round: int = -1
    turn: int = 0


@dataclass(eq=False, slots=True)
class _Round:
    """Events since nothing was allocated."""

    number: int
    left_plan: bool = False
    is_complete: bool = True
    events: list[_AllocationEvent] = field(default_factory=list)

    def turn_of(self, mine: _Buffer) -> int:
        """Index, within this round, of the buffer's next allocation."""
        if mine.round != self.number:
            mine.round, mine.turn = self.number, 0
        mine.turn += 1
        return mine.turn - 1

    def note(self, event: _AllocationEvent) -> None:
        if len(self.events) < _MOST_EVENTS:
            self.events.append(event)
        else:  # A round that never ends (weights kept between steps) would grow the list without bound.
            self.is_complete = False


def _trace(events: Sequence[_AllocationEvent], nbytes: Mapping[int, int]) -> _Trace:
    """Lifetimes of a round's allocations. Computed only for rounds about to be planned."""
    turns: Counter[int] = Counter()
    alive: dict[int, tuple[_AllocationTurn, int]] = {}
    trace = []
    for tick, (serial, stream) in enumerate(events):
        if stream is not None:
            alive[serial] = _AllocationTurn(stream, serial, turns[serial]), tick
            turns[serial] += 1
        else:
            request, start = alive.pop(serial)
            trace.append(Lifetime(request, _aligned(nbytes[serial]), start, tick))
    return trace


def _caller(pool: weakref.ref[PoolAllocator], key: int) -> Callable[[object], None]:
    """Tell the pool of a buffer's death, unless the pool died first. A bound method would keep the pool alive."""

    def call(_: object) -> None:
        if (alive := pool()) is not None:
            alive._forget(key)

    return call


# -- plans ------------------------------------------------------------------------------------------------------------


class _PoolPlan:
    """A place for each allocation of some traces; each stream has separate memory.

    A stream's memory is cut into chunks wherever no place would be cut. A chunk is then about as large as a buffer, and
    the caching allocator reuses a block freed by an earlier buffer.
    """

    def __init__(self, learned: Sequence[_Trace]) -> None:
        self._places: dict[_AllocationTurn, _PoolReservation] = {}
        self._chunks: list[_MemoryChunk] = []
        self.nbytes = self.bound_nbytes = 0
        for stream in dict.fromkeys(life.key.stream for trace in learned for life in trace):
            self._add([[life for life in trace if life.key.stream == stream] for trace in learned])

    def _add(self, traces: Sequence[_Trace]) -> None:
        nbytes = {life.key: life.nbytes for trace in traces for life in trace}
        offsets = place(traces)
        self.nbytes += extent(offsets, nbytes)
        self.bound_nbytes += max(peak_nbytes(trace) for trace in traces)
        chunk, begin = _MemoryChunk(), 0
        for request in sorted(offsets, key=offsets.__getitem__):
            offset = offsets[request]
            if offset >= begin + chunk.nbytes:
                chunk, begin = _MemoryChunk(), offset
                self._chunks.append(chunk)
            self._places[request] = chunk.reserve(offset - begin, nbytes[request])

    @property
    def reserved_nbytes(self) -> int:
        return sum(chunk.nbytes for chunk in self._chunks if chunk.memory is not None)

    def free_place(self, request: _AllocationTurn) -> _PoolReservation | None:
        """The planned place, if any and free."""
        place = self._places.get(request)
        return place if place is not None and place.is_free else None


@dataclass(eq=False)
class _MemoryChunk:
    """Memory of several places; places may overlap."""

    nbytes: int = 0
    memory: torch.UntypedStorage | None = None
    occupied: set[tuple[int, int]] = field(default_factory=set)

    def reserve(self, start: int, nbytes: int) -> _PoolReservation:
        self.nbytes = max(self.nbytes, start + nbytes)
        return _PoolReservation(self, start, start + nbytes)

    def storage_at(self, start: int, nbytes: int, source: Allocator, device: torch.device) -> torch.UntypedStorage:
        """A storage over a part of the memory. The memory lives as long as any such storage."""
        if self.memory is None:
            self.memory = source.create(self.nbytes, torch.uint8, device).untyped_storage()
        part: torch.UntypedStorage = self.memory[start : start + nbytes]
        return part


@dataclass(eq=False)
class _PoolReservation:
    """A planned allocation. While a buffer is in place, its storage and `home` have exchanged memory."""

    chunk: _MemoryChunk
    start: int
    end: int
    home: torch.UntypedStorage | None = None

    @property
    def is_free(self) -> bool:
        occupied = self.chunk.occupied
        return not occupied or all(self.end <= start or end <= self.start for start, end in occupied)

    def lend_to(self, buffer: torch.Tensor, source: Allocator) -> None:
        if self.home is None:
            self.home = self.chunk.storage_at(self.start, buffer.nbytes, source, buffer.device)
        self.chunk.occupied.add((self.start, self.end))
        # Swapped, not copied or resized: parameters and autograd's graph hold views of this storage object.
        swap_memory(buffer.untyped_storage(), self.home)

    def take_back(self, storage: torch.UntypedStorage) -> None:
        assert self.home is not None
        swap_memory(storage, self.home)
        self.vacate()

    def vacate(self) -> None:
        self.chunk.occupied.discard((self.start, self.end))


def _current_stream(device: torch.device) -> Hashable:
    """The stream as a key for memory reuse; a CPU has a single order."""
    if device.type == "cpu":
        return device
    return device, torch.get_device_module(device).current_stream(device).stream_id


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"
