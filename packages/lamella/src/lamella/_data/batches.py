"""Batches of sequences, and the two forms of sequences: cut from a stream of tokens, or rows of whole documents."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import torch

from lamella_transformers import document_starts

if TYPE_CHECKING:
    from lamella_transformers import SequencePieces

IGNORED: Final = -100
"""The target ignored by torch's cross entropy."""

PADDING: Final = ~0
"""Fills rows: the complement of a token, which is read by no target."""


class TokenBatch(NamedTuple):
    """Sequences of a batch.

    Attributes:
        tokens: (num_sequences, length + 1) int64, with complements as `tokens` of `TokenData` has them.
        positions: (num_sequences, length) int64, beginning anew at each document; None where every sequence is one.
        starts: The `document_starts` of the positions, for attention within documents; None without.
    """

    tokens: torch.Tensor
    positions: torch.Tensor | None = None
    starts: torch.Tensor | None = None

    def on_device(self, device: torch.device) -> "TokenBatch":
        """Copy to a device. Effects: no host sync; from pageable memory the host would wait for all work."""
        if device.type == "cpu":
            return self
        copies = (None if part is None else part.pin_memory().to(device, non_blocking=True) for part in self)
        return TokenBatch(*copies)  # type: ignore[arg-type]

    def microbatches(self, count: int, *, has_starts: bool = False) -> "list[TokenBatch]":
        """Split into batches of equal numbers of sequences; without positions each is cut after its last target.

        Args:
            count: The number of batches.
            has_starts: Add the starts of documents, while positions are on the host: on a GPU they would be a host
                sync.
        """
        tokens = self.tokens.chunk(count)
        if self.positions is None:
            return [TokenBatch(_without_end(part)) for part in tokens]
        return [
            TokenBatch(part, positions, document_starts(positions) if has_starts else None)
            for part, positions in zip(tokens, self.positions.chunk(count), strict=True)
        ]

    def arguments(self, pieces: "SequencePieces | None" = None) -> "LossArguments":
        """Return the tensors of a loss: those of this rank's pieces of the sequences, if they are cut."""
        if pieces is None:
            return LossArguments(self.inputs, self.targets, self.positions, self.starts)
        positions = pieces.positions(self.inputs)
        return LossArguments(pieces.of(self.inputs, 0), pieces.of(self.targets, IGNORED), positions)

    @property
    def inputs(self) -> torch.Tensor:
        """(num_sequences, length) int64."""
        return torch.where(self.tokens < 0, ~self.tokens, self.tokens)[:, :-1]

    @property
    def targets(self) -> torch.Tensor:
        """(num_sequences, length) int64: the token after each input, or `IGNORED`."""
        return torch.where(self.tokens < 0, IGNORED, self.tokens)[:, 1:]


class LossArguments(NamedTuple):
    """The tensors of a loss, (num_sequences, columns) int64 but the starts; as `TokenBatch` has them."""

    inputs: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor | None
    starts: torch.Tensor | None = None


def _without_end(tokens: torch.Tensor) -> torch.Tensor:
    """Cut columns after the last target of any sequence: no target reads them."""
    columns = (tokens >= 0).any(0).nonzero()
    return tokens[:, : max(2, int(columns[-1, 0]) + 1 if len(columns) else 0)]


class Sequences(Protocol):
    """Sequences to train on, by number."""

    def __len__(self) -> int:
        """The number of sequences."""
        ...

    @property
    def tokens_a_sequence(self) -> float:
        """The mean number of tokens in a sequence, without padding."""
        ...

    @property
    def target_counts(self) -> torch.Tensor | None:
        """(num_sequences,) int32; None where every token is a target."""
        ...

    def batch(self, indices: torch.Tensor) -> TokenBatch:
        """Return the sequences at `indices`, (num_indices,) int64."""
        ...

    def num_targets(self, indices: torch.Tensor) -> int:
        """Count the targets of the sequences at `indices`."""
        ...


@dataclass(frozen=True, kw_only=True)
class StreamSequences:
    """Sequences of equal length, cut from a stream of tokens; no token is predicted twice.

    Attributes:
        tokens: (num_tokens,) int32.
        sequence_length: Tokens predicted in a sequence.
        target_counts: (num_sequences,) int32; None where every token is a target.
    """

    tokens: torch.Tensor
    sequence_length: int
    target_counts: torch.Tensor | None = None

    def __len__(self) -> int:
        """The number of sequences."""
        return num_sequences(self.tokens, self.sequence_length)

    @property
    def tokens_a_sequence(self) -> float:
        """The number of tokens in a sequence."""
        return self.sequence_length

    def batch(self, indices: torch.Tensor) -> TokenBatch:
        """Return the sequences at `indices`."""
        positions = indices[:, None] * self.sequence_length + torch.arange(self.sequence_length + 1)
        return TokenBatch(self.tokens[positions].long())

    def num_targets(self, indices: torch.Tensor) -> int:
        """Count the targets of the sequences at `indices`."""
        if self.target_counts is None:
            return len(indices) * self.sequence_length
        return int(self.target_counts[indices].sum())


def num_sequences(tokens: torch.Tensor, sequence_length: int) -> int:
    """Count the sequences of a stream."""
    return max(0, len(tokens) - 1) // sequence_length


@dataclass(frozen=True, kw_only=True)
class DocumentRows:
    """Rows of whole documents, each truncated to the length of a row. All tensors may be mapped files.

    Attributes:
        tokens: (num_tokens,) int32: documents one after another. The first token of each is a complement: nothing
            before it predicts it.
        document_starts: (num_documents + 1,) int64, offsets into `tokens`.
        documents: (num_packed,) int64, by rows: without those of rows without targets.
        row_starts: (num_rows + 1,) int64, offsets into `documents`.
        target_counts: (num_rows,) int32.
        sequence_length: The tokens of a row.
        is_packed: Rows hold several documents: positions begin anew at each.
    """

    tokens: torch.Tensor
    document_starts: torch.Tensor
    documents: torch.Tensor
    row_starts: torch.Tensor
    target_counts: torch.Tensor
    sequence_length: int
    is_packed: bool

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.row_starts) - 1

    @property
    def tokens_a_sequence(self) -> float:
        """The mean number of tokens in a row, without padding."""
        lengths = self.document_starts.diff()[self.documents].clamp(max=self.sequence_length)
        return float(lengths.sum()) / max(1, len(self))

    def batch(self, indices: torch.Tensor) -> TokenBatch:
        """Return the rows at `indices`, padded to the length of a row."""
        tokens = torch.full((len(indices), self.sequence_length + 1), PADDING)
        positions = torch.arange(self.sequence_length).repeat(len(indices), 1)
        for row, index in enumerate(indices.tolist()):
            end = self._fill(index, tokens[row], positions[row])
            positions[row, end:] -= end  # Padding is a document of its own: none of its tokens reads a document.
        return TokenBatch(tokens, positions if self.is_packed else None)

    def _fill(self, index: int, tokens: torch.Tensor, positions: torch.Tensor) -> int:
        """Write the documents of a row; return where they end."""
        end = 0
        first, last = self.row_starts[index : index + 2].tolist()
        for document in self.documents[first:last].tolist():
            start, stop = self.document_starts[document : document + 2].tolist()
            begin, end = end, end + min(stop - start, self.sequence_length)
            tokens[begin:end] = self.tokens[start : start + end - begin]
            positions[begin:end] -= begin
        return end

    def num_targets(self, indices: torch.Tensor) -> int:
        """Count the targets of the rows at `indices`."""
        return int(self.target_counts[indices].sum())


@dataclass(frozen=True)
class JoinedSequences:
    """The sequences of several sources, numbered one source after another.

    Attributes:
        parts: The sequences of each source, of one length and form.
    """

    parts: tuple[Sequences, ...]

    def __len__(self) -> int:
        """The number of sequences."""
        return sum(map(len, self.parts))

    @property
    def tokens_a_sequence(self) -> float:
        """The mean number of tokens in a sequence, without padding."""
        return sum(len(part) * part.tokens_a_sequence for part in self.parts) / max(1, len(self))

    @property
    def target_counts(self) -> torch.Tensor | None:
        """(num_sequences,) int32; None where every token is a target."""
        counts = [part.target_counts for part in self.parts]
        masked_counts = [count for count in counts if count is not None]
        return torch.cat(masked_counts) if len(masked_counts) == len(counts) else None

    def batch(self, indices: torch.Tensor) -> TokenBatch:
        """Return the sequences at `indices`."""
        batches = [(chosen, part.batch(numbers)) for part, chosen, numbers in self._by_part(indices)]
        _, first = batches[0]
        tokens = torch.empty(len(indices), first.tokens.shape[1], dtype=torch.int64)
        positions = None if first.positions is None else torch.empty_like(tokens[:, 1:])
        for chosen, batch in batches:
            tokens[chosen] = batch.tokens
            if positions is not None and batch.positions is not None:
                positions[chosen] = batch.positions
        return TokenBatch(tokens, positions)

    def num_targets(self, indices: torch.Tensor) -> int:
        """Count the targets of the sequences at `indices`."""
        return sum(part.num_targets(numbers) for part, _, numbers in self._by_part(indices))

    def _by_part(self, indices: torch.Tensor) -> Iterator[tuple[Sequences, torch.Tensor, torch.Tensor]]:
        """Yield each part that has some of the indices, a mask of these, and their numbers in the part."""
        start = 0
        for part in self.parts:
            chosen = (indices >= start) & (indices < start + len(part))
            if chosen.any():
                yield part, chosen, indices[chosen] - start
            start += len(part)
