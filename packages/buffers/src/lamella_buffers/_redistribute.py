"""Moves between placements of a buffer along an axis: a function for each collective.

    from        to          function
    ----------  ----------  --------------
    Shard       Replicate   all_gather
    Partial     Shard       reduce_scatter
    Partial     Replicate   all_reduce
    Replicate   Shard       ShardedBuffer.copy_from   (a local slice, no collective)

Each function takes a list, and makes a single call of it: the groups of a unit travel together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Final

import torch
from torch._subclasses.fake_tensor import FakeTensor

from lamella_buffers._buffer import GatherPlan, ShardedBuffer, UnshardedBuffer, by_rank
from lamella_buffers._payload import Payload, Payloads
from lamella_buffers._transport import Done, FillAndGather, Pending, ReduceOp, Transport
from lamella_layout import EvenLayout, FlatLayout, Range

# A step on tensors without memory has to allocate what a real step does: no copy of a gradient.
_PLAIN: Final = (torch.Tensor, FakeTensor)


def all_gather(
    moves: Sequence[GatherPlan | tuple[Sequence[torch.Tensor], UnshardedBuffer]], transport: Transport
) -> Pending:
    """Fill unsharded buffers from every rank's slots.

    Args:
        moves: The slots to send into each buffer: slots of a `ShardedBuffer`, or the buffer's own pieces
            (`UnshardedBuffer.local_pieces`) written beforehand. Slots with a dtype different from the buffer's are
            first cast into the own pieces. Or plans of the same, made once for repeated gathers. The buffers must
            have bytes.
        transport: The axis's transport.

    Effects: a collective on the axis for all moves, on the current stream, after the plan's writes of shards, or
        overlapped with them if the transport has a `fill_and_gather`. No further copy on either side, except for
        tensors with non-contiguous chunks: staged, waited for, and copied into place.
    """
    if not moves:
        return Done()
    plan = reduce(GatherPlan.joined, [move if isinstance(move, GatherPlan) else GatherPlan([move]) for move in moves])
    if not plan.reordered:
        return _gather(plan.payloads, transport)
    # Freed at return, on this stream: the wait and the copy below order the reuse of these bytes.
    gathered = [torch.empty_like(full) for _, full, _ in plan.reordered]
    staged = Payloads(Payload(shard, into) for (shard, _, _), into in zip(plan.reordered, gathered, strict=True))
    pending = _gather(Payloads.joined([plan.payloads, staged]), transport)
    # First: gloo fills the staged tensors in `wait`.
    pending.wait()
    places = [place for _, _, place in plan.reordered]
    torch._foreach_copy_(places, [tensor.view(place.shape) for tensor, place in zip(gathered, places, strict=True)])
    return pending


def _gather(payloads: Payloads, transport: Transport) -> Pending:
    if not payloads.wholes:
        return Done()
    gather: FillAndGather | None = getattr(transport, "fill_and_gather", None)
    if gather is not None:
        return gather(payloads)
    payloads.fill()
    return transport.all_gather(payloads)


def reduce_scatter(
    moves: Sequence[tuple[Mapping[int, torch.Tensor | None], torch.dtype, ShardedBuffer]],
    transport: Transport,
    op: ReduceOp,
) -> Pending:
    """Reduce whole gradients into shards.

    In an even layout a gradient is read in place if it is a plain tensor, contiguous, of the wire's dtype, and made of
    equal, consecutive chunks. All other gradients, and missing gradients (None: zeros), are staged in a temporary
    buffer. In a flat layout all gradients are staged, as a single payload in the layout's order. A tensor subclass
    travels as the values of its `copy_`, a sparse tensor as dense values.

    Args:
        moves: The gradients for each buffer, of the participating tensors, by index, in the tensor's shape, and the
            wire dtype: the same indices and dtypes on every rank. Sums are made in the buffer's dtype. Shards of absent
            indices are left unchanged; in a flat layout they become zeros. Gradients must stay alive until the current
            stream has passed this call.
        transport: The axis's transport.
        op: The reduction.

    Effects: a collective on the axis for all moves of the same dtypes, on the current stream; staging allocates the
        staged slots in the wire's dtype, and costs a copy.
    """
    payloads: list[Payload] = []
    for gradients, wire, into in moves:
        if isinstance(into.layout, EvenLayout):
            payloads += _payloads(gradients, wire, into, into.layout)
        elif into.flat.numel() > 0:
            payloads.append(Payload(into.flat, _packed(gradients, wire, into.layout, into.device)))
    # Staging buffers die at return: the call is on the current stream, and so is any reuse of their bytes.
    return transport.reduce_scatter(payloads, op) if payloads else Done()


def all_reduce(tensors: Sequence[torch.Tensor], transport: Transport, op: ReduceOp) -> Pending:
    """Reduce whole tensors in place.

    Args:
        tensors: Flat or shaped, contiguous; the same on every rank except for values.
        transport: The axis's transport.
        op: The reduction.

    Effects: a collective on the axis, on the current stream. No copy.
    """
    return transport.all_reduce(tensors, op)


def plain_values(gradient: torch.Tensor) -> torch.Tensor:
    """The values of a gradient in memory readable by a collective; a plain dense tensor is returned unchanged.

    A wrapper subclass keeps its bytes in inner tensors (quantised weights, results of asynchronous collectives). A
    collective on the wrapper itself would read unwritten memory.

    Effects: copies a subclass by its own `copy_`, or makes a sparse tensor dense, on the current stream.
    """
    if type(gradient) not in _PLAIN:
        values = torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device)
        values.copy_(gradient)
        return values
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def _packed(
    gradients: Mapping[int, torch.Tensor | None], wire: torch.dtype, layout: FlatLayout, device: torch.device
) -> torch.Tensor:
    """All gradients in a flat (full_numel,) tensor in the wire's dtype, with zeros for absent gradients and gaps."""
    packed = torch.empty(layout.full_numel, dtype=wire, device=device)
    present = {i: plain_values(tensor) for i, tensor in gradients.items() if tensor is not None and tensor.numel()}
    absent = [layout.tensor_range(i) for i in range(layout.num_tensors) if i not in present]
    if present:
        places = [packed[slice(*layout.tensor_range(i))].view(gradient.shape) for i, gradient in present.items()]
        torch._foreach_copy_(places, list(present.values()))
    # All of the buffer travels: earlier contents of its memory must not be added to other ranks' gradients.
    _zero(packed, [*layout.gaps, *absent])
    return packed


def _zero(flat: torch.Tensor, ranges: Sequence[Range]) -> None:
    if ranges:
        torch._foreach_zero_([flat[slice(*elements)] for elements in ranges])


def _payloads(
    gradients: Mapping[int, torch.Tensor | None], wire: torch.dtype, into: ShardedBuffer, layout: EvenLayout
) -> list[Payload]:
    """Payloads of the tensors with elements, in order: gradients in place, or staged."""
    payloads: dict[int, Payload] = {}
    staged: dict[int, torch.Tensor | None] = {}
    is_chunked, shards = layout.in_equal_chunks, into.shards
    for i, gradient in gradients.items():
        if gradient is None:
            staged[i] = None
        elif (
            type(gradient) in _PLAIN
            and is_chunked[i]
            and gradient.dtype == wire
            and gradient.is_contiguous()  # never true of a sparse gradient
        ):
            payloads[i] = Payload(shards[i], gradient)
        else:
            staged[i] = plain_values(gradient)
    if staged:
        wholes = _stage(staged, wire, layout, into.device)
        payloads.update((i, Payload(into.slots[i], full)) for i, full in zip(staged, wholes, strict=True))
    return [payload for i in gradients if (payload := payloads[i]).shard.numel() > 0]


def _stage(
    gradients: Mapping[int, torch.Tensor | None], wire: torch.dtype, layout: EvenLayout, device: torch.device
) -> list[torch.Tensor]:
    """Cast and pad gradients by an allocation and a multi-tensor copy."""
    numels = [layout.full_slot(i).numel for i in gradients]
    slots = torch.split(torch.empty(sum(numels), dtype=wire, device=device), numels)
    copies, sources, zeros = [], [], []
    for slot, (i, gradient) in zip(slots, gradients.items(), strict=True):
        filled = 0 if gradient is None else gradient.numel()
        if gradient is not None and filled:
            source = gradient if layout.is_contiguous(i) else by_rank(gradient, layout, i)
            copies.append(slot[:filled].view(source.shape))
            sources.append(source)
        # Slack and absent gradients are summed too, and hooks see whole buffers: zeros, not earlier contents.
        if filled < slot.numel():
            zeros.append(slot[filled:])
    if copies:
        torch._foreach_copy_(copies, sources)
    if zeros:
        torch._foreach_zero_(zeros)
    return list(slots)
