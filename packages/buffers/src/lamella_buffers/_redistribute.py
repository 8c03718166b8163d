"""Moves between the ways a buffer can lie along an axis: one function a collective.

    from        to          function
    ----------  ----------  --------------
    Shard       Replicate   all_gather
    Partial     Shard       reduce_scatter
    Partial     Replicate   all_reduce
    Replicate   Shard       ShardedBuffer.copy_from   (a local slice, no collective)

Each takes a list, and puts all of it into one call: the groups of a unit travel together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from lamella_buffers._buffer import ShardedBuffer, UnshardedBuffer, by_rank
from lamella_buffers._payload import Payload
from lamella_buffers._transport import Done, Pending, ReduceOp, Transport


def all_gather(moves: Sequence[tuple[Sequence[torch.Tensor], UnshardedBuffer]], transport: Transport) -> Pending:
    """Fill unsharded buffers from every rank's slots.

    Args:
        moves: For each buffer the slots to send, one a tensor, (slot_numel,), of the buffer's dtype: those of a
            `ShardedBuffer`, or the buffer's own pieces (`UnshardedBuffer.own`) written beforehand, which makes the
            gather in place. The buffers must have their bytes.
        transport: The axis.

    Effects: one collective on the axis for all moves, on the current stream. No copy on either side, but for tensors
        whose chunks are not contiguous: those are gathered beside their place and copied there, and the call waits.
    """
    payloads, copies = [], []
    for slots, into in moves:
        for i, (shard, full) in enumerate(zip(slots, into.slots, strict=True)):
            if shard.numel() == 0:
                continue
            gathered = full if into.layout.is_contiguous(i) else torch.empty_like(full)
            payloads.append(Payload(shard, gathered))
            if gathered is not full:
                place = by_rank(into.tensors[i], into.layout, i)
                copies.append((place, gathered.view(place.shape)))
    pending = transport.all_gather(payloads) if payloads else Done()
    if copies:
        pending.wait()
        torch._foreach_copy_([place for place, _ in copies], [gathered for _, gathered in copies])
    return pending


def reduce_scatter(
    moves: Sequence[tuple[Mapping[int, torch.Tensor | None], ShardedBuffer]], transport: Transport, op: ReduceOp
) -> Pending:
    """Reduce whole gradients into shards.

    A gradient is read where it lies if it is contiguous, has the buffer's dtype, and is made of equal chunks, one after
    another in it. Others, and missing ones (None: zeros), are staged in one temporary buffer.

    Args:
        moves: For each buffer the gradients of the tensors that take part, by index, in the tensor's shape; the same
            ones on every rank. The others' shards are left as they are. Gradients must stay alive until the current
            stream has passed this call.
        transport: The axis.
        op: How to reduce.

    Effects: one collective on the axis for all moves, on the current stream; staging allocates the slots of what it
        stages and costs one copy of it.
    """
    payloads = []
    for gradients, into in moves:
        wholes = _wire(gradients, into)
        payloads += [Payload(into.slots[i], wholes[i]) for i in gradients if into.slots[i].numel() > 0]
    return transport.reduce_scatter(payloads, op) if payloads else Done()


def all_reduce(tensors: Sequence[torch.Tensor], transport: Transport, op: ReduceOp) -> Pending:
    """Reduce whole tensors in place.

    Args:
        tensors: Flat or shaped, contiguous; the same on every rank but for their values.
        transport: The axis.
        op: How to reduce.

    Effects: one collective on the axis, on the current stream. No copy.
    """
    return transport.all_reduce(tensors, op)


def _wire(gradients: Mapping[int, torch.Tensor | None], into: ShardedBuffer) -> dict[int, torch.Tensor]:
    """For each tensor a flat (num_shards * slot_numel,) tensor in the buffer's dtype: itself, or staged."""
    layout = into.layout
    wholes: dict[int, torch.Tensor] = {}
    for i, gradient in gradients.items():
        if gradient is None or gradient.dtype != into.dtype or not gradient.is_contiguous():
            continue
        if layout.divides(i) and layout.is_contiguous(i):
            wholes[i] = gradient.view(-1)
    staged = {i: gradient for i, gradient in gradients.items() if i not in wholes}
    if staged:
        wholes.update(zip(staged, _stage(staged, into), strict=True))
    return wholes


def _stage(gradients: Mapping[int, torch.Tensor | None], into: ShardedBuffer) -> list[torch.Tensor]:
    """Cast and pad gradients in one allocation and one multi-tensor copy."""
    layout = into.layout
    numels = [layout.full_slot(i).numel for i in gradients]
    slots = torch.split(torch.empty(sum(numels), dtype=into.dtype, device=into.device), numels)
    copies, sources, zeros = [], [], []
    for slot, (i, gradient) in zip(slots, gradients.items(), strict=True):
        filled = 0 if gradient is None else gradient.numel()
        if gradient is not None and filled:
            source = gradient if layout.is_contiguous(i) else by_rank(gradient, layout, i)
            copies.append(slot[:filled].view(source.shape))
            sources.append(source)
        if filled < slot.numel():
            zeros.append(slot[filled:])
    if copies:
        torch._foreach_copy_(copies, sources)
    if zeros:
        torch._foreach_zero_(zeros)
    return list(slots)
