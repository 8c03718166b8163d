import pytest
import torch

from lamella_buffers import Allocator, CachingAllocator, MemPoolAllocator, PoolAllocator, _pool
from lamella_buffers.testing import check_allocator


def test_the_caching_allocator_conforms() -> None:
    assert isinstance(CachingAllocator(), Allocator)
    check_allocator(CachingAllocator())


def test_a_freed_buffer_holds_no_bytes() -> None:
    allocator = CachingAllocator()
    buffer = allocator.create(100, torch.bfloat16, torch.device("cpu"))
    assert buffer.untyped_storage().nbytes() == 200
    allocator.free(buffer)
    assert buffer.untyped_storage().nbytes() == 0


def test_an_empty_buffer_can_come_and_go() -> None:
    allocator = CachingAllocator()
    buffer = allocator.create(0, torch.float32, torch.device("cpu"))
    allocator.free(buffer)
    allocator.allocate(buffer)


class _Renewing(CachingAllocator):
    """Gives a new storage, which old views do not see."""

    def allocate(self, buffer: torch.Tensor) -> None:
        if buffer.untyped_storage().nbytes():
            raise RuntimeError
        buffer.set_(torch.empty_like(buffer).untyped_storage(), 0, buffer.shape)  # type: ignore[call-overload]


class _Overlapping(CachingAllocator):
    """Gives all buffers of a dtype the same bytes."""

    def __init__(self) -> None:
        self._bytes = torch.empty(1 << 16, dtype=torch.uint8)

    def create(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._bytes[: numel * dtype.itemsize].view(dtype)

    def allocate(self, buffer: torch.Tensor) -> None: ...

    def free(self, buffer: torch.Tensor) -> None: ...


class _Careless(_Overlapping):
    """Distinct bytes, but nothing is ever refused."""

    def create(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype)


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [(_Renewing(), "follow its buffer"), (_Overlapping(), "must raise"), (_Careless(), "must raise")],
)
def test_the_conformance_test_catches_a_broken_allocator(broken: Allocator, complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        check_allocator(broken)


def test_the_conformance_test_catches_live_buffers_that_share_bytes() -> None:
    class Sharing(_Overlapping):
        def __init__(self) -> None:
            super().__init__()
            self._live: set[int] = set()

        def create(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            buffer = super().create(numel, dtype, device)
            self._live.add(id(buffer))
            return buffer

        def allocate(self, buffer: torch.Tensor) -> None:
            if id(buffer) in self._live:
                raise RuntimeError
            self._live.add(id(buffer))

        def free(self, buffer: torch.Tensor) -> None:
            if id(buffer) not in self._live:
                raise RuntimeError
            self._live.remove(id(buffer))

    with pytest.raises(AssertionError, match="must survive"):
        check_allocator(Sharing())


def test_the_conformance_test_catches_addresses_that_are_not_aligned() -> None:
    class Shifting(CachingAllocator):
        def create(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            return super().create(numel + 1, dtype, device)[1:]

        def allocate(self, buffer: torch.Tensor) -> None:
            if buffer.untyped_storage().nbytes():
                raise RuntimeError
            buffer.untyped_storage().resize_((buffer.numel() + 1) * buffer.itemsize)

    with pytest.raises(AssertionError, match="multiple of 64"):
        check_allocator(Shifting())


def test_the_conformance_test_catches_freed_buffers_whose_bytes_can_be_read() -> None:
    class Keeping(CachingAllocator):
        """Frees nothing, but refuses misuse."""

        def __init__(self) -> None:
            self._free: set[int] = set()

        def create(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            buffer = super().create(numel, dtype, device)
            self._free.discard(id(buffer))  # another's, earlier
            return buffer

        def allocate(self, buffer: torch.Tensor) -> None:
            if id(buffer) not in self._free:
                raise RuntimeError
            self._free.remove(id(buffer))

        def free(self, buffer: torch.Tensor) -> None:
            if id(buffer) in self._free:
                raise RuntimeError
            self._free.add(id(buffer))

    with pytest.raises(AssertionError, match="no bytes"):
        check_allocator(Keeping())


def test_a_torch_that_cannot_swap_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pool, "can_swap_memory", lambda: False)
    with pytest.raises(RuntimeError, match=r"Expected a torch that can move memory .* or CachingAllocator"):
        PoolAllocator()


def test_torchs_memory_pools_are_refused_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"Expected a CUDA device, got none.*CachingAllocator or PoolAllocator"):
        MemPoolAllocator()
