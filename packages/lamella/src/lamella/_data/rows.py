"""Rows of documents: packed, or one document each, with the targets of each row."""

from typing import Final

import torch

from lamella._data.batches import DocumentRows
from lamella._data.packing import one_a_row, packed
from lamella._settings.sections import Packing

_PIECE_LENGTH: Final = 1 << 22


def document_rows(tokens: torch.Tensor, starts: torch.Tensor, packing: Packing, sequence_length: int) -> DocumentRows:
    """Return rows of documents, without rows in which no token is a target.

    A step of such rows alone would change the weights, by their decay and the optimizer's momentum.

    Args:
        tokens: (num_tokens,) int32, as `DocumentRows` has them.
        starts: (num_documents + 1,) int64, offsets into `tokens`.
        packing: "documents" for packed rows, or "none" for a document a row.
        sequence_length: The tokens of a row.
    """
    lengths = starts.diff()
    rows = packed(lengths, sequence_length) if packing == "documents" else one_a_row(lengths)
    stops = starts[:-1] + lengths.clamp(max=sequence_length)
    counts = num_targets_before(tokens, stops) - num_targets_before(tokens, starts[:-1])
    before = torch.cat([counts.new_zeros(1), counts[rows.documents].cumsum(0)])
    target_counts, sizes = before[rows.starts].diff().int(), rows.starts.diff()
    has_targets = target_counts > 0
    return DocumentRows(
        tokens=tokens,
        document_starts=starts,
        documents=rows.documents[has_targets.repeat_interleave(sizes)],
        row_starts=torch.cat([sizes.new_zeros(1), sizes[has_targets].cumsum(0)]),
        target_counts=target_counts[has_targets],
        sequence_length=sequence_length,
        is_packed=packing == "documents",
    )


def num_targets_before(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Count the targets before each of the ascending positions, (num_positions,) int64."""
    counts = torch.empty_like(positions)
    first = num_before = 0
    for start in range(0, len(tokens) + 1, _PIECE_LENGTH):  # A mapped text may exceed the memory.
        piece = tokens[start : start + _PIECE_LENGTH] >= 0
        sums = num_before + torch.cat([torch.zeros(1, dtype=torch.int64), piece.cumsum(0)])
        last = int(torch.searchsorted(positions, start + len(piece), right=True))
        counts[first:last] = sums[positions[first:last] - start]
        first, num_before = last, int(sums[-1])
    return counts
