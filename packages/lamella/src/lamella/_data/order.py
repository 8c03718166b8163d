"""The order of training: the sequences of every step, and those of a validation.

Note [The stream does not know the ranks]
    Step s trains on sequences [s * batch_size, (s + 1) * batch_size) of one endless stream: the training text's
    sequences, shuffled anew in every epoch by seed and epoch alone. Each rank takes its part of the step. The number of
    ranks therefore changes neither the batch of a step nor the batches of a resumed run, and a checkpoint needs to
    store only the step. With a mixture each source is such a stream, and the weights decide whose next sequence comes.

Note [A permutation without a table]
    A table of the order takes 8 bytes a sequence and epoch on every rank, and seconds to shuffle. A Feistel network is
    a permutation of all numbers of an even number of bits, whatever its rounds compute from the key. Numbers past the
    count are sent through the network again until one below it comes out: a permutation of [0, count), as following a
    cycle from a number below the count ends at one number below it, and from no two numbers at the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from lamella._data.batches import JoinedSequences, Sequences, TokenBatch
from lamella._data.mixture import Mixture
from lamella._settings.mixture import mixture_weights
from lamella._settings.sections import DataConfig

ORDER: Final = "feistel-1"
"""The name of the order: another order under the same seed would have a resumed run repeat and skip sequences."""

_NUM_ROUNDS: Final = 6
_GOLDEN: Final = -7046029254386353131  # 2**64 / golden ratio, odd, as a signed integer
_FACTORS: Final = (-4658895280553007687, -7723592293110705685)  # of splitmix64's finalizer


@dataclass(frozen=True, kw_only=True)
class BatchStream:
    """The training sequences of every step; see Note [The stream does not know the ranks].

    Attributes:
        sequences: The sequences; `JoinedSequences` where there is a mixture.
        batch_size: The sequences of a step over all ranks.
        seed: The seed of the run.
        mixture: The shares of the parts of `sequences`, each of which has epochs of its own; None for one stream of
            all sequences.
    """

    sequences: Sequences
    batch_size: int
    seed: int
    mixture: Mixture | None = None

    def begin(self, state: Mapping[str, Any]) -> None:
        """Nothing: any step can be the first."""

    def state(self) -> dict[str, object]:
        """Return the place in the text for a checkpoint: nothing, as the step alone says the place."""
        return {}

    def measure(self, step: int) -> tuple[str, ...]:
        """Return lines to print on the packing of the text: none, as the preparation of the run printed them."""
        return ()

    def batch(self, step: int, rank: int, num_ranks: int) -> TokenBatch:
        """Return a rank's part of step `step`, from 0 on: batch_size / num_ranks sequences."""
        share = self.batch_size // num_ranks
        return self.sequences.batch(self._indices(step * self.batch_size + rank * share, share))

    def num_targets(self, step: int) -> int:
        """Count the targets in the loss of a step over all ranks, at least 1: the divisor of the mean."""
        return max(1, self.sequences.num_targets(self._indices(step * self.batch_size, self.batch_size)))

    @property
    def tokens_a_sequence(self) -> float:
        """The mean number of tokens in a sequence, without padding."""
        if self.mixture is None:
            return self.sequences.tokens_a_sequence
        parts = zip(self.mixture.fractions, self._parts, strict=True)
        return sum(fraction * part.tokens_a_sequence for fraction, part in parts)

    @property
    def _parts(self) -> tuple[Sequences, ...]:
        return self.sequences.parts if isinstance(self.sequences, JoinedSequences) else (self.sequences,)

    def _indices(self, start: int, num_positions: int) -> torch.Tensor:
        if self.mixture is None:
            return _in_epochs(start, num_positions, len(self.sequences), self.seed)
        draws = self.mixture.draws(torch.arange(start, start + num_positions + 1))
        indices = torch.empty(num_positions, dtype=torch.int64)
        offset = 0
        for number, part in enumerate(self._parts):
            is_drawn = draws[:, number].diff() > 0
            first, last = draws[0, number], draws[-1, number]
            if last > first:
                # Seeds of runs have 32 bits. Sources of equal length would be in the same order otherwise.
                seed = self.seed + (number << 32)
                indices[is_drawn] = offset + _in_epochs(int(first), int(last - first), len(part), seed)
            offset += len(part)
        return indices


def mixture_of(config: DataConfig) -> Mixture | None:
    """Return the mixture of the settings; None without one."""
    weights = mixture_weights(config)
    return Mixture.of([*weights.values()]) if weights else None


def mixture_lines(sequences: Sequences, config: DataConfig, num_sequences: int) -> list[str]:
    """Return a line a source on its share and its epochs over a run; none without a mixture.

    Args:
        sequences: The training sequences.
        config: The settings of the data.
        num_sequences: The sequences of all steps together.
    """
    weights = mixture_weights(config)
    if not weights or not isinstance(sequences, JoinedSequences):
        return []
    mixture = Mixture.of([*weights.values()])
    draws = mixture.draws(torch.tensor([num_sequences]))[0].tolist()
    return [
        f"mixture: {fraction:.1%} {name}, {count:,} of its {len(part):,} sequences, {count / len(part):.2f} epochs"
        for name, fraction, part, count in zip(weights, mixture.fractions, sequences.parts, draws, strict=True)
    ]


def _in_epochs(start: int, num_positions: int, count: int, seed: int) -> torch.Tensor:
    """Return the sequences at positions of an endless stream of `count` sequences, shuffled anew in every epoch."""
    stop, parts = start + num_positions, []
    for epoch in range(start // count, (stop - 1) // count + 1):
        begin = epoch * count
        positions = torch.arange(max(start, begin) - begin, min(stop, begin + count) - begin)
        parts.append(shuffled(positions, count, seed, epoch))
    return torch.cat(parts)


def shuffled(positions: torch.Tensor, count: int, seed: int, epoch: int) -> torch.Tensor:
    """Return the sequences at `positions` of an epoch; see Note [A permutation without a table].

    Args:
        positions: (num_positions,) int64, below `count`.
        count: The number of sequences.
        seed: The seed of the run.
        epoch: The epoch, from 0 on.
    """
    num_bits = max(1, ((count - 1).bit_length() + 1) // 2)  # of a half
    key = _mixed(_mixed(torch.tensor(seed)) + epoch)
    keys = list(_mixed(key + torch.arange(_NUM_ROUNDS) * _GOLDEN))
    indices = _feistel(positions, keys, num_bits)
    while (is_past := indices >= count).any():
        indices[is_past] = _feistel(indices[is_past], keys, num_bits)
    return indices


def _feistel(numbers: torch.Tensor, keys: list[torch.Tensor], num_bits: int) -> torch.Tensor:
    mask = (1 << num_bits) - 1
    left, right = numbers >> num_bits, numbers & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right + key) & mask)
    return (left << num_bits) | right


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """Return 64 bits that all depend on every bit of a number, by splitmix64's finalizer; int64 wraps around."""
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        numbers = (numbers ^ _shifted(numbers, shift)) * factor
    return numbers ^ _shifted(numbers, 31)


def _shifted(numbers: torch.Tensor, shift: int) -> torch.Tensor:
    """Shift to the right without copies of the sign."""
    return (numbers >> shift) & ((1 << (64 - shift)) - 1)


def validation_indices(sequences: Sequences, at_most: int) -> torch.Tensor:
    """Return the indices of validation sequences, evenly spaced over those with targets, at most `at_most`; int64."""
    counts = sequences.target_counts
    with_targets = None if counts is None else counts.nonzero()[:, 0]
    count = len(sequences) if with_targets is None else len(with_targets)
    chosen = min(count, at_most)
    places = torch.arange(chosen) * count // chosen
    return places if with_targets is None else with_targets[places]
