"""Windows are lent to one buffer at a time, alike on every rank; without windows there is no promise."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

import lamella_buffers
from lamella_buffers import FAKE_GPUS, WindowAllocator, _copy_engines, copy_engines_of
from lamella_buffers._copy_engines import _host
from lamella_buffers._driver import DriverError
from lamella_buffers._fake_copy_engines import FakeWindowAllocator
from lamella_buffers._windows import over_ranks
from lamella_buffers.testing import check_allocator
from lamella_testing import run_ranks
from lamella_testing.interrupts import Interrupt

MIB = 1 << 20
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Plain:
    """A window of ordinary memory."""

    nbytes: int

    def lending(self) -> AbstractContextManager[None]:
        return nullcontext()


def _allocator() -> tuple[WindowAllocator, list[Plain]]:
    windows: list[Plain] = []

    def new_window(nbytes: int) -> Plain:
        windows.append(Plain(nbytes))
        return windows[-1]

    return WindowAllocator(new_window), windows


def _freed(allocator: WindowAllocator, nbytes: int) -> torch.Tensor:
    buffer = allocator.create(nbytes, torch.uint8, CPU)
    allocator.free(buffer)
    return buffer


def test_the_window_allocator_conforms() -> None:
    check_allocator(_allocator()[0])


def test_fake_windows_take_their_bytes_whether_lent_or_idle() -> None:
    allocator = FakeWindowAllocator(CPU)
    check_allocator(allocator)
    allocator = FakeWindowAllocator(CPU)
    large, small = _freed(allocator, 12 * MIB), _freed(allocator, 3 * MIB)
    taken = []
    for change in (allocator.allocate, allocator.free):
        for buffer in (large, small):
            change(buffer)
            lent = sum(one.untyped_storage().nbytes() for one in (large, small))
            taken.append(lent + sum(window.idle.untyped_storage().nbytes() for window in allocator.windows))
    assert [window.nbytes for window in allocator.windows] == [12 * MIB, 10 * MIB]
    assert taken == [12 * MIB, *[22 * MIB] * 3]
    allocator.allocate(small)
    assert [window.idle.untyped_storage().nbytes() for window in allocator.windows] == [12 * MIB, 7 * MIB]


def test_fake_gpus_of_one_host_have_engines_of_one_set_of_windows() -> None:
    for num_ranks, has_engines in ((8, True), (16, False)):
        dist.init_process_group(FAKE_GPUS, store=FakeStore(), rank=0, world_size=num_ranks)
        try:
            world = dist.group.WORLD
            assert world is not None
            engines = [copy_engines_of(world) for _ in range(2)]
            allocators = {engine.allocator for engine in engines if engine is not None}
            assert len(allocators) == has_engines
        finally:
            dist.destroy_process_group()


def test_a_window_serves_one_buffer_after_another() -> None:
    allocator, windows = _allocator()
    buffers = [_freed(allocator, nbytes) for nbytes in (5 * MIB, 4 * MIB, 6 * MIB)]
    assert windows == []  # a buffer is born elsewhere
    for buffer in buffers[:2]:
        allocator.allocate(buffer)
        window = allocator.window_of(buffer)
        assert window is windows[0]
        assert allocator.window_of(buffer[MIB:]) is window
        allocator.free(buffer)
    allocator.allocate(buffers[2])
    assert windows == [Plain(6 * MIB)]
    assert allocator.reserved_nbytes == 6 * MIB


def test_as_many_windows_as_buffers_that_have_bytes_at_once_and_the_smallest_that_fits() -> None:
    allocator, windows = _allocator()
    large, small, middle = (_freed(allocator, nbytes) for nbytes in (8 * MIB, 2 * MIB, 4 * MIB))
    for buffer in (large, small):
        allocator.allocate(buffer)
    allocator.free(large)
    allocator.free(small)
    allocator.allocate(middle)
    assert allocator.window_of(middle) is windows[0]
    allocator.allocate(small)
    assert allocator.window_of(small) is windows[1]
    assert len(windows) == 2


def test_after_an_interrupt_at_any_line_and_a_free_every_window_is_lent_again() -> None:
    allocator, windows = _allocator()
    first, second = (_freed(allocator, 4 * MIB) for _ in range(2))

    def lend() -> None:
        for buffer in (first, second):
            allocator.allocate(buffer)
        for buffer in (first, second):
            allocator.free(buffer)

    lend()
    counter = Interrupt((lamella_buffers,))
    counter.during(lend)
    for at in range(counter.num_lines):
        Interrupt((lamella_buffers,), at).during(lend)
        for buffer in (first, second):
            if buffer.untyped_storage().nbytes():
                allocator.free(buffer)
    allocator.allocate(first)
    allocator.allocate(second)
    assert allocator.window_of(first) is windows[0] and allocator.window_of(second) is windows[1]
    assert len(windows) == 2


def test_small_buffers_have_windows_of_their_own() -> None:
    """The caching allocator has separate segments for windows, without blocks of further tensors."""
    allocator, windows = _allocator()
    large, small = _freed(allocator, 2 * MIB), _freed(allocator, 512)
    allocator.allocate(large)
    allocator.free(large)
    allocator.allocate(small)
    assert allocator.window_of(small) is windows[1]
    assert [window.nbytes for window in windows] == [2 * MIB, MIB]


def test_a_buffer_that_comes_back_is_known_by_its_new_window() -> None:
    allocator, windows = _allocator()
    first, second = _freed(allocator, 4 * MIB), _freed(allocator, 2 * MIB)
    for buffer in (first, second):
        allocator.allocate(buffer)
    for buffer in (first, second):
        allocator.free(buffer)
    large = _freed(allocator, 3 * MIB)
    allocator.allocate(second)
    allocator.allocate(large)
    allocator.allocate(first)
    assert [allocator.window_of(buffer) for buffer in (first, second, large)] == [windows[2], windows[1], windows[0]]
    assert allocator.window_of(torch.empty(4)) is None


def test_the_window_of_a_buffer_that_died_with_its_bytes_is_not_used_again() -> None:
    """Buffers die at different times on each rank, and windows must be equal on all."""
    allocator, windows = _allocator()
    for _ in range(2):
        buffer = _freed(allocator, 2 * MIB)
        allocator.allocate(buffer)
        del buffer
    assert len(windows) == 2


def test_windows_of_buffers_that_died_with_their_bytes_on_all_ranks_serve_again() -> None:
    """Otherwise every model deleted while unsharded would cost its bytes for good."""
    windows: list[Plain] = []

    def new_window(nbytes: int) -> Plain:
        windows.append(Plain(nbytes))
        return windows[-1]

    reports: list[set[int]] = []

    def agree(lost: set[int]) -> set[int]:
        reports.append(lost)
        return lost & died_elsewhere

    allocator = WindowAllocator(new_window, agree)
    first, second, third = (_freed(allocator, 2 * MIB) for _ in range(3))
    died_elsewhere: set[int] = set()
    for buffer in (first, second):
        allocator.allocate(buffer)
    del buffer, first
    allocator.allocate(third)
    assert reports[-1] == {0}
    assert allocator.window_of(third) is windows[2]
    died_elsewhere = {0, 1}
    fourth = _freed(allocator, 2 * MIB)
    allocator.allocate(fourth)
    assert allocator.window_of(fourth) is windows[0]
    assert len(windows) == 3


def test_over_ranks_returns_the_results_of_all_ranks_on_every_rank() -> None:
    def check() -> list[int]:
        assert dist.group.WORLD is not None
        return over_ranks(dist.group.WORLD, lambda: dist.get_rank() ** 2)

    assert run_ranks(check, 3) == [[0, 1, 4]] * 3


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, OSError, KeyError])
def test_an_action_that_fails_on_one_rank_raises_on_all_ranks(error: type[Exception]) -> None:
    def check() -> str:
        def action() -> int:
            if dist.get_rank() == 1:
                raise error("no memory left")
            return dist.get_rank()

        assert dist.group.WORLD is not None
        try:
            over_ranks(dist.group.WORLD, action)
        except Exception as caught:  # noqa: BLE001
            return f"{type(caught).__name__}: {caught}"
        return "nothing"

    local_message = f"{error.__name__}: {error('no memory left')}"
    remote_message = f"DriverError: rank 1: {error('no memory left')}"
    assert run_ranks(check, 3) == [remote_message, local_message, remote_message]


@pytest.mark.parametrize("trouble", ["several hosts", "settings of one rank", "a window that one rank cannot map"])
def test_ranks_of_which_some_cannot_share_memory_have_no_copy_engines(
    trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All groups alike: ranks with windows make no call of NCCL's."""
    troubles: dict[str, list[str | None]] = {"several hosts": ["a", "b"], "settings of one rank": ["a", None]}
    hosts = troubles.get(trouble, ["a", "a"])

    def share(address: int) -> None:
        if dist.get_rank() == 1:
            raise DriverError("the other's memory cannot be reached")

    def new_window(group: dist.ProcessGroup, nbytes: int) -> None:
        over_ranks(group, lambda: share(0))

    def check() -> bool:
        assert dist.group.WORLD is not None
        monkeypatch.setattr(dist, "get_backend_config", lambda _: "cuda:nccl")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(_copy_engines, "_host", lambda: hosts[dist.get_rank()])
        monkeypatch.setattr(_copy_engines, "new_peer_window", new_window)
        return copy_engines_of(dist.group.WORLD) is None

    assert run_ranks(check, 2) == [True, True]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_P2P_DISABLE", "1"),
        ("PYTORCH_CUDA_ALLOC_CONF", "garbage_collection_threshold:0.8,max_split_size_mb:128"),
        ("PYTORCH_ALLOC_CONF", "max_split_size_mb:128"),
    ],
)
def test_settings_that_keep_ranks_from_sharing_memory(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _host() is not None
    monkeypatch.setenv(name, value)
    assert _host() is None


def test_a_host_that_cannot_be_named_shares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> str:
        raise PermissionError(path)

    monkeypatch.setattr(Path, "read_text", refuse)
    assert _host() is None


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=40))
def test_the_same_calls_use_the_same_windows(calls: list[tuple[int, bool]]) -> None:
    """As peers must; and no window has two buffers."""

    def replay() -> list[int]:
        allocator, windows = _allocator()
        buffers = [_freed(allocator, nbytes) for nbytes in (100, MIB, 3 * MIB, 3 * MIB, 7 * MIB)]
        used = []
        for i, needs_bytes in calls:
            has_bytes = buffers[i].untyped_storage().nbytes() > 0
            if needs_bytes and not has_bytes:
                allocator.allocate(buffers[i])
            elif not needs_bytes and has_bytes:
                allocator.free(buffers[i])
            live_windows = [allocator.window_of(b) for b in buffers if b.untyped_storage().nbytes() > 0]
            places = [
                next(j for j, window in enumerate(windows) if window is live_window) for live_window in live_windows
            ]
            assert len(set(places)) == len(places)
            used += places
        return used

    assert replay() == replay()


def test_groups_without_nccl_have_none() -> None:
    def check() -> bool:
        assert dist.group.WORLD is not None
        return copy_engines_of(dist.group.WORLD) is None

    assert run_ranks(check, 2) == [True, True]
