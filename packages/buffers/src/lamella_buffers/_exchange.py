"""Reductions with a sum wider than the wire: pieces travel unconverted, and their owner adds them up.

    rank 1's gradient, bf16     | for 0 | for 1 | for 2 |        exchange: each piece goes to its owner
    rank 1 receives, bf16       | from 0 | from 1 | from 2 |     then a sum over the ranks, in fp32
    rank 1's shard, fp32        | sum |

The result equals a reduction in the wider dtype, up to the order of additions (here: rank order). The bytes moved are
the narrow dtype's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from lamella_buffers._payload import Payload

# In elements: every payload's place starts at a multiple, since unaligned places would be copied and added up slowly.
# Slots of the even layout have the same alignment: places of touching slots touch.
_ALIGNMENT = 256


def arrivals_numel(payloads: Sequence[Payload], num_ranks: int) -> int:
    """Elements of a buffer for all ranks' pieces of this rank's shards: about as many as in the payloads' `full`."""
    return num_ranks * sum(map(_padded_numel, payloads))


def places_for(payloads: Sequence[Payload], num_ranks: int, buffer: torch.Tensor) -> list[torch.Tensor]:
    """Places in a buffer for all ranks' pieces of this rank's shards.

    Args:
        payloads: Payloads with the same wire dtype.
        num_ranks: Ranks on the axis.
        buffer: (arrivals_numel,), in the wire dtype.

    Returns:
        For each payload a (num_ranks, shard's numel) tensor, a row a rank: columns of the buffer.
    """
    columns = torch.split(buffer.view(num_ranks, -1), [_padded_numel(payload) for payload in payloads], dim=1)
    return [column[:, : shard.numel()] for column, (shard, _) in zip(columns, payloads, strict=True)]


def _padded_numel(payload: Payload) -> int:
    return -(-payload.shard.numel() // _ALIGNMENT) * _ALIGNMENT


def add_up(places: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], op: dist.ReduceOp.RedOpType) -> None:
    """Reduce the rows of each place into a shard, in the shard's dtype and in the order of the ranks.

    Args:
        places: Filled places of `places_for`.
        shards: A flat shard for each place, all of equal dtype.
        op: SUM, or AVG: the same kernel then scales the sum.

    Effects: on the current stream, a kernel for each run of shards contiguous in memory.
    """
    assert op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG), op
    reduce = torch.mean if op == dist.ReduceOp.AVG else torch.sum
    for place, shard in _joined(places, shards):
        reduce(place, 0, dtype=shard.dtype, out=shard)


def widened(payloads: Sequence[Payload]) -> list[Payload]:
    """The same reduction on a wire as wide as the sum.

    Effects: on the current stream, an allocation and a multi-tensor cast of every `full`.
    """
    numels = [full.numel() for _, full in payloads]
    # One allocation on the current stream: reused there only behind the reduction that reads it.
    wide = torch.split(payloads[0].shard.new_empty(sum(numels)), numels)
    torch._foreach_copy_(list(wide), [full.view(-1) for _, full in payloads])
    return [Payload(shard, full) for (shard, _), full in zip(payloads, wide, strict=True)]


def _joined(
    places: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The same places and shards as few tensors: neighbours in memory are joined."""
    # By addresses of places and shards: asking each tensor for its storage costs the host more than the sums.
    begins = [(place.data_ptr(), shard.data_ptr()) for place, shard in zip(places, shards, strict=True)]
    ends = [
        (a + shard.numel() * place.itemsize, b + shard.nbytes)
        for (a, b), place, shard in zip(begins, places, shards, strict=True)
    ]
    first, limit = 0, _end_of_storage(shards[0])
    for i in range(1, len(shards) + 1):
        # Adjacent addresses may belong to two storages: a view past the first storage's end would fail.
        if i < len(shards) and begins[i] == ends[i - 1] and ends[i][1] <= limit:
            continue
        numel = sum(map(torch.Tensor.numel, shards[first:i]))
        place, shard = places[first], shards[first]
        yield place.as_strided((len(place), numel), place.stride()), shard.as_strided((numel,), (1,))
        if i < len(shards):
            first, limit = i, _end_of_storage(shards[i])


def _end_of_storage(tensor: torch.Tensor) -> int:
    storage = tensor.untyped_storage()
    return storage.data_ptr() + storage.nbytes()
