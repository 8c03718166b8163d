"""What a collective moves: payloads, each by itself or side by side in one tensor."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
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


class Filling(NamedTuple):
    """The function that writes shards before a gather sends them (a cast, a quantisation), and its arguments.

    An item is written as a whole, into one shard or several: quantised data and its scales are two. Arguments are
    columns with one entry an item, so that a call for some of the items takes the same slice of each column.

    Attributes:
        fill: Called with all columns, on the stream of the gather or on one that the gather waits for.
        columns: Sequences of equal length; None for a column that this gather has no use for.
        begins: For each item the index of its first payload, ascending.
    """

    fill: Callable[..., object]
    columns: tuple[Sequence[object] | None, ...]
    begins: Sequence[int]

    def write(self, start: int, stop: int) -> None:
        """Write the items whose first payload is one of `start` to `stop`.

        Effects: those of `fill`, unless no item begins there.
        """
        part = slice(bisect_left(self.begins, start), bisect_left(self.begins, stop))
        if part.start < part.stop:
            self.fill(*[column if column is None else column[part] for column in self.columns])

    def is_like(self, other: Filling) -> bool:
        """Whether one call can write the items of both."""
        absent, absent_there = ([column is None for column in each.columns] for each in (self, other))
        return self.fill == other.fill and absent == absent_there

    def with_items_of(self, other: Filling) -> Filling:
        """A filling of both fillings' items, which must be alike."""
        pairs = zip(self.columns, other.columns, strict=True)
        columns = tuple(a if a is None or b is None else [*a, *b] for a, b in pairs)
        return Filling(self.fill, columns, [*self.begins, *other.begins])


class Payloads(Sequence[Payload]):
    """The payloads of one gather, also as the lists that collectives take: put together once, gathered again and again.

    Args:
        payloads: In the order in which they travel.
        fillings: Write those shards that are not there yet.

    Attributes:
        shards: Of all payloads.
        wholes: Their `full`.
        dtypes: Of `wholes`.
        nbytes: Of each of `wholes`.

    Effects: none. The object keeps the tensors alive.
    """

    def __init__(self, payloads: Iterable[Payload], fillings: Iterable[Filling] = ()) -> None:
        self._payloads = tuple(payloads)
        self.shards = [shard for shard, _ in self._payloads]
        self.wholes = [full for _, full in self._payloads]
        self.dtypes = {whole.dtype for whole in self.wholes}
        self.nbytes = tuple([whole.nbytes for whole in self.wholes])
        self._fillings = [filling for filling in fillings if filling.begins]

    @classmethod
    def joined(cls, several: Iterable[Payloads]) -> Payloads:
        """The payloads of several gathers, for one. Fillings with the same function become one call of it."""
        payloads: list[Payload] = []
        fillings: list[Filling] = []
        for each in several:
            for filling in each._fillings:
                moved = filling._replace(begins=[begin + len(payloads) for begin in filling.begins])
                alike = [i for i, other in enumerate(fillings) if other.is_like(moved)]
                if alike:
                    fillings[alike[0]] = fillings[alike[0]].with_items_of(moved)
                else:
                    fillings.append(moved)
            payloads += each
        return cls(payloads, fillings)

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
        """Whether no shard has to be written before it is sent."""
        return not self._fillings

    def fill(self) -> None:
        """Write the shards that are not there.

        Effects: on the current stream, one call of each filling's function for all of its items.
        """
        for fill, columns, _ in self._fillings:
            fill(*columns)

    def fill_first(self, num: int) -> None:
        """Write the first `num` payloads' shards, and all of each item that one of them belongs to.

        Effects: as `fill`.
        """
        for filling in self._fillings:
            filling.write(0, num)

    def fill_after_first(self, num: int) -> None:
        """Write the shards that `fill_first(num)` does not write.

        Effects: as `fill`.
        """
        for filling in self._fillings:
            filling.write(num, len(self))


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
