"""The order of training: the sequences of every step, and those of a validation.

Note [The stream does not know the ranks]
    Step s trains on sequences [s * batch_size, (s + 1) * batch_size) of one endless stream: the training text's
    sequences, shuffled anew in every epoch by seed and epoch alone. Each rank takes its part of the step. The number of
    ranks therefore changes neither the batch of a step nor the batches of a resumed run, and a checkpoint needs to
    store only the step.
"""

import functools
from dataclasses import dataclass

import torch

from lamella._data.packing import num_sequences, sequences


@dataclass(frozen=True, kw_only=True)
class BatchStream:
    """The training sequences of every step; see Note [The stream does not know the ranks]."""

    tokens: torch.Tensor
    sequence_length: int
    batch_size: int
    seed: int
    is_masked: bool = False

    def batch(self, step: int, rank: int, num_ranks: int) -> torch.Tensor:
        """Return a rank's part of step `step`, from 0 on: (batch_size / num_ranks, sequence_length + 1) int64."""
        share = self.batch_size // num_ranks
        start = step * self.batch_size + rank * share
        return sequences(self.tokens, self._indices(start, share), self.sequence_length)

    def num_targets(self, step: int) -> int:
        """Count the targets in the loss of a step over all ranks, at least 1: the divisor of the mean."""
        if not self.is_masked:
            return self.batch_size * self.sequence_length
        return max(1, int(self._num_targets[self._indices(step * self.batch_size, self.batch_size)].sum()))

    @functools.cached_property
    def _num_targets(self) -> torch.Tensor:
        """The targets of each sequence, (num_sequences,) int32: counted once, as a step needs those of all ranks."""
        count = num_sequences(self.tokens, self.sequence_length)
        targets = self.tokens[1 : 1 + count * self.sequence_length].view(count, self.sequence_length)
        pieces = torch.split(targets, max(1, (1 << 22) // self.sequence_length))  # A mapped text may exceed the memory.
        return torch.cat([(piece >= 0).sum(1, dtype=torch.int32) for piece in pieces])

    def _indices(self, start: int, num_positions: int) -> torch.Tensor:
        return torch.tensor([self._index(position) for position in range(start, start + num_positions)])

    def _index(self, position: int) -> int:
        count = num_sequences(self.tokens, self.sequence_length)
        return int(_shuffled(count, self.seed, position // count)[position % count])


@functools.lru_cache(maxsize=2)
def _shuffled(count: int, seed: int, epoch: int) -> torch.Tensor:
    generator = torch.Generator()
    generator.manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(count, generator=generator)


def validation_indices(tokens: torch.Tensor, sequence_length: int, at_most: int) -> torch.Tensor:
    """Return the indices of validation sequences, evenly spaced over the held-out text, at most `at_most`; int64."""
    count = num_sequences(tokens, sequence_length)
    chosen = min(count, at_most)
    return torch.arange(chosen) * count // chosen
