"""Conformance tests for allocators and transports of your own."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from itertools import product

import torch
import torch.distributed as dist

from lamella_buffers._allocator import Allocator
from lamella_buffers._payload import Payload
from lamella_buffers._transport import Transport


def check_allocator(allocator: Allocator, device: torch.device | str = "cpu", *, seed: int = 0) -> None:
    """Assert an engine's requirements of an allocator.

    Views made once, and graphs with saved views, read the bytes written after any later allocation; live buffers never
    share bytes, and keep their contents while further buffers come and go; addresses are aligned; allocating twice and
    freeing twice are refused; a freed buffer has no bytes; a new order of calls (a validation pass, a skipped layer)
    works, even after many repetitions of an earlier order. On a GPU: the bytes of a freed buffer stay with their
    stream.

    Args:
        allocator: The allocator, without any concurrent user.
        device: Device of the tests.
        seed: Seed of the random order of calls.

    Raises:
        AssertionError: A property does not hold; the message says which.

    Effects: allocates a few MiB on the current stream, and on two others; synchronises with the host.
    """
    where = torch.device(device)
    _check_views_follow(allocator, where)
    _check_graphs_follow(allocator, where)
    _check_misuse_is_refused(allocator, where)
    buffers = _Stamped(allocator, where)
    _check_any_order(buffers, random.Random(seed))
    _check_orders_that_repeat(buffers)
    _check_freed_is_empty(allocator, where)
    if where.type == "cuda":
        _check_streams_are_apart(allocator, where)


def _check_views_follow(allocator: Allocator, device: torch.device) -> None:
    buffer = allocator.create(1024, torch.float32, device)
    assert buffer.shape == (1024,), f"`create` must give a flat tensor of 1024 elements, gave {tuple(buffer.shape)}"
    view = buffer[256:512].view(16, 16)
    allocator.free(buffer)
    for value in (1.0, 2.0, 3.0, 4.0):
        allocator.allocate(buffer)
        # Checked before reading: a view left on a freed storage would read unmapped memory.
        assert view.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr(), "a view must follow its buffer"
        buffer.fill_(value)
        assert bool((view == value).all()), "a view made at creation must read every later allocation"
        allocator.free(buffer)


def _check_graphs_follow(allocator: Allocator, device: torch.device) -> None:
    """Backward reads a weight freed and filled again after forward."""
    buffer = allocator.create(1024, torch.float32, device)
    # The view is made now: torch makes none of a storage without bytes.
    weight = torch.nn.Parameter(buffer[256:512].view(16, 16))
    allocator.free(buffer)
    inputs = torch.ones(1, 16, device=device, requires_grad=True)
    for value in (1.0, 2.0, 3.0, 4.0):
        allocator.allocate(buffer)
        buffer.fill_(value)
        output = (inputs @ weight.t()).sum()
        allocator.free(buffer)
        # As an engine does: autograd would refuse the weight's view if the refill counted as a modification.
        with torch.autograd.grad_mode._unsafe_preserve_version_counter(buffer):
            allocator.allocate(buffer)
            buffer.fill_(-value)
        (gradient,) = torch.autograd.grad(output, inputs)
        assert bool((gradient == -16 * value).all()), "backward must read the bytes of the last allocation"
        allocator.free(buffer)


def _check_misuse_is_refused(allocator: Allocator, device: torch.device) -> None:
    buffer = allocator.create(1024, torch.bfloat16, device)
    for _ in range(4):
        assert _raises(lambda: allocator.allocate(buffer)), "allocating a buffer that has its bytes must raise"
        allocator.free(buffer)
        assert _raises(lambda: allocator.free(buffer)), "freeing a buffer that has no bytes must raise"
        allocator.allocate(buffer)
    allocator.free(buffer)


class _Stamped:
    """Seven buffers, each filled with a number at allocation; the number is checked at the free."""

    count = 7

    def __init__(self, allocator: Allocator, device: torch.device) -> None:
        self._allocator = allocator
        dtypes = (torch.float32, torch.bfloat16, torch.uint8)
        self._buffers = [allocator.create(1023 * (i + 1), dtypes[i % 3], device) for i in range(self.count)]
        self._alignment = 64 if device.type == "cpu" else 256
        self._stamps: dict[int, int] = {}
        self._num_stamps = 0
        for buffer in self._buffers:
            allocator.free(buffer)

    def toggle(self, i: int) -> None:
        buffer = self._buffers[i]
        if i in self._stamps:
            is_unchanged = bool((buffer == self._stamps.pop(i)).all())
            assert is_unchanged, "a live buffer's contents must survive other buffers' calls"
            self._allocator.free(buffer)
            return
        self._allocator.allocate(buffer)
        address = buffer.data_ptr()
        assert address % self._alignment == 0, f"an address must be a multiple of {self._alignment}, got {address:#x}"
        self._num_stamps = self._num_stamps % 200 + 1  # exact in every dtype used
        self._stamps[i] = self._num_stamps
        buffer.fill_(self._num_stamps)

    def free_all(self) -> None:
        for i in list(self._stamps):
            self.toggle(i)


def _check_any_order(buffers: _Stamped, order: random.Random) -> None:
    for _ in range(200):
        buffers.toggle(order.randrange(buffers.count))
    buffers.free_all()


def _check_orders_that_repeat(buffers: _Stamped) -> None:
    """Training steps with other passes in between: after a learned order, new orders and the learned must both work."""
    last = buffers.count - 1
    inner = range(1, buffers.count)
    step = [0, *_two_alive(inner), *_two_alive(reversed(inner)), 0]
    one_more_alive = [0, *inner[:3], *_two_alive(inner[3:]), *inner[:3], 0]
    everything = [*range(buffers.count), *range(buffers.count)]
    for between in ([], [0, *_two_alive(inner), 0], one_more_alive, everything, [last, 0, last, 0]):
        for _ in range(4):
            for i in step:
                buffers.toggle(i)
        for i in between:
            buffers.toggle(i)
        # A step that an exception ended: live buffers are freed out of order below.
        for i in step[: len(step) // 2]:
            buffers.toggle(i)
        buffers.free_all()


def _two_alive(order: Iterable[int]) -> list[int]:
    """Toggles: each buffer is allocated before its predecessor is freed."""
    ordered = list(order)
    between = [i for pair in zip(ordered[1:], ordered[:-1], strict=True) for i in pair]
    return [ordered[0], *between, ordered[-1]]


def _check_freed_is_empty(allocator: Allocator, device: torch.device) -> None:
    buffer = allocator.create(1024, torch.float32, device)
    for _ in range(4):
        allocator.free(buffer)
        assert buffer.untyped_storage().nbytes() == 0, "a freed buffer must have no bytes that could be read"
        allocator.allocate(buffer)
    allocator.free(buffer)


def _check_streams_are_apart(allocator: Allocator, device: torch.device) -> None:
    """A late stream writes to a freed buffer, while a second stream fills a second buffer."""
    accelerator = torch.get_device_module(device)
    late, other = accelerator.Stream(device), accelerator.Stream(device)
    buffers = [allocator.create(1 << 18, torch.float32, device) for _ in range(2)]
    for buffer in buffers:
        allocator.free(buffer)
    accelerator.synchronize(device)
    for _ in range(5):
        with accelerator.stream(late):
            allocator.allocate(buffers[0])
            # Holds the late stream: the second buffer, given the first one's bytes too early, would be overwritten by
            # the fill.
            torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
            buffers[0].fill_(1)
        allocator.free(buffers[0])  # on a different stream, as with a last user on a different stream
        with accelerator.stream(other):
            allocator.allocate(buffers[1])
            buffers[1].fill_(2)
        accelerator.synchronize(device)
        assert bool((buffers[1] == 2).all()), "the bytes of a freed buffer must stay with its stream"
        with accelerator.stream(other):
            allocator.free(buffers[1])


def check_transport(transport: Transport, device: torch.device | str = "cpu") -> None:
    """Assert an engine's requirements of a transport. A collective: every rank of the axis must call.

    Several payloads of different sizes, shapes and dtypes share a call; in-place and out-of-place gathers agree;
    several gathers may be in flight at once; sums and means over the ranks are right, and as precise as the requested
    dtype; every rank agrees.

    Args:
        transport: The transport.
        device: Device of the transport's tensors.

    Raises:
        AssertionError: A property does not hold; the message says which.

    Effects: a dozen small collectives on the axis; synchronises with the host.
    """
    where = torch.device(device)
    started = [
        _start_all_gather(transport, where, payloads, in_place=in_place)
        for in_place, payloads in product((False, True), (_PAYLOADS, _PAYLOADS[::-1]))
    ]
    # The last gather first: a handle must not depend on the waits for others.
    for check in reversed(started):
        check()
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        _check_reduce_scatter(transport, where, op)
        _check_wider_sums(transport, where, op)
        _check_all_reduce(transport, where, op)


# Sizes and dtypes of a call's payloads: a weight, 1-byte data, scales, and integers.
_PAYLOADS = ((5, torch.float32), (16, torch.uint8), (3, torch.bfloat16), (3, torch.int64))


def _start_all_gather(
    transport: Transport, device: torch.device, kinds: Sequence[tuple[int, torch.dtype]], *, in_place: bool
) -> Callable[[], None]:
    """Start a gather; the returned function waits for the gather and checks the result."""
    ranks, me = transport.num_ranks, transport.rank
    payloads = []
    for numel, dtype in kinds:
        full = torch.full((ranks * numel,), 99, dtype=dtype, device=device)
        local = full[me * numel : (me + 1) * numel]
        shard = local if in_place else torch.empty_like(local)
        payloads.append(Payload(shard.fill_(me + 1).view(numel, 1), full.view(ranks, numel)))
    pending = transport.all_gather(payloads)

    def check() -> None:
        pending.wait()
        for (_, full), (numel, dtype) in zip(payloads, kinds, strict=True):
            expected = torch.arange(1, ranks + 1, device=device).repeat_interleave(numel).to(dtype)
            assert torch.equal(full.view(-1), expected), (
                f"rank {me}: gathered {full.tolist()}, expected {expected.tolist()}"
            )

    return check


def _check_reduce_scatter(transport: Transport, device: torch.device, op: dist.ReduceOp.RedOpType) -> None:
    ranks, me = transport.num_ranks, transport.rank
    payloads = []
    for numel, dtype in ((5, torch.float32), (3, torch.bfloat16)):
        full = (torch.arange(ranks * numel, device=device) + me).to(dtype)
        payloads.append(Payload(torch.empty(numel, dtype=dtype, device=device), full.view(numel, ranks)))
    transport.reduce_scatter(payloads, op).wait()
    for shard, _ in payloads:
        numel = shard.numel()
        mean = torch.arange(me * numel, (me + 1) * numel, device=device) + (ranks - 1) / 2
        expected = mean if op == dist.ReduceOp.AVG else mean * ranks
        # NCCL multiplies by 1 / num_ranks, inexact for three ranks in bf16.
        assert torch.allclose(shard.float(), expected.float(), rtol=2**-7), (
            f"rank {me}: {op} gave {shard.tolist()}, expected {expected.tolist()}"
        )


def _check_wider_sums(transport: Transport, device: torch.device, op: dist.ReduceOp.RedOpType) -> None:
    """Gradients in bf16 and fp16 with a sum that needs a wider dtype, beside a gradient as wide as its sum."""
    ranks, me = transport.num_ranks, transport.rank
    mine = 2.0**11 if me == 0 else 1.0  # in bf16 and in fp16, adding 1 does not change 2048
    memory = torch.full((3 * 256,), torch.nan, device=device)
    shards = [memory[:256], memory[256:512], memory[512:517], torch.empty(3, device=device)]  # the first three touch
    kinds = (torch.bfloat16, torch.bfloat16, torch.float16, torch.float32)
    payloads = []
    for i, (shard, kind) in enumerate(zip(shards, kinds, strict=True)):
        for_each = torch.tensor([mine * (i + 1) / 2**rank for rank in range(ranks)], device=device)
        payloads.append(Payload(shard, for_each.repeat_interleave(shard.numel()).to(kind).view(shard.numel(), ranks)))
    transport.reduce_scatter(payloads, op).wait()
    total = (2.0**11 + ranks - 1) / (ranks if op == dist.ReduceOp.AVG else 1)
    for i, (shard, full) in enumerate(payloads):
        expected = torch.full_like(shard, total * (i + 1) / 2**me)
        assert torch.allclose(shard, expected, rtol=2**-20, atol=0.0), (
            f"rank {me}: {op} of {full.dtype} in {shard.dtype} gave {shard.tolist()}, expected {expected[0]}"
        )
    assert bool(memory[517:].isnan().all()), "a reduction must write to nothing but its shards"


def _check_all_reduce(transport: Transport, device: torch.device, op: dist.ReduceOp.RedOpType) -> None:
    ranks, me = transport.num_ranks, transport.rank
    tensors = [torch.full((n,), float(me), device=device) for n in (5, 3)]
    transport.all_reduce(tensors, op).wait()
    expected = (ranks - 1) / 2 * (1 if op == dist.ReduceOp.AVG else ranks)
    for tensor in tensors:
        assert bool(((tensor - expected).abs() < 1e-5).all()), f"rank {me}: {op} gave {tensor[0]}, expected {expected}"


def _raises(call: Callable[[], None]) -> bool:
    try:
        call()
    except RuntimeError:
        return True
    return False
