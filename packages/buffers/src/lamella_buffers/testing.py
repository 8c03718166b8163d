"""Conformance tests of the two seams: run them against your own allocator or transport."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import product

import torch
import torch.distributed as dist

from lamella_buffers._allocator import Allocator
from lamella_buffers._transport import Payload, Transport


def check_allocator(allocator: Allocator, device: torch.device | str = "cpu", *, seed: int = 0) -> None:
    """Assert what an engine relies on in an allocator.

    Views made once read what was written after any later allocation; buffers that are alive together never share
    bytes; a buffer's contents survive others coming and going; allocating twice and freeing twice are refused; an
    order of calls that was never seen before (a validation pass, a skipped layer) works.

    Args:
        allocator: What to test; nothing else may be using it.
        device: Where to test.
        seed: Of the random order of calls.

    Raises:
        AssertionError: A property does not hold; the message says which.

    Effects: allocates a few MiB on the current stream; synchronises with the host.
    """
    where = torch.device(device)
    _check_views_follow(allocator, where)
    _check_misuse_is_refused(allocator, where)
    _check_live_buffers_are_apart(allocator, where, random.Random(seed))


def _check_views_follow(allocator: Allocator, device: torch.device) -> None:
    buffer = allocator.create(1024, torch.float32, device)
    assert buffer.shape == (1024,), f"`create` must give a flat tensor of 1024 elements, gave {tuple(buffer.shape)}"
    view = buffer[256:512].view(16, 16)
    allocator.free(buffer)
    for value in (1.0, 2.0):
        allocator.allocate(buffer)
        # Asked before it is read: a view that kept a freed storage reads memory that is not there.
        assert view.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr(), "a view must follow its buffer"
        buffer.fill_(value)
        assert bool((view == value).all()), "a view made at creation must read every later allocation"
        allocator.free(buffer)


def _check_misuse_is_refused(allocator: Allocator, device: torch.device) -> None:
    buffer = allocator.create(1024, torch.bfloat16, device)
    assert _raises(lambda: allocator.allocate(buffer)), "allocating a buffer that has its bytes must raise"
    allocator.free(buffer)
    assert _raises(lambda: allocator.free(buffer)), "freeing a buffer that has no bytes must raise"


def _check_live_buffers_are_apart(allocator: Allocator, device: torch.device, order: random.Random) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.uint8)
    buffers = [allocator.create(1024 * (i + 1), dtypes[i % 3], device) for i in range(7)]
    for buffer in buffers:
        allocator.free(buffer)
    live: dict[int, int] = {}
    for tick in range(1, 200):
        i = order.randrange(len(buffers))
        if i in live:
            assert bool((buffers[i] == live.pop(i)).all()), "a live buffer's contents must survive other buffers' calls"
            allocator.free(buffers[i])
        else:
            allocator.allocate(buffers[i])
            buffers[i].fill_(tick)
            live[i] = tick
    for i in live:
        allocator.free(buffers[i])


def check_transport(transport: Transport, device: torch.device | str = "cpu") -> None:
    """Assert what an engine relies on in a transport. A collective: every rank of the axis must call it.

    Several payloads of different sizes and dtypes go in one call; a gather in place equals one that is not;
    several gathers may be in flight at once; sums and means over the ranks are right; every rank agrees.

    Args:
        transport: What to test.
        device: Where its tensors lie.

    Raises:
        AssertionError: A property does not hold; the message says which.

    Effects: a dozen small collectives on the axis; synchronises with the host.
    """
    where = torch.device(device)
    started = [
        _start_all_gather(transport, where, payloads, in_place=in_place)
        for in_place, payloads in product((False, True), (_PAYLOADS, _PAYLOADS[::-1]))
    ]
    for check in reversed(started):
        check()
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        _check_reduce_scatter(transport, where, op)
        _check_all_reduce(transport, where, op)


# Sizes and dtypes of the payloads of one call: a weight, 1-byte data, its scales, and integers.
_PAYLOADS = ((5, torch.float32), (16, torch.uint8), (3, torch.bfloat16), (3, torch.int64))


def _start_all_gather(
    transport: Transport, device: torch.device, kinds: Sequence[tuple[int, torch.dtype]], *, in_place: bool
) -> Callable[[], None]:
    """Start a gather; what is returned waits for it and asserts what it brought."""
    ranks, me = transport.num_ranks, transport.rank
    payloads = []
    for numel, dtype in kinds:
        full = torch.full((ranks * numel,), 99, dtype=dtype, device=device)
        own = full[me * numel : (me + 1) * numel]
        shard = own if in_place else torch.empty_like(own)
        payloads.append(Payload(shard.fill_(me + 1), full))
    pending = transport.all_gather(payloads)

    def check() -> None:
        pending.wait()
        for (_, full), (numel, dtype) in zip(payloads, kinds, strict=True):
            expected = torch.arange(1, ranks + 1, device=device).repeat_interleave(numel).to(dtype)
            assert torch.equal(full, expected), f"rank {me}: gathered {full.tolist()}, expected {expected.tolist()}"

    return check


def _check_reduce_scatter(transport: Transport, device: torch.device, op: dist.ReduceOp.RedOpType) -> None:
    ranks, me = transport.num_ranks, transport.rank
    payloads = []
    for numel, dtype in ((5, torch.float32), (3, torch.bfloat16)):
        full = (torch.arange(ranks * numel, device=device) + me).to(dtype)
        payloads.append(Payload(torch.empty(numel, dtype=dtype, device=device), full))
    transport.reduce_scatter(payloads, op).wait()
    for shard, _ in payloads:
        numel = shard.numel()
        mean = torch.arange(me * numel, (me + 1) * numel, device=device) + (ranks - 1) / 2
        expected = mean if op == dist.ReduceOp.AVG else mean * ranks
        # NCCL multiplies by 1 / num_ranks, which is not exact for three ranks in bf16.
        assert torch.allclose(shard.float(), expected.float(), rtol=2**-7), (
            f"rank {me}: {op} gave {shard.tolist()}, expected {expected.tolist()}"
        )


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
