"""What a collective moves: payloads, each by itself or side by side in one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Payload(NamedTuple):
    """Two contiguous tensors: one rank's piece, and the pieces of all ranks in rank order.

    Their shapes say nothing, their elements count, one after another: a view costs the host as much as what is done
    with it. A gather reads `shard` and writes `full`, which are of one dtype; `shard` may be this rank's own slice of
    `full`: then the gather is in place. A reduction reads `full` and writes `shard`, which may be of a wider dtype than
    what travels: the sum is then made in that.
    """

    shard: torch.Tensor  # numel elements
    full: torch.Tensor  # num_ranks * numel elements

    @property
    def widens(self) -> bool:
        """Whether a reduction adds up in another dtype than it is given."""
        return self.shard.dtype != self.full.dtype

    def as_bytes(self) -> Payload:
        """The same memory, for moves that compute nothing."""
        return Payload(*(tensor.view(torch.uint8) for tensor in self))


def by_dtype(payloads: Sequence[Payload]) -> list[list[Payload]]:
    """The payloads whose two tensors have the same dtypes, in the order in which dtypes come.

    Effects: none.
    """
    groups: dict[tuple[torch.dtype, torch.dtype], list[Payload]] = {}
    for payload in payloads:
        groups.setdefault((payload.shard.dtype, payload.full.dtype), []).append(payload)
    return list(groups.values())


def of_one_dtype(payloads: Sequence[Payload]) -> Sequence[Payload]:
    """The payloads as they are if they have one dtype, else as bytes.

    Effects: none.
    """
    dtypes = {full.dtype for _, full in payloads}
    return payloads if len(dtypes) == 1 else [payload.as_bytes() for payload in payloads]


def pack(tensors: Sequence[torch.Tensor], into: torch.Tensor, num_ranks: int = 1) -> torch.Tensor:
    """Put tensors side by side in one, for collectives that take no more.

        shards               | payload 0 | payload 1 | ...
        wholes, `num_ranks`  | rank 0's shards | rank 1's shards | ...

    Args:
        tensors: Contiguous, of one dtype.
        into: As large as all of them.
        num_ranks: Pieces of each tensor: that of the axis if they are wholes.

    Returns:
        `into`.

    Effects: one multi-tensor copy on the current stream.
    """
    torch._foreach_copy_(*_side_by_side(into, tensors, num_ranks))
    return into


def unpack(packed: torch.Tensor, into: Sequence[torch.Tensor], num_ranks: int = 1) -> None:
    """Copy tensors out of one that they were packed in.

    Effects: one multi-tensor copy on the current stream.
    """
    pieces, tensors = _side_by_side(packed, into, num_ranks)
    torch._foreach_copy_(tensors, pieces)


def _side_by_side(
    packed: torch.Tensor, tensors: Sequence[torch.Tensor], num_ranks: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    rows = [tensor.view(num_ranks, -1) for tensor in tensors]
    return list(torch.split(packed.view(num_ranks, -1), [row.shape[1] for row in rows], dim=1)), rows
