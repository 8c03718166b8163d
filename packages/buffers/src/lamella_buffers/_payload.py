"""What a collective moves: payloads, each by itself or side by side in one tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, overload

import torch


class Payload(NamedTuple):
    """Two contiguous tensors: one rank's piece, and the pieces of all ranks in rank order.

    They have a dim at least; else their shapes say nothing, their elements count, one after another: a view costs the
    host as much as what is done with it. A gather reads `shard` and writes `full`, which are of one dtype; `shard` may
    be this rank's own slice of `full`: then the gather is in place. A reduction reads `full` and writes `shard`, which
    may be of a wider dtype than what travels: the sum is then made in that.
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


class Payloads(Sequence[Payload]):
    """What one gather moves, also as the lists that calls take: put together once for what is gathered again and again.

    Args:
        payloads: In the order in which they travel.
        sources: What each payload's shard is a cast of; None where it is there already. None: all are there.

    Attributes:
        shards: Of all payloads.
        wholes: Their `full`.
        sources: As given, one a payload.
        dtypes: Of `wholes`.
        nbytes: Of each of `wholes`.

    Effects: none. It keeps the tensors, and whoever keeps it says when it goes.
    """

    def __init__(self, payloads: Iterable[Payload], sources: Iterable[torch.Tensor | None] | None = None) -> None:
        self._payloads = tuple(payloads)
        self.shards = [shard for shard, _ in self._payloads]
        self.wholes = [full for _, full in self._payloads]
        self.sources = [None] * len(self._payloads) if sources is None else list(sources)
        self.dtypes = {whole.dtype for whole in self.wholes}
        self.nbytes = tuple([whole.nbytes for whole in self.wholes])
        self._casts = self._casts_of(slice(None))

    def __len__(self) -> int:
        return len(self._payloads)

    @overload
    def __getitem__(self, index: int) -> Payload: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Payload]: ...
    def __getitem__(self, index: int | slice) -> Payload | Sequence[Payload]:
        return self._payloads[index]

    @property
    def are_there(self) -> bool:
        """Whether no shard has to be cast."""
        return not self._casts[0]

    def cast(self, part: slice | None = None) -> None:
        """Fill the shards that have a source: all, or a part of them.

        Effects: one multi-tensor copy at most, on the current stream.
        """
        into, sources = self._casts if part is None else self._casts_of(part)
        if into:
            torch._foreach_copy_(into, sources)

    def _casts_of(self, part: slice) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        pairs = [(a, b) for a, b in zip(self.shards[part], self.sources[part], strict=True) if b is not None]
        return [into for into, _ in pairs], [source for _, source in pairs]


def by_dtype(payloads: Sequence[Payload]) -> list[list[Payload]]:
    """The payloads whose two tensors have the same dtypes, in the order in which dtypes come.

    Effects: none.
    """
    dtypes = [(shard.dtype, full.dtype) for shard, full in payloads]
    found = dict.fromkeys(dtypes)
    if len(found) == 1:
        return [list(payloads)]
    return [[payload for payload, own in zip(payloads, dtypes, strict=True) if own == one] for one in found]


def of_one_dtype(payloads: Sequence[Payload]) -> Sequence[Payload]:
    """The payloads as they are if they have one dtype, else as bytes.

    Effects: none.
    """
    dtypes = payloads.dtypes if isinstance(payloads, Payloads) else {full.dtype for _, full in payloads}
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
