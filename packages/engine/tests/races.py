"""Finds accesses to memory without an order, over fake streams on a CPU: a race detector by vector clocks.

Each operator is work on the current fake stream. Two accesses to one memory, with at least one write, must
be ordered: the later stream has waited for the earlier one. Freed memory goes back to the allocating stream, as
with torch's allocator on a GPU: the next allocation there must be ordered after every access to the freed memory.

The host is a stream too. Work begins after all earlier work of the host; the host itself waits by `synchronize`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from lamella_buffers import CachingAllocator, LocalTransport, Pending, ReduceOp
from lamella_engine.testing import FakeStream, FakeStreams, FakeWork, fake_streams, streams_of


@dataclass
class _Memory:
    """The accesses to one allocation, maybe of several storages (`lamella_buffers.standalone`).

    Attributes:
        allocated_on: None for memory from before the detector.
        addresses: The addresses of the bytes in the process; empty without bytes.
        write: The last write.
        reads: Since then, the last on each stream.
    """

    allocated_on: FakeStream | None
    addresses: range = range(0)
    write: tuple[FakeWork, str] | None = None
    reads: dict[FakeStream, tuple[FakeWork, str]] = field(default_factory=dict)

    @property
    def accesses(self) -> list[tuple[FakeWork, str]]:
        return [*([] if self.write is None else [self.write]), *self.reads.values()]


class Races(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches every operator, allocation and free.

    Args:
        streams: Current for the operators.

    Attributes:
        host: The host's stream; `on_host` makes it current.
        violations: A line for each pair of accesses without an order.
    """

    def __init__(self, streams: FakeStreams) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.streams = streams
        self.host = FakeStream(streams)
        self.host.seen = streams.seen_by_host
        self.host.seen[self.host] = 0
        self.violations: list[str] = []
        self._memories: dict[int, _Memory] = {}
        self._freed: dict[FakeStream, list[_Memory]] = {}
        self._names: dict[FakeStream, str] = {}

    def name(self, stream: FakeStream, name: str) -> None:
        """Name a stream in `violations`."""
        self._names[stream] = name

    def on_host(self) -> Any:
        """Make the host's stream current: operators run on the host itself."""
        return self.streams.stream(self.host)

    def synchronize(self) -> None:
        """Let the host wait for the device, as `torch.cuda.synchronize` does."""
        for stream in (self.streams.compute, *self._names):
            stream.record_event().synchronize()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        schema = func._schema
        is_view = any(a.alias_info is not None and not a.alias_info.is_write for a in schema.arguments)
        if is_view:
            return output
        work = self._begin()
        for i, argument in enumerate(schema.arguments):
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _plain(value):
                self._access(tensor, work, func.__name__, is_write=is_written)
        for tensor in _plain(output):
            if tensor.untyped_storage()._cdata not in self._memories:
                self._allocate(tensor, work.stream)
                self._access(tensor, work, func.__name__, is_write=True)
        return output

    def _begin(self) -> FakeWork:
        work = self.streams.work()
        for stream, count in self.host.seen.items():
            work.stream.seen[stream] = max(work.stream.seen.get(stream, 0), count)
        return work

    def _memory(self, tensor: torch.Tensor, allocated_on: FakeStream | None) -> _Memory:
        storage = tensor.untyped_storage()
        key, start = storage._cdata, storage.data_ptr()
        if key not in self._memories:
            around = (memory for memory in self._memories.values() if start in memory.addresses)
            self._memories[key] = next(around, None) or _Memory(allocated_on, _addresses(storage))
            weakref.finalize(storage, self._die, key).atexit = False
        return self._memories[key]

    def _access(self, tensor: torch.Tensor, work: FakeWork, operation: str, *, is_write: bool) -> None:
        memory = self._memory(tensor, None)
        conflicts = memory.accesses if is_write else memory.accesses[: memory.write is not None]
        self._check(conflicts, work.stream, f"{operation} {'writes' if is_write else 'reads'}")
        if is_write:
            memory.write, memory.reads = (work, operation), {}
        else:
            memory.reads[work.stream] = work, operation

    def _check(self, earlier: list[tuple[FakeWork, str]], stream: FakeStream, operation: str) -> None:
        for work, name in earlier:
            if not work.is_before(stream.seen):
                self.violations.append(
                    f"{operation} on {self._name(stream)}, not ordered after {name} on {self._name(work.stream)}"
                )

    def _name(self, stream: FakeStream) -> str:
        return "host" if stream is self.host else self._names.get(stream, "compute")

    def _allocate(self, tensor: torch.Tensor, stream: FakeStream) -> None:
        for memory in self._freed.pop(stream, []):
            self._check(memory.accesses, stream, "an allocation")
        memory = self._memory(tensor, stream)
        memory.allocated_on, memory.write, memory.reads = stream, None, {}
        memory.addresses = _addresses(tensor.untyped_storage())

    def _free(self, memory: _Memory) -> None:
        if memory.allocated_on is not None:
            self._freed.setdefault(memory.allocated_on, []).append(memory)

    def _die(self, key: int) -> None:
        memory = self._memories.pop(key)
        if not any(memory is other for other in self._memories.values()):
            self._free(memory)

    def allocate(self, buffer: torch.Tensor) -> None:
        """Note that a buffer got bytes, on the current stream."""
        self._begin()
        self._allocate(buffer, self.streams.current)

    def free(self, buffer: torch.Tensor) -> None:
        """Note a free of a buffer's bytes."""
        memory = self._memory(buffer, None)
        self._free(replace(memory))
        memory.addresses, memory.write, memory.reads = range(0), None, {}


def _addresses(storage: torch.UntypedStorage) -> range:
    return range(storage.data_ptr(), storage.data_ptr() + storage.nbytes())


def _plain(value: object) -> Iterator[torch.Tensor]:
    for leaf in tree_leaves(value):
        if isinstance(leaf, DTensor):
            yield from _plain(leaf._local_tensor)
        elif is_traceable_wrapper_subclass(leaf):
            yield from _plain([getattr(leaf, name) for name in leaf.__tensor_flatten__()[0]])
        elif isinstance(leaf, torch.Tensor):
            yield leaf


def _all_reduce(self: LocalTransport, tensors: Any, op: ReduceOp) -> Pending:
    """In place of a single rank's, which touches nothing."""
    for tensor in tensors:
        tensor.mul_(1)
    return self.all_gather([])


@contextmanager
def detected(model: nn.Module) -> Iterator[Races]:
    """Run a fresh model on fake streams, and note every race.

    Collectives of one rank run on their stream at once, like NCCL's.
    """
    races = Races(fake_streams(model))
    streams = streams_of(model)
    for name in ("all_gather_stream", "reduce_scatter_stream", "all_reduce_stream"):
        races.name(getattr(streams, name), name)
    allocate, free = CachingAllocator.allocate, CachingAllocator.free

    def allocate_noted(self: CachingAllocator, buffer: torch.Tensor) -> None:
        allocate(self, buffer)
        races.allocate(buffer)

    def free_noted(self: CachingAllocator, buffer: torch.Tensor) -> None:
        free(self, buffer)
        races.free(buffer)

    with ExitStack() as stack:
        stack.enter_context(patch.object(CachingAllocator, "allocate", allocate_noted))
        stack.enter_context(patch.object(CachingAllocator, "free", free_noted))
        stack.enter_context(patch.object(LocalTransport, "all_reduce", _all_reduce))
        stack.enter_context(races)
        yield races
