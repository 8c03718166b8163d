"""Gathers and exchanges by copy engines instead of kernels, between the ranks of a host.

A ring's kernel takes multiprocessors from concurrent matmuls for its whole duration. Here each rank has the copy
engines push its pieces into every peer's memory; only memory and wires are used. `docs/design/0006-speed.md` has the
figures.
"""

from __future__ import annotations

import os
import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate, count
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lamella_buffers import _driver as driver
from lamella_buffers._exchange import add_up, arrivals_numel, places_for
from lamella_buffers._fake_copy_engines import fake_copy_engines_of
from lamella_buffers._payload import Payload, Payloads
from lamella_buffers._transport import (
    FAKE_GPUS,
    Done,
    NcclTransport,
    Pending,
    ReduceOp,
    Transport,
    copy_missing,
    spans_fake_hosts,
)
from lamella_buffers._windows import SMALL, PeerWindow, WindowAllocator, new_peer_window, over_ranks

_FLAG_NBYTES = 4
_WORTH_TWO_STREAMS = 32 << 20  # bytes: 20 us of casts


class _Channel:
    """Moves of a kind (gathers, or exchanges) between the ranks of a group, in sequence.

    Note [Flags]. On the stream of a move each rank signals "open" to every peer (my memory may be written), waits for
    all peers' "open", pushes, signals "closed" to every peer (my pushes have arrived), and waits for all peers'
    "closed". A rank may still write its own pieces after its "open": peers never write to them.
    A flag is a word in the memory of the waiting rank. The peer writes the word by a copy, ordered after the earlier
    copies; the waiting rank resets the word to 0. The peer writes the word again only after the next signal from this
    rank, sent after the reset. So no signal is lost or taken twice.
    The value written is the move's name, a hash of its windows and places, and each rank waits for the name of its own
    move. Ranks with different places for a buffer wait forever, as with mismatched collectives; no unexpected memory
    is written. The name is constant, so a captured graph can be replayed.
    A rank's death leaves the peers' streams waiting, as in a ring, but out of sight of NCCL's watchdog.

    Args:
        flags: A window of words, all 0.
        rank: This process's place in the group.
        index: The channel's number: each channel has two words a rank.
        device: Device of the moved memory.
    """

    def __init__(self, flags: PeerWindow, rank: int, index: int, device: torch.device) -> None:
        num_ranks = len(flags.addresses)
        self._flags = flags  # dropped, the pool would free the flags' block under the peers' writes
        self.peers = [(rank + i) % num_ranks for i in range(1, num_ranks)]
        self._rank = rank
        self._words = [
            [base + _FLAG_NBYTES * (2 * index + kind) * num_ranks for base in flags.addresses] for kind in (0, 1)
        ]
        self._device = device
        # Kept for the life of the channel: copies read `word` whenever a signal reaches the head of its stream.
        self._signals: dict[int, _Signal] = {}
        # Set by each `begin` and never cleared: the next move waits for this one on whatever stream it comes.
        self._last_stream: torch.cuda.Stream | None = None

    def new_move(self, name: int) -> _Move:
        """Prepare a move on the current stream.

        Args:
            name: The move's name, not 0.

        Effects: the current stream waits for the last move's stream, if different.
        """
        stream = torch.cuda.current_stream()
        # Moves of a channel share flags: two moves in flight on different streams would take each other's signals.
        if self._last_stream is not None and self._last_stream != stream:
            stream.wait_stream(self._last_stream)
        self._last_stream = stream
        signal = self._signals.get(name) or self._new_signal(name)
        return _Move(stream.cuda_stream, signal, signal.calls(stream.cuda_stream))

    def _new_signal(self, name: int) -> _Signal:
        # Written on this stream; the next move's stream waits for this one. During capture nothing is written until
        # replay: kept for eager moves, the word would hold garbage. Such a word belongs to the graph alone.
        word = torch.full((1,), name, dtype=torch.int32, device=self._device)
        mine = _FLAG_NBYTES * self._rank
        tells = [[(bases[i] + mine, word.data_ptr(), _FLAG_NBYTES) for i in self.peers] for bases in self._words]
        flags = [[bases[self._rank] + _FLAG_NBYTES * i for i in self.peers] for bases in self._words]
        signal = _Signal(
            word,
            [driver.DeviceCopies(places) for places in tells],
            [driver.FlagOps(addresses, name) for addresses in flags],
            {},
        )
        if not torch.cuda.is_current_stream_capturing():
            self._signals[name] = signal
        return signal


class _Signal(NamedTuple):
    """Signals to the peers and waits for theirs: "open" and "closed". `word` is the source of the signals' copies."""

    word: torch.Tensor
    tells: list[driver.DeviceCopies]
    waits: list[driver.FlagOps]
    eager_calls: dict[int, _Calls]

    def calls(self, stream: int) -> _Calls:
        """The calls that put a move's signals and waits on a stream, prepared once for each stream outside captures."""
        if (calls := self.eager_calls.get(stream)) is not None and not torch.cuda.is_current_stream_capturing():
            return calls
        (tell_open, tell_closed), (wait_open, wait_closed) = (
            [ops.calls(stream) for ops in operations] for operations in (self.tells, self.waits)
        )
        calls = _Calls(tell_open, wait_open, tell_closed + wait_closed)
        if not torch.cuda.is_current_stream_capturing():
            self.eager_calls[stream] = calls
        return calls


class _Calls(NamedTuple):
    """The driver calls of a move: its own "open", the wait for its peers', and "closed" with the wait."""

    begin: list[driver.Call]
    open: list[driver.Call]
    close: list[driver.Call]


class _Move:
    """A move on a stream given by its driver handle, from its "open" to its peers' "closed".

    Note [Interrupted moves]. Ctrl-C may be raised at any line. A move that stopped half-way would leave words unwaited:
    the next move would take a stale word for a peer's signal and push too early, or overwrite a word that a slower rank
    waits for, which then never ends. So a move once begun is completed before the interrupt is raised further, with
    its data: a peer that was interrupted elsewhere, or nowhere, uses them. A method called again makes only the driver
    calls that are missing (`driver.complete`). Other errors complete nothing: data may be missing, and the peers wait,
    as in a ring that a rank never joined.

    Attributes:
        stream: The driver's handle.
    """

    def __init__(self, stream: int, signal: _Signal, calls: _Calls) -> None:
        self.stream = stream
        self._signal = signal  # The source of signals not yet on the stream; a captured move's belongs to no channel.
        self._calls = calls
        self._begin_codes: list[int] = []
        self._open_codes: list[int] = []
        self._close_codes: list[int] = []

    @property
    def is_begun(self) -> bool:
        """Whether peers may write this rank's memory, and await this rank's writes."""
        return bool(self._begin_codes)

    @property
    def is_closing(self) -> bool:
        """Whether peers may read this rank's writes: no more may follow."""
        return bool(self._close_codes)

    def begin(self) -> None:
        """Let peers write this rank's memory.

        Effects: the stream signals all peers.
        """
        driver.complete(self._calls.begin, self._begin_codes)

    def open(self) -> None:
        """Let later work on the stream write to peers.

        Effects: the stream waits for all peers.
        """
        driver.complete(self._calls.open, self._open_codes)

    def close(self) -> None:
        """End the move: later work on the stream may read the peers' writes, and the peers may read this rank's.

        Effects: the stream signals all peers, and waits for theirs.
        """
        driver.complete(self._calls.close, self._close_codes)


def _name_of(places: Iterable[tuple[int, int, int]]) -> int:
    """A move's name, a hash of (window's number, offset, bytes) of each destination. Not 0, and 31 bits."""
    return zlib.crc32(repr(list(places)).encode()) >> 1 | 1


class _Push(NamedTuple):
    """A prepared gather into fixed addresses: this rank's pieces, and their copies to every peer.

    Attributes:
        addresses: The addresses of the pieces.
        num_first: Number of pieces pushed while the rest are still being cast.
        first_copies: Copies of the first pieces.
        remaining_copies: Copies of all further pieces.
        name: The move's name.
    """

    addresses: tuple[int, ...]
    num_first: int
    first_copies: driver.DeviceCopies
    remaining_copies: driver.DeviceCopies
    name: int


class _Exchange(NamedTuple):
    """A prepared exchange into fixed addresses: copies with new sources at each call, and the move's name.

    `offsets` has, for each payload, the peers' pieces in `full` as byte offsets.
    """

    copies: driver.DeviceCopies
    offsets: list[list[int]]
    name: int


class _Arrivals(NamedTuple):
    """Destination of pieces: a buffer with bytes during an exchange only, each payload's place, and this rank's rows.

    `pushes` has the prepared exchanges by the buffer's address, which varies among few windows.
    """

    buffer: torch.Tensor
    places: list[torch.Tensor]
    local_rows: list[torch.Tensor]
    pushes: dict[int, _Exchange]


class CopyEngineTransport(NcclTransport):
    """NCCL, except for gathers into windows and sums wider than the wire: copy engines push both.

    Args:
        group: The axis's process group.
        windows: Allocator of unsharded buffers.
        arrivals: Allocator of the buffers for arriving pieces of gradients.
        flags: A window of words, all 0.
        device: Device of all windows.
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
        # By dtype and sizes: as many as kinds of units, with bytes only while an exchange runs.
        self._buffers: dict[tuple[torch.dtype, tuple[int, ...]], _Arrivals] = {}
        self._pushes: dict[tuple[tuple[int, ...], tuple[int, ...]], _Push] = {}
        self._fills: torch.cuda.Stream | None = None
        self._gathers, self._exchanges = (_Channel(flags, self.rank, i, device) for i in (0, 1))

    def all_gather(self, payloads: Sequence[Payload]) -> Pending:
        """Gather all payloads, of any dtypes, in a single call.

        Effects: on the current stream, after a wait for the last gather's stream if different: copies to every peer,
            and waits for theirs. A shard outside its `full` is first copied into place. A kernel of NCCL's, if some
            `full` lies in no window.
        """
        return self.fill_and_gather(Payloads(payloads))

    def fill_and_gather(self, payloads: Payloads) -> Pending:
        """Gather shards, and first write some (cast, quantise) while the peers get ready.

        Most shards are written on a separate stream while the first are being pushed.

        Effects: as `all_gather`, and a call or two of each filling's function.
        """
        if (push := self.push_into(payloads)) is None:
            payloads.fill()
            return super().all_gather(payloads)
        if push.addresses != _addresses(payloads.shards):
            payloads.fill()
            copy_missing(self._local_pieces(payloads.wholes), payloads.shards)
            payloads = Payloads(payloads)  # without fillings: written above
        move = self._gathers.new_move(push.name)
        try:
            # Before the casts, so that peers need not wait for this rank's casts: Note [Flags].
            move.begin()
            self._fill_and_push(move, push, payloads)
            move.close()
        except KeyboardInterrupt:
            if move.is_begun:  # Note [Interrupted moves]
                self._complete_gather(move, push, payloads)
            raise
        return Done()

    def _fill_and_push(self, move: _Move, push: _Push, payloads: Payloads) -> None:
        """Push this rank's pieces to all peers, each once it has been written."""
        if push.num_first == len(payloads) or payloads.are_there:
            payloads.fill()
            move.open()
            push.first_copies.enqueue(move.stream)
        else:
            payloads.fill_first(push.num_first)
            rest_is_there = self._fill_beside(payloads, push.num_first)
            move.open()
            push.first_copies.enqueue(move.stream)
            rest_is_there()  # else the copies below would push pieces still being cast
        push.remaining_copies.enqueue(move.stream)

    def _complete_gather(self, move: _Move, push: _Push, payloads: Payloads) -> None:
        """Do all of an interrupted gather that may be missing; writing and pushing a piece twice changes nothing."""
        move.begin()
        if not move.is_closing:
            if self._fills is not None:
                torch.cuda.current_stream().wait_stream(self._fills)
            payloads.fill()
            move.open()
            push.first_copies.enqueue(move.stream)
            push.remaining_copies.enqueue(move.stream)
        move.close()

    def _fill_beside(self, payloads: Payloads, num_first: int) -> Callable[[], object]:
        """Write all but the first shards in parallel with the current stream's next work.

        Returns:
            A function that makes the current stream wait for the shards.
        """
        current = torch.cuda.current_stream()
        if self._fills is None:
            self._fills = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
        # The current stream has waited for the optimizer's writes and the window's last readers; this stream has not.
        self._fills.wait_stream(current)
        with torch.cuda.stream(self._fills):
            payloads.fill_after_first(num_first)
        return partial(current.wait_stream, self._fills)

    def push_into(self, payloads: Payloads) -> _Push | None:
        """The copies of this rank's pieces to every peer, prepared once; None if a whole lies in no window."""
        wholes = payloads.wholes
        # Addresses are a safe key: windows are never freed, so an address always means the same place in a window.
        key = _addresses(wholes), payloads.nbytes
        if (push := self._pushes.get(key)) is not None:
            return push
        windows = [self._windows.window_of(full) for full in wholes]
        pairs = [(a, b) for a, b in zip(wholes, windows, strict=True) if isinstance(b, PeerWindow)]
        if len(pairs) < len(wholes):
            return None
        pieces = list(zip(self._local_pieces(wholes), [window for _, window in pairs], strict=True))
        num_first = _num_first([piece.nbytes for piece, _ in pieces])
        first_copies, remaining_copies = (
            driver.DeviceCopies(
                (window.addresses[peer] + self._offset_of(piece, window), piece.data_ptr(), piece.nbytes)
                for piece, window in some
                for peer in self._gathers.peers
            )
            for some in (pieces[:num_first], pieces[num_first:])
        )
        name = _name_of((window.number, self._offset_of(full, window), full.nbytes) for full, window in pairs)
        self._pushes[key] = _Push(
            _addresses([piece for piece, _ in pieces]), num_first, first_copies, remaining_copies, name
        )
        return self._pushes[key]

    def _local_pieces(self, wholes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's piece of each whole, flat, by a single view operator instead of `view` and an index."""
        numels = [full.numel() // self.num_ranks for full in wholes]
        return [
            full.as_strided((numel,), (1,), full.storage_offset() + self.rank * numel)
            for full, numel in zip(wholes, numels, strict=True)
        ]

    def _exchange(self, payloads: Sequence[Payload], op: ReduceOp) -> None:
        """Push each piece to its owner, which adds the pieces up.

        On the current stream, after a wait for the last exchange's stream if different. A window as large as the
        payloads' `full` is lent for the time of the call.
        """
        arrivals = self._arrivals_for(payloads)
        buffer = arrivals.buffer
        # An interrupted exchange leaves its buffer allocated, with its move completed or never begun.
        if buffer.untyped_storage().nbytes():
            self._arrivals.free(buffer)
        self._arrivals.allocate(buffer)
        pushes = arrivals.pushes.get(buffer.data_ptr()) or self._new_pushes(payloads, arrivals)
        shards = [shard for shard, _ in payloads]
        fused = _fused_sums() if shards[0].is_cuda and shards[0].dtype == torch.float32 else None
        # Before peers are told: the host may wait for the stream here, and the stream waits for the peers then.
        launches = [] if fused is None else fused.launches_for(arrivals.places, shards)
        move = self._exchanges.new_move(pushes.name)
        wholes = [full for _, full in payloads]
        try:
            self._push_to_owners(move, pushes, wholes)
        except KeyboardInterrupt:
            if move.is_begun:  # Note [Interrupted moves]. This rank's sum is lost with its step.
                self._push_to_owners(move, pushes, wholes)
            raise
        local_pieces = self._local_pieces(wholes)
        if fused is None:
            torch._foreach_copy_(arrivals.local_rows, local_pieces)
            add_up(arrivals.places, shards, op)
        else:
            fused.add_up(launches, arrivals.places, local_pieces, shards, self.rank, averages=op == dist.ReduceOp.AVG)
        # Before the sum has run: the window's next user waits for this stream before its "open", and peers write only
        # after the "open".
        self._arrivals.free(buffer)

    @staticmethod
    def _push_to_owners(move: _Move, pushes: _Exchange, wholes: Sequence[torch.Tensor]) -> None:
        """Push the peers' pieces, or after an interrupt all of it that may be missing."""
        move.begin()
        move.open()
        if not move.is_closing:
            # By addresses: a view for each piece would cost the host more than the copies. Autograd allocates gradients
            # anew in each backward, so sources change with each call.
            pushes.copies.read_from(
                [
                    address + offset
                    for address, offsets in zip(_addresses(wholes), pushes.offsets, strict=True)
                    for offset in offsets
                ]
            )
            pushes.copies.enqueue(move.stream)
        move.close()

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
        """Prepare the exchange for the window of the arrivals' buffer, which has its bytes."""
        buffer, local_rows = arrivals.buffer, arrivals.local_rows
        window = self._arrivals.window_of(buffer)
        assert isinstance(window, PeerWindow)
        peers = self._exchanges.peers
        copies = driver.DeviceCopies(
            (window.addresses[peer] + self._offset_of(mine, window), full.data_ptr() + peer * mine.nbytes, mine.nbytes)
            for mine, (_, full) in zip(local_rows, payloads, strict=True)
            for peer in peers
        )
        offsets = [[peer * mine.nbytes for peer in peers] for mine in local_rows]
        exchange = _Exchange(copies, offsets, _name_of([(window.number, buffer.nbytes, len(local_rows))]))
        arrivals.pushes[buffer.data_ptr()] = exchange
        return exchange

    def _offset_of(self, mine: torch.Tensor, window: PeerWindow) -> int:
        """Offset of a tensor in its window, the same on every rank."""
        offset = mine.data_ptr() - window.addresses[self.rank]
        assert 0 <= offset <= window.nbytes - mine.nbytes, "a buffer lies outside of its window"
        return offset


@cache
def _fused_sums() -> Any:
    """The module of Triton's kernel, or None without Triton, which torch's wheels for GPUs bring."""
    return import_module("lamella_buffers._fused_sums") if find_spec("triton") else None


def _num_first(nbytes: Sequence[int]) -> int:
    """Number of pieces to push while the rest are being cast: a third of the bytes, the two taking equally long.

    All pieces where a second stream would cost more than the overlap saves.
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
    """Copy-engine gathers and reductions of a group: memory (`allocator`) and calls (`transport`)."""

    allocator: WindowAllocator
    transport: Transport


# The process's: engines hold their group, so entries stay until the process ends. Freed earlier, memory mapped by peers
# would go to other tensors.
_engines: weakref.WeakKeyDictionary[dist.ProcessGroup, CopyEngines | None] = weakref.WeakKeyDictionary()


def copy_engines_of(group: dist.ProcessGroup) -> CopyEngines | None:
    """Copy engines for a group's parameters and gradients; None if unavailable.

    Available over NCCL if all ranks share a host and can map their peers' memory. Torch's expandable segments and
    `backend:cudaMallocAsync` prevent mapping, `max_split_size_mb` prevents use of the windows, and NCCL_P2P_DISABLE is
    respected. Each group has a single object; object and windows stay until the process ends, unaffected by
    `torch.cuda.empty_cache()`. A group of `FAKE_GPUS` on one host has engines that take windows' memory alone.

    Effects: the first time, collective on the group, and the host waits for the device.
    """
    if dist.get_backend_config(group) == FAKE_GPUS:
        if group.size() == 1 or spans_fake_hosts(group):
            return None
        transport = fake_copy_engines_of(group)
        return CopyEngines(transport.windows, transport)
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
    # Two allocators: with shared windows, a gather lent a reduction's window would wait for the reduction's stream.
    numbers = count(1)
    windows, arrivals = (
        WindowAllocator(lambda nbytes: new_peer_window(group, nbytes, next(numbers)), lambda lost: _agreed(group, lost))
        for _ in range(2)
    )
    return CopyEngines(windows, CopyEngineTransport(group, windows, arrivals, flags, torch.device("cuda")))


def _agreed(group: dist.ProcessGroup, mine: set[int]) -> set[int]:
    """The windows named by all ranks, after all devices have finished."""
    # Before the ranks answer: a buffer may die with copies still in flight to or from its window.
    torch.cuda.synchronize()
    return set.intersection(*over_ranks(group, lambda: mine))


def _host() -> str | None:
    """The host's boot id; None if settings forbid shared memory."""
    settings = "".join(os.environ.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
    if os.environ.get("NCCL_P2P_DISABLE", "0") not in ("", "0") or "max_split_size_mb" in settings:
        return None
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return None
