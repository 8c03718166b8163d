"""Rows of whole documents: which documents lie together in a row of bounded length.

Best fit decreasing, as TRL's `bfd`: the longest document first, each into the row with the least space that suffices.
"""

from array import array
from collections import deque
from typing import NamedTuple

import torch


class PackedRows(NamedTuple):
    """Documents by rows.

    Attributes:
        documents: (num_documents,) int64: the documents of the first row, then those of the second, and so on.
        starts: (num_rows + 1,) int64: row r holds `documents[starts[r] : starts[r + 1]]`.
    """

    documents: torch.Tensor
    starts: torch.Tensor


def packed(lengths: torch.Tensor, capacity: int) -> PackedRows:
    """Pack documents into rows, in O(num_documents * log(num_documents)).

    Args:
        lengths: (num_documents,) integers. A document longer than `capacity` fills a row; an empty one is in none.
        capacity: The tokens of a row.
    """
    lengths = lengths.clamp(max=capacity)
    order = lengths.argsort(descending=True, stable=True)[: int((lengths > 0).sum())]
    rows, num_rows = array("q"), 0
    rows_by_space: list[deque[int]] = [deque() for _ in range(capacity)]
    spaces = 0  # Bit s is set where a row has s tokens of space: the lowest bit from a length on is the best fit.
    for length in lengths[order].tolist():
        if fitting := spaces >> length:
            space = length + (fitting & -fitting).bit_length() - 1
            row = rows_by_space[space].popleft()
            if not rows_by_space[space]:
                spaces ^= 1 << space
        else:
            row, space, num_rows = num_rows, capacity, num_rows + 1
        rows.append(row)
        if remaining := space - length:
            rows_by_space[remaining].append(row)
            spaces |= 1 << remaining
    row_of = torch.tensor(rows, dtype=torch.int64)
    counts = torch.bincount(row_of, minlength=num_rows)
    return PackedRows(order[row_of.argsort(stable=True)], torch.cat([counts.new_zeros(1), counts.cumsum(0)]))


def one_a_row(lengths: torch.Tensor) -> PackedRows:
    """Return rows of one document each, without empty documents."""
    documents = lengths.nonzero()[:, 0]
    return PackedRows(documents, torch.arange(len(documents) + 1))
