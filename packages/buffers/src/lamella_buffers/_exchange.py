"""Reductions whose sum is wider than their wire: pieces travel as they are, and are added up where they arrive.

    rank 1's gradient, bf16     | for 0 | for 1 | for 2 |        one exchange: each piece goes to its owner
    what rank 1 receives, bf16  | from 0 | from 1 | from 2 |     then one sum over the ranks, in fp32
    rank 1's shard, fp32        | sum |

A wider sum of the same numbers is what a reduction in the wider dtype computes, up to the order of its additions, which
here is the ranks'. It moves the bytes of one in the narrow dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from lamella_buffers._payload import Payload

# Elements that every payload's place starts at a multiple of, so that none is moved or added up in odd pieces. Slots of
# the even layout start at multiples of it too: where slots touch, their places do.
_ALIGNMENT = 256


def arrivals_numel(payloads: Sequence[Payload], num_ranks: int) -> int:
    """Elements of a buffer for all ranks' pieces of this rank's shards: about as many as the payloads' `full` have."""
    return num_ranks * sum(map(_padded_numel, payloads))


def places_for(payloads: Sequence[Payload], num_ranks: int, buffer: torch.Tensor) -> list[torch.Tensor]:
    """Where all ranks' pieces of this rank's shards arrive.

    Args:
        payloads: Of one dtype on the wire.
        num_ranks: Of the axis.
        buffer: (arrivals_numel,), of that dtype.

    Returns:
        For each payload a (num_ranks, shard's numel) tensor, a row a rank: columns of the buffer.

    Effects: none.
    """
    columns = torch.split(buffer.view(num_ranks, -1), [_padded_numel(payload) for payload in payloads], dim=1)
    return [column[:, : shard.numel()] for column, (shard, _) in zip(columns, payloads, strict=True)]


def _padded_numel(payload: Payload) -> int:
    return -(-payload.shard.numel() // _ALIGNMENT) * _ALIGNMENT


def add_up(places: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], op: dist.ReduceOp.RedOpType) -> None:
    """Reduce the rows of each place into a shard, in the shard's dtype and in the order of the ranks.

    Args:
        places: What `places_for` gave, filled.
        shards: One a place, flat, of one dtype.
        op: SUM, or AVG: the sum is then scaled in the same kernel.

    Effects: on the current stream, one kernel for all shards that lie one after another in memory.
    """
    assert op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG), op
    reduce = torch.mean if op == dist.ReduceOp.AVG else torch.sum
    for place, shard in _joined(places, shards):
        reduce(place, 0, dtype=shard.dtype, out=shard)


def widened(payloads: Sequence[Payload]) -> list[Payload]:
    """The same reduction on a wire that is as wide as its sum.

    Effects: on the current stream, one allocation and one multi-tensor cast of every `full`.
    """
    numels = [full.numel() for _, full in payloads]
    wide = torch.split(payloads[0].shard.new_empty(sum(numels)), numels)
    torch._foreach_copy_(list(wide), [full.view(-1) for _, full in payloads])
    return [Payload(shard, full) for (shard, _), full in zip(payloads, wide, strict=True)]


def _joined(
    places: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The same places and shards, as few tensors: those that touch are one."""
    # By addresses, place's and shard's: asking tensors for their storages costs the host more than the sums.
    begins = [(place.data_ptr(), shard.data_ptr()) for place, shard in zip(places, shards, strict=True)]
    ends = [
        (a + shard.numel() * place.itemsize, b + shard.nbytes)
        for (a, b), place, shard in zip(begins, places, shards, strict=True)
    ]
    first, limit = 0, _end_of_storage(shards[0])
    for i in range(1, len(shards) + 1):
        if i < len(shards) and begins[i] == ends[i - 1] and ends[i][1] <= limit:
            continue
        numel = sum(shard.numel() for shard in shards[first:i])
        place, shard = places[first], shards[first]
        yield place.as_strided((len(place), numel), place.stride()), shard.as_strided((numel,), (1,))
        if i < len(shards):
            first, limit = i, _end_of_storage(shards[i])


def _end_of_storage(tensor: torch.Tensor) -> int:
    storage = tensor.untyped_storage()
    return storage.data_ptr() + storage.nbytes()
