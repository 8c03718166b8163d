"""Pushes of copy engines, and the flags for their order, on CPU ranks with shared memory.

Copies and loads in memory mapped by forked ranks play the driver's calls, so addresses, places and the
order of flags are the real ones. `integration/tests/test_nccl_copy_engines.py` has the driver's own.
"""

from __future__ import annotations

import ctypes
import os
import random
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import lamella_buffers
from lamella_buffers import CachingAllocator, CopyEngineTransport, Payload, _copy_engines, _driver
from lamella_buffers._memory import swap_memory
from lamella_buffers._payload import Filling, Payloads
from lamella_buffers._windows import PeerWindow
from lamella_testing import run_ranks
from lamella_testing.interrupts import Interrupt

CPU = torch.device("cpu")
NBYTES = 1 << 16
NUMELS = (3, 256, 1, 700)


@dataclass(frozen=True)
class SharedWindow(PeerWindow):
    """A window in a file, mapped by every rank."""

    memories: tuple[torch.Tensor, ...] = ()

    def lending(self) -> AbstractContextManager[None]:
        return nullcontext()


class SharedAllocator(CachingAllocator):
    """Buffers take turns in one window."""

    def __init__(self, window: SharedWindow) -> None:
        self.window = window
        self._home = window.memories[dist.get_rank()].untyped_storage()
        self._storages: set[int] = set()

    def allocate(self, buffer: torch.Tensor) -> None:
        assert buffer.untyped_storage().nbytes() == 0, "a buffer is allocated twice"
        swap_memory(buffer.untyped_storage(), self._home[: buffer.nbytes])
        self._storages.add(buffer.untyped_storage()._cdata)

    def free(self, buffer: torch.Tensor) -> None:
        storage = buffer.untyped_storage()
        if storage._cdata in self._storages:
            swap_memory(storage, torch.UntypedStorage(0))  # type: ignore[no-untyped-call]
            self._storages.remove(storage._cdata)
        else:
            super().free(buffer)

    def window_of(self, buffer: torch.Tensor) -> PeerWindow | None:
        return self.window if buffer.untyped_storage()._cdata in self._storages else None


class DeviceCopies:
    """The driver's prepared copies, each run at once."""

    def __init__(self, moves: Iterable[tuple[int, int, int]]) -> None:
        self._moves = list(moves)

    def read_from(self, sources: list[int]) -> None:
        self._moves = [(into, a, nbytes) for (into, _, nbytes), a in zip(self._moves, sources, strict=True)]

    def enqueue(self, stream: int) -> None:
        _driver.complete(self.calls(stream), [])

    def calls(self, stream: int) -> list[partial[int]]:
        return [partial(_copied, move) for move in self._moves]


def _copied(move: tuple[int, int, int]) -> int:
    into, source, nbytes = move
    if nbytes == _copy_engines._FLAG_NBYTES:
        # By one store: memmove writes four bytes twice, and the second write may follow the waiting rank's reset.
        ctypes.c_uint32.from_address(into).value = ctypes.c_uint32.from_address(source).value
    else:
        ctypes.memmove(into, source, nbytes)
    return 0


class Flags:
    """The driver's waits, by loads. Endless waits fail."""

    def __init__(self, addresses: Sequence[int], value: int) -> None:
        self._words = [ctypes.c_uint32.from_address(address) for address in addresses]
        self._value = value

    def calls(self, stream: int) -> list[partial[int]]:
        return [partial(self._waited)]

    def _waited(self) -> int:
        for word in self._words:
            while (flag := word.value) != self._value:
                assert flag == 0, "ranks disagree on where a buffer lies"
                os.sched_yield()
            word.value = 0
        return 0


class Stream:
    """A stream without pending work; the only one."""

    cuda_stream = 0

    def __init__(self, priority: int = 0) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 0

    def synchronize(self) -> None: ...

    def wait_stream(self, other: Stream) -> None: ...


_numbers = count()


def _window(folder: Path) -> SharedWindow:
    number, rank = next(_numbers), dist.get_rank()
    paths = [folder / f"{number}-{i}" for i in range(dist.get_world_size())]
    paths[rank].write_bytes(bytes(NBYTES))
    dist.barrier()
    memories = tuple(torch.from_file(str(path), shared=True, size=NBYTES, dtype=torch.uint8) for path in paths)
    addresses = tuple(memory.data_ptr() for memory in memories)
    return SharedWindow(NBYTES, None, addresses, number, memories)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_driver, "DeviceCopies", DeviceCopies)
    monkeypatch.setattr(_driver, "FlagOps", Flags)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def _transport(folder: Path) -> tuple[CopyEngineTransport, SharedAllocator]:
    windows, arrivals = (SharedAllocator(_window(folder)) for _ in range(2))
    flags = _window(folder)
    group: Any = dist.group.WORLD
    fakes: tuple[Any, Any, Any] = windows, arrivals, flags
    return CopyEngineTransport(group, *fakes, CPU), windows


def _late(turn: int) -> None:
    """Another rank each time."""
    if turn % dist.get_world_size() == dist.get_rank():
        time.sleep(random.Random(turn).random() * 0.01)


def _values(rank: int, turn: int, numel: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * turn + rank)
    return torch.randint(-50, 50, (numel,), generator=generator).bfloat16()


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("shards_lie", ["in place", "elsewhere", "in another dtype", "in another dtype, and are large"])
def test_gathers_put_every_ranks_piece_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int, shards_lie: str
) -> None:
    if "large" in shards_lie:
        monkeypatch.setattr(_copy_engines, "_WORTH_TWO_STREAMS", 1)

    def check() -> None:
        transport, windows = _transport(tmp_path)
        buffers = [windows.create(num_ranks * sum(NUMELS), torch.bfloat16, CPU) for _ in range(2)]
        for buffer in buffers:
            windows.free(buffer)
        for turn in range(30):
            _late(turn)
            buffer = buffers[turn % 2]
            windows.allocate(buffer)
            buffer.fill_(float("nan"))
            wholes = torch.split(buffer, [num_ranks * numel for numel in NUMELS])
            parts = [full_tensor.view(num_ranks, -1)[dist.get_rank()] for full_tensor in wholes]
            shards = [_values(dist.get_rank(), turn, numel) for numel in NUMELS]
            if "dtype" in shards_lie:
                # One piece is in place already, like the shards of a group in the wire's dtype.
                parts[0].copy_(shards[0])
                payloads = [Payload(a, b) for a, b in zip(parts, wholes, strict=True)]
                casts = Filling(
                    torch._foreach_copy_, (parts[1:], [s.double() for s in shards[1:]]), range(1, len(parts))
                )
                transport.fill_and_gather(Payloads(payloads, [casts])).wait()
            else:
                if shards_lie == "in place":
                    torch._foreach_copy_(parts, shards)
                    shards = parts
                transport.all_gather([Payload(a, b) for a, b in zip(shards, wholes, strict=True)]).wait()
            _late(turn + 1)
            for full_tensor, numel in zip(wholes, NUMELS, strict=True):
                expected = torch.cat([_values(rank, turn, numel) for rank in range(num_ranks)])
                torch.testing.assert_close(full_tensor, expected, rtol=0.0, atol=0.0)
            windows.free(buffer)

    run_ranks(check, num_ranks)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("op", [dist.ReduceOp.SUM, dist.ReduceOp.AVG], ids=["sum", "mean"])
def test_sums_wider_than_their_wire_add_up_every_ranks_piece(
    tmp_path: Path, num_ranks: int, dtype: torch.dtype, op: Any
) -> None:
    def check() -> None:
        transport, _ = _transport(tmp_path)
        for turn in range(30):
            _late(turn)
            numels = NUMELS[: 1 + turn % 4]
            wholes = [_values(dist.get_rank(), turn, num_ranks * numel) for numel in numels]
            flat = torch.full((sum(numels),), float("nan"), dtype=dtype)
            shards = torch.split(flat, list(numels))
            transport.reduce_scatter([Payload(a, b) for a, b in zip(shards, wholes, strict=True)], op).wait()
            _late(turn + 1)
            for shard, numel in zip(shards, numels, strict=True):
                pieces = torch.stack([_values(rank, turn, num_ranks * numel) for rank in range(num_ranks)]).double()
                total = pieces.sum(0) if op == dist.ReduceOp.SUM else pieces.mean(0)
                expected = total.view(num_ranks, -1)[dist.get_rank()].to(dtype)
                torch.testing.assert_close(shard, expected, rtol=0.0, atol=0.0)

    run_ranks(check, num_ranks)


def test_a_gather_that_was_captured_first_leaves_nothing_to_the_next_that_its_graph_has_yet_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = torch.full
    words: list[torch.Tensor] = []

    def full(*args: Any, **options: Any) -> torch.Tensor:
        words.append(real(*args, **options))
        return words[-1]

    def check() -> None:
        transport, windows = _transport(tmp_path)
        buffer = windows.create(2 * 300, torch.float32, CPU)
        windows.free(buffer)
        windows.allocate(buffer)
        monkeypatch.setattr(torch, "full", full)
        for captured in (True, False):
            monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda captured=captured: captured)
            transport.all_gather([Payload(real((300,), float(dist.get_rank())), buffer)]).wait()
            dist.barrier()
            if captured:
                assert words
                torch._foreach_zero_(words)  # a captured graph has not run
        assert torch.equal(buffer, torch.arange(2.0).repeat_interleave(300))

    run_ranks(check, 2)


class _Moves:
    """A gather and an exchange that check their values, which differ with each turn."""

    def __init__(self, folder: Path) -> None:
        self._transport, self._windows = _transport(folder)
        self._rank = dist.get_rank()
        self._buffer = self._windows.create(2 * 300, torch.float32, CPU)
        self._windows.free(self._buffer)
        self.turn = 0

    def _free(self) -> None:
        if self._buffer.untyped_storage().nbytes():
            self._windows.free(self._buffer)

    def gather(self) -> None:
        self._free()
        self._windows.allocate(self._buffer)
        wholes = torch.split(self._buffer, [400, 200])
        shards = [whole.view(2, -1)[self._rank] for whole in wholes]
        sources = [torch.full_like(shard, 10.0 * self.turn + self._rank) for shard in shards]
        payloads = [Payload(shard, whole) for shard, whole in zip(shards, wholes, strict=True)]
        casts = Filling(torch._foreach_copy_, (shards, sources), range(2))
        self._transport.fill_and_gather(Payloads(payloads, [casts]))
        for whole in wholes:
            assert whole.view(2, -1)[:, -1].tolist() == [10.0 * self.turn, 10.0 * self.turn + 1]

    def exchange(self) -> None:
        shard = torch.empty(5)
        gradient = (torch.arange(10) + self.turn % 100).bfloat16()
        self._transport.reduce_scatter([Payload(shard, gradient)], dist.ReduceOp.AVG)
        assert torch.equal(shard, torch.arange(10.0).view(2, -1)[self._rank] + self.turn % 100)

    def both(self) -> None:
        self.gather()
        self.exchange()

    def interrupted(self, at: int) -> int:
        """Run both up to a line; return the number of moves that had begun."""
        moves: list[_copy_engines._Move] = []
        new_move = _copy_engines._Channel.new_move

        def recorded(channel: _copy_engines._Channel, name: int) -> _copy_engines._Move:
            moves.append(new_move(channel, name))
            return moves[-1]

        with mock.patch.object(_copy_engines._Channel, "new_move", recorded):
            Interrupt((lamella_buffers,), at).during(self.both)
        return sum(move.is_begun for move in moves)

    def go_on(self) -> None:
        self._free()
        for _ in range(2):
            self.turn += 1
            self.both()
        self.turn += 1


def test_an_interrupt_at_any_line_leaves_a_move_unbegun_or_complete_with_its_data(tmp_path: Path) -> None:
    def check() -> list[int]:
        moves = _Moves(tmp_path)
        moves.both()
        counter = Interrupt((lamella_buffers,))
        counter.during(moves.both)
        nums_begun = []
        for at in range(counter.num_lines):  # Both ranks stop at the same line.
            nums_begun.append(moves.interrupted(at))
            moves.go_on()
        for at, num_begun in enumerate(nums_begun):  # One rank stops, and its peer uses its data.
            if dist.get_rank() == 1:
                moves.interrupted(at)
            else:
                for move in (moves.gather, moves.exchange)[:num_begun]:
                    move()
            moves.go_on()
        return nums_begun

    for nums_begun in run_ranks(check, 2):
        assert nums_begun == sorted(nums_begun) and {nums_begun.count(num) > 5 for num in range(3)} == {True}


def test_gathers_and_exchanges_interleave(tmp_path: Path) -> None:
    """Each channel has separate flags."""

    def check() -> None:
        transport, windows = _transport(tmp_path)
        buffer = windows.create(4 * 300, torch.float32, CPU)
        windows.free(buffer)
        for turn in range(40):
            _late(turn)
            if turn % 3:
                windows.allocate(buffer)
                transport.all_gather([Payload(torch.full((300,), float(dist.get_rank() + turn)), buffer)])
                assert buffer.view(4, -1)[:, 0].tolist() == [rank + turn for rank in range(4)]
                windows.free(buffer)
            else:
                shard = torch.empty(5)
                transport.reduce_scatter([Payload(shard, (torch.arange(20) + turn).bfloat16())], dist.ReduceOp.AVG)
                assert torch.equal(shard, torch.arange(20.0).view(4, -1)[dist.get_rank()] + turn)

    run_ranks(check, 4)


def test_ranks_that_disagree_on_where_a_buffer_lies_write_nothing(tmp_path: Path) -> None:
    """On a GPU the ranks wait for ever, as with differing collectives."""

    def check() -> str:
        transport, windows = _transport(tmp_path)
        other = _window(tmp_path)
        if dist.get_rank() == 1:
            windows.window = other
            windows._home = other.memories[1].untyped_storage()
        buffer = windows.create(2 * 300, torch.float32, CPU)
        windows.free(buffer)
        windows.allocate(buffer)
        buffer.fill_(-1.0)
        try:
            transport.all_gather([Payload(torch.ones(300), buffer)])
        except AssertionError as error:
            theirs = buffer.view(2, -1)[1 - dist.get_rank()]
            assert bool((theirs == -1.0).all())
            return str(error)
        return "nothing"

    for error in run_ranks(check, 2):
        assert "ranks disagree" in error
