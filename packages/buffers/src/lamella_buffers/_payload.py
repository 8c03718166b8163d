"""Payloads of collectives, separate or packed side by side in a single tensor."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import NamedTuple, overload

import torch


class Payload(NamedTuple):
    """Two contiguous tensors: a rank's piece, and the pieces of all ranks in rank order.

    Both have at least one dim. Their shapes are otherwise ignored and elements counted in memory order: flattening
    views would cost the host as much as the work itself. A gather reads `shard` and writes `full`, of equal dtypes;
    with `shard` as this rank's own slice of `full` the gather is in place. A reduction reads `full` and writes `shard`;
    a wider dtype of `shard` is the dtype of the sum.
    """

    shard: torch.Tensor  # numel elements
    full: torch.Tensor  # num_ranks * numel elements

    @property
    def widens(self) -> bool:
        """Whether a reduction adds up in a dtype different from its input's."""
        return self.shard.dtype != self.full.dtype

    def as_bytes(self) -> Payload:
        """The same memory, for moves without arithmetic."""
        return Payload(self.shard.view(torch.uint8), self.full.view(torch.uint8))


class Filling(NamedTuple):
    """A function that writes shards before a gather sends them (a cast, a quantisation), and the arguments.

    An item fills a shard or several: quantised data and scales are two shards. Arguments are columns with an entry for
    each item: a call for some of the items takes the same slice of each column.

    Attributes:
        fill: Called with all columns, on the gather's stream or on a stream awaited by the gather.
        columns: Sequences of equal length; None for a column without use in this gather.
        begins: The index of each item's first payload, ascending.
    """

    fill: Callable[..., object]
    columns: tuple[Sequence[object] | None, ...]
    begins: Sequence[int]

    def write(self, start: int, stop: int) -> None:
        """Write the items with a first payload in `start` to `stop`.

        Effects: as `fill`; none if no item begins in the range.
        """
        # An item belongs to the range of its first payload: data and scales are written together, or not at all.
        part = slice(bisect_left(self.begins, start), bisect_left(self.begins, stop))
        if part.start < part.stop:
            self.fill(*[column if column is None else column[part] for column in self.columns])

    def is_like(self, other: Filling) -> bool:
        """Whether a single call can write the items of both."""
        absent, absent_there = ([column is None for column in filling.columns] for filling in (self, other))
        return self.fill == other.fill and absent == absent_there

    def with_items_of(self, other: Filling) -> Filling:
        """A filling of both fillings' items, which must be alike."""
        pairs = zip(self.columns, other.columns, strict=True)
        columns = tuple(a if a is None or b is None else [*a, *b] for a, b in pairs)
        return Filling(self.fill, columns, [*self.begins, *other.begins])


class Payloads(Sequence[Payload]):
    """The payloads of a gather, with argument lists for collectives: built once, gathered many times.

    The object keeps the tensors alive.

    Args:
        payloads: Payloads in wire order.
        fillings: Write the shards not yet written.

    Attributes:
        shards: `shard` of each payload.
        wholes: `full` of each payload.
        dtypes: Dtypes of `wholes`.
        nbytes: Bytes of each whole.
    """

    def __init__(self, payloads: Iterable[Payload], fillings: Iterable[Filling] = ()) -> None:
        self._payloads = tuple(payloads)
        # Lists as torch's calls take them, made once: a gather repeats the call with the same arguments.
        self.shards = [shard for shard, _ in self._payloads]
        self.wholes = [full for _, full in self._payloads]
        self.dtypes = {unsharded.dtype for unsharded in self.wholes}
        self.nbytes = tuple([unsharded.nbytes for unsharded in self.wholes])
        self._fillings = [filling for filling in fillings if filling.begins]

    @classmethod
    def joined(cls, several: Iterable[Payloads]) -> Payloads:
        """The payloads of several gathers as a single gather. Fillings with the same function share a call."""
        payloads: list[Payload] = []
        fillings: list[Filling] = []
        for payload_list in several:
            for filling in payload_list._fillings:
                # Begins count from the first payload of the joined list.
                moved = filling._replace(begins=[begin + len(payloads) for begin in filling.begins])
                alike = [i for i, other in enumerate(fillings) if other.is_like(moved)]
                if alike:
                    fillings[alike[0]] = fillings[alike[0]].with_items_of(moved)
                else:
                    fillings.append(moved)
            payloads += payload_list
        return cls(payloads, fillings)

    def __len__(self) -> int:
        return len(self._payloads)

    @overload
    def __getitem__(self, index: int) -> Payload: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Payload]: ...
    def __getitem__(self, index: int | slice) -> Payload | Sequence[Payload]:
        return self._payloads[index]

    @cached_property
    def flat_bytes(self) -> FlatBytes:
        """`flat_bytes` of the payloads, made once."""
        with torch.inference_mode(False):  # cached inference views would fail later gathers
            return flat_bytes(self._payloads)

    @property
    def are_there(self) -> bool:
        """Whether no shard awaits a filling."""
        return not self._fillings

    def fill(self) -> None:
        """Write the shards not yet written.

        Effects: on the current stream, a single call of each filling's function for all items.
        """
        for fill, columns, _ in self._fillings:
            fill(*columns)

    def fill_first(self, num: int) -> None:
        """Write the first `num` payloads' shards, each item as a whole.

        Effects: as `fill`.
        """
        for filling in self._fillings:
            filling.write(0, num)

    def fill_after_first(self, num: int) -> None:
        """Write the shards left by `fill_first(num)`.

        Effects: as `fill`.
        """
        for filling in self._fillings:
            filling.write(num, len(self))


FlatBytes = tuple[list[torch.Tensor], list[torch.Tensor]]


def flat_bytes(payloads: Iterable[Payload]) -> FlatBytes:
    """1-D views of the shards' bytes and of the wholes'."""
    pairs = [payload.as_bytes() for payload in payloads]
    return [shard.view(-1) for shard, _ in pairs], [full.view(-1) for _, full in pairs]


def by_dtype(payloads: Sequence[Payload]) -> list[list[Payload]]:
    """Payloads grouped by the dtypes of their two tensors, in order of first appearance."""
    dtypes = [(shard.dtype, full.dtype) for shard, full in payloads]
    distinct_dtypes = dict.fromkeys(dtypes)
    if len(distinct_dtypes) == 1:
        return [list(payloads)]
    return [
        [payload for payload, dtype in zip(payloads, dtypes, strict=True) if dtype == one] for one in distinct_dtypes
    ]


def of_one_dtype(payloads: Sequence[Payload]) -> Sequence[Payload]:
    """The payloads unchanged if of equal dtype, else as bytes."""
    dtypes = payloads.dtypes if isinstance(payloads, Payloads) else {full.dtype for _, full in payloads}
    return payloads if len(dtypes) == 1 else [payload.as_bytes() for payload in payloads]


def pack(tensors: Sequence[torch.Tensor], into: torch.Tensor, num_ranks: int = 1) -> torch.Tensor:
    """Pack tensors side by side into a single tensor, for collectives with a single argument.

        shards               | payload 0 | payload 1 | ...
        wholes, `num_ranks`  | rank 0's shards | rank 1's shards | ...

    Args:
        tensors: Contiguous, of equal dtype.
        into: A tensor as large as all tensors together.
        num_ranks: Pieces of each tensor: the axis's number of ranks for wholes.

    Returns:
        `into`.

    Effects: a multi-tensor copy on the current stream.
    """
    torch._foreach_copy_(*_side_by_side(into, tensors, num_ranks))
    return into


def unpack(packed: torch.Tensor, into: Sequence[torch.Tensor], num_ranks: int = 1) -> None:
    """Copy tensors out of a packed tensor.

    Effects: a multi-tensor copy on the current stream.
    """
    pieces, tensors = _side_by_side(packed, into, num_ranks)
    torch._foreach_copy_(tensors, pieces)


def _side_by_side(
    packed: torch.Tensor, tensors: Sequence[torch.Tensor], num_ranks: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    # Views on both sides: elements move between the packed tensor and the caller's memory in one copy.
    rows = [tensor.view(num_ranks, -1) for tensor in tensors]
    return list(torch.split(packed.view(num_ranks, -1), [row.shape[1] for row in rows], dim=1)), rows
