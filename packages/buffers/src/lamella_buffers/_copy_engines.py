"""Gathers and exchanges by copy engines instead of kernels, between the ranks of a host.

A ring's kernel takes multiprocessors from the matmuls beside it for as long as it runs. Here each rank has the copy
engines push its pieces into every peer's memory; nothing but memory and wires is used. `docs/design/0006-speed.md` has
the figures.
"""

from __future__ import annotations

import os
import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, count
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from lamella_buffers import _driver as driver
from lamella_buffers._exchange import add_up, arrivals_numel, places_for
from lamella_buffers._payload import Payload, Payloads
from lamella_buffers._transport import Done, NcclTransport, Pending, ReduceOp, copy_missing
from lamella_buffers._windows import SMALL, PeerWindow, WindowAllocator, new_peer_window, over_ranks

_FLAG_NBYTES = 4
_WORTH_TWO_STREAMS = 32 << 20  # bytes, which take 20 us to cast


class _Channel:
    """Moves of one kind between the ranks of a group, one after another.

    Note [Flags]. On the stream of a move each rank tells every peer that its memory may be written, waits until all
    have told it the same, pushes, tells every peer that it has, and waits until all have told it that. What it pushes
    may still be made after it has told them: nobody writes there.
    A flag is a word in the memory of the rank that waits. A peer writes it (by a copy, after the copies before it), and
    the rank that waited for it makes it 0. A peer writes it again only after it heard from this rank once more, which
    this rank says after it has made the flag 0.
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

    def begin(self, name: int) -> _Move:
        """Begin a move: peers may write this rank's memory.

        Args:
            name: The move's, not 0.

        Effects: the current stream waits for the last move's, if that was another, and tells all peers.
        """
        stream = torch.cuda.current_stream()
        if self._last_stream is not None and self._last_stream != stream:
            stream.wait_stream(self._last_stream)
        self._last_stream = stream
        signal = self._signals.get(name) or self._new_signal(name)
        signal.tells[0].enqueue(stream.cuda_stream)
        return _Move(stream.cuda_stream, signal)

    def _new_signal(self, name: int) -> _Signal:
        # On this stream, which the next move's waits for. In a graph that is captured nothing is written until it is
        # replayed: such a word is that graph's alone.
        word = torch.full((1,), name, dtype=torch.int32, device=self._device)
        mine = _FLAG_NBYTES * self._rank
        tells = [[(bases[i] + mine, word.data_ptr(), _FLAG_NBYTES) for i in self.peers] for bases in self._words]
        flags = [[bases[self._rank] + _FLAG_NBYTES * i for i in self.peers] for bases in self._words]
        signal = _Signal(word, [driver.Copies(each) for each in tells], [driver.FlagOps(each, name) for each in flags])
        if not torch.cuda.is_current_stream_capturing():
            self._signals[name] = signal
        return signal


class _Signal(NamedTuple):
    """What tells peers of a move, and waits for theirs: before it, and after it."""

    word: torch.Tensor
    tells: list[driver.Copies]
    waits: list[driver.FlagOps]


class _Move(NamedTuple):
    """A move that has begun, on a stream as the driver has it."""

    stream: int
    signal: _Signal

    def open(self) -> None:
        """Let what comes next on the stream write to peers.

        Effects: the stream waits for all peers.
        """
        self.signal.waits[0].enqueue(self.stream)

    def close(self) -> None:
        """End it: what comes next on the stream may read what peers wrote, and peers what this rank did.

        Effects: the stream tells all peers, and waits for them.
        """
        self.signal.tells[1].enqueue(self.stream)
        self.signal.waits[1].enqueue(self.stream)


def _name_of(places: Iterable[tuple[int, int, int]]) -> int:
    """A move's name: the number of each window that it goes to, where in it, and how many bytes. Not 0, and 31 bits."""
    return zlib.crc32(repr(list(places)).encode()) >> 1 | 1


class _Push(NamedTuple):
    """A gather into one place: this rank's pieces of it, and the copies of them to every peer.

    Attributes:
        own: The addresses of the pieces.
        num_first: How many of them are pushed while the others are still being cast.
        first: Their copies.
        rest: The others'.
        name: The move's.
    """

    own: tuple[int, ...]
    num_first: int
    first: driver.Copies
    rest: driver.Copies
    name: int


class _Exchange(NamedTuple):
    """An exchange into one place: the copies, which read from elsewhere each time, and the move's name.

    `offsets` says for each payload where in its `full` the peers' pieces lie, in bytes.
    """

    copies: driver.Copies
    offsets: list[list[int]]
    name: int


class _Arrivals(NamedTuple):
    """Where pieces arrive: a buffer whose bytes come and go, each payload's place in it, and there this rank's row.

    `pushes` has what is pushed there, by the buffer's address: it was lent one of few windows.
    """

    buffer: torch.Tensor
    places: list[torch.Tensor]
    own: list[torch.Tensor]
    pushes: dict[int, _Exchange]


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
        self._pushes: dict[tuple[tuple[int, ...], tuple[int, ...]], _Push] = {}
        self._fills: torch.cuda.Stream | None = None
        self._gathers, self._exchanges = (_Channel(flags, self.rank, i, device) for i in (0, 1))

    def all_gather(self, payloads: Sequence[Payload]) -> Pending:
        """Gather all payloads in one call, of whatever dtypes.

        Effects: on the current stream, which is made to wait for the last gather's if that was another: copies to every
            peer, and waits for theirs. A shard that is no slice of its `full` is copied there first. A kernel of
            NCCL's, if some `full` lies in no window.
        """
        return self.fill_and_gather(Payloads(payloads))

    def fill_and_gather(self, payloads: Payloads) -> Pending:
        """Gather shards of which some are first written (cast, quantised), in the time that peers take to be ready.

        Most are written while the first are being pushed, on a stream of their own.

        Effects: those of `all_gather`, and one or two calls of each filling's function.
        """
        if (push := self.push_into(payloads)) is None:
            payloads.fill()
            return super().all_gather(payloads)
        if push.own != _addresses(payloads.shards):
            payloads.fill()
            copy_missing(self._own(payloads.wholes), payloads.shards)
            payloads = Payloads(payloads)
        move = self._gathers.begin(push.name)
        if push.num_first == len(payloads) or payloads.are_there:
            payloads.fill()
            move.open()
            push.first.enqueue(move.stream)
        else:
            payloads.fill_first(push.num_first)
            rest_is_there = self._fill_beside(payloads, push.num_first)
            move.open()
            push.first.enqueue(move.stream)
            rest_is_there()
        push.rest.enqueue(move.stream)
        move.close()
        return Done()

    def _fill_beside(self, payloads: Payloads, num_first: int) -> Callable[[], object]:
        """Write all but the first shards beside the next work of the current stream.

        Returns:
            A function that makes the current stream wait for them.
        """
        current = torch.cuda.current_stream()
        if self._fills is None:
            self._fills = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
        self._fills.wait_stream(current)
        with torch.cuda.stream(self._fills):
            payloads.fill_after_first(num_first)
        return partial(current.wait_stream, self._fills)

    def push_into(self, payloads: Payloads) -> _Push | None:
        """How this rank's pieces get to every peer, prepared the first time; None if one of the wholes is in no window.

        A buffer that gets another window has other addresses. A window stays, and nothing else is where it is.
        """
        wholes = payloads.wholes
        key = _addresses(wholes), payloads.nbytes
        if (push := self._pushes.get(key)) is not None:
            return push
        windows = [self._windows.window_of(whole) for whole in wholes]
        pairs = [(a, b) for a, b in zip(wholes, windows, strict=True) if isinstance(b, PeerWindow)]
        if len(pairs) < len(wholes):
            return None
        own = list(zip(self._own(wholes), [window for _, window in pairs], strict=True))
        num_first = _num_first([piece.nbytes for piece, _ in own])
        first, rest = (
            driver.Copies(
                (window.addresses[peer] + self._offset_of(piece, window), piece.data_ptr(), piece.nbytes)
                for piece, window in some
                for peer in self._gathers.peers
            )
            for some in (own[:num_first], own[num_first:])
        )
        name = _name_of((window.number, self._offset_of(whole, window), whole.nbytes) for whole, window in pairs)
        self._pushes[key] = _Push(_addresses([piece for piece, _ in own]), num_first, first, rest, name)
        return self._pushes[key]

    def _own(self, wholes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's piece of each, flat: one view, where `view` and an index would be two."""
        numels = [whole.numel() // self.num_ranks for whole in wholes]
        return [
            whole.as_strided((numel,), (1,), whole.storage_offset() + self.rank * numel)
            for whole, numel in zip(wholes, numels, strict=True)
        ]

    def _exchange(self, payloads: Sequence[Payload], op: ReduceOp) -> None:
        """Push each piece to the rank that adds it up.

        On the current stream, which is made to wait for the last exchange's if that was another. A window as large as
        the payloads' `full` is lent for the time of the call.
        """
        arrivals = self._arrivals_for(payloads)
        buffer = arrivals.buffer
        self._arrivals.allocate(buffer)
        pushes = arrivals.pushes.get(buffer.data_ptr()) or self._new_pushes(payloads, arrivals)
        move = self._exchanges.begin(pushes.name)
        move.open()
        # By addresses: a view for each piece would cost the host more than the copies.
        wholes = [full for _, full in payloads]
        pushes.copies.read_from(
            [
                address + offset
                for address, offsets in zip(_addresses(wholes), pushes.offsets, strict=True)
                for offset in offsets
            ]
        )
        pushes.copies.enqueue(move.stream)
        torch._foreach_copy_(arrivals.own, self._own(wholes))
        move.close()
        add_up(arrivals.places, [shard for shard, _ in payloads], op)
        self._arrivals.free(buffer)

    def _arrivals_for(self, payloads: Sequence[Payload]) -> _Arrivals:
        full = payloads[0].full
        key = full.dtype, tuple([shard.numel() for shard, _ in payloads])
        if key not in self._buffers:
            buffer = self._arrivals.create(arrivals_numel(payloads, self.num_ranks), full.dtype, full.device)
            places = places_for(payloads, self.num_ranks, buffer)
            self._buffers[key] = _Arrivals(buffer, places, [place[self.rank] for place in places], {})
            self._arrivals.free(buffer)
        return self._buffers[key]

    def _new_pushes(self, payloads: Sequence[Payload], arrivals: _Arrivals) -> _Exchange:
        """Where pieces are pushed to while the arrivals' buffer, which has its bytes, has this window."""
        buffer, own = arrivals.buffer, arrivals.own
        window = self._arrivals.window_of(buffer)
        assert isinstance(window, PeerWindow)
        peers = self._exchanges.peers
        copies = driver.Copies(
            (window.addresses[peer] + self._offset_of(mine, window), full.data_ptr() + peer * mine.nbytes, mine.nbytes)
            for mine, (_, full) in zip(own, payloads, strict=True)
            for peer in peers
        )
        offsets = [[peer * mine.nbytes for peer in peers] for mine in own]
        made = _Exchange(copies, offsets, _name_of([(window.number, buffer.nbytes, len(own))]))
        arrivals.pushes[buffer.data_ptr()] = made
        return made

    def _offset_of(self, mine: torch.Tensor, window: PeerWindow) -> int:
        """Where something lies in its window, on every rank alike."""
        offset = mine.data_ptr() - window.addresses[self.rank]
        assert 0 <= offset <= window.nbytes - mine.nbytes, "a buffer lies outside of its window"
        return offset


def _num_first(nbytes: Sequence[int]) -> int:
    """How many pieces to push while the others are being cast: about a third of the bytes, which take as long.

    All of them where they are so few that a second stream would cost more.
    """
    total = sum(nbytes)
    if total < _WORTH_TWO_STREAMS:
        return len(nbytes)
    num_small = sum(1 for end in accumulate(nbytes) if 3 * end <= total)
    return max(1, num_small)


def _addresses(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    return tuple(map(torch.Tensor.data_ptr, tensors))


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
    hosts = over_ranks(group, _host)
    if None in hosts or len(set(hosts)) > 1:
        return None
    try:
        flags = new_peer_window(group, SMALL)
    except RuntimeError:
        return None
    # Two, so that no gather waits for a reduction because it was lent a window that one had.
    numbers = count(1)
    windows, arrivals = (
        WindowAllocator(lambda nbytes: new_peer_window(group, nbytes, next(numbers)), lambda lost: _agreed(group, lost))
        for _ in range(2)
    )
    return CopyEngines(windows, CopyEngineTransport(group, windows, arrivals, flags, torch.device("cuda")))


def _agreed(group: dist.ProcessGroup, mine: set[int]) -> set[int]:
    """What all ranks name, when their devices are done with it."""
    torch.cuda.synchronize()
    return set.intersection(*over_ranks(group, lambda: mine))


def _host() -> str | None:
    """Which host this is; None if its ranks are not to share memory."""
    settings = "".join(os.environ.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
    if os.environ.get("NCCL_P2P_DISABLE", "0") not in ("", "0") or "max_split_size_mb" in settings:
        return None
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return None
