"""The order of a mixture: the source of each sequence of the endless stream, by weights.

Note [A draw without a table]
    The stream gives each source its share of the positions as evenly as whole sequences can: before position p, the
    first source has had floor(p * share) draws, the second the same of the remaining positions with its share of the
    remaining weight, and so on. The numbers of draws follow from the position alone, in O(num_sources): no rank and
    no checkpoint keeps a count. A step therefore has the mixture's shares to within two sequences of each source.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

_UNIT: Final = 1 << 20


@dataclass(frozen=True)
class Mixture:
    """The shares of the sources, in 2**20ths: integers, as rounded products would not count evenly.

    Attributes:
        shares: The share of each source, at least 1; together 2**20.
    """

    shares: tuple[int, ...]

    @classmethod
    def of(cls, weights: Sequence[float]) -> "Mixture":
        """Make a mixture of weights, which need not add up to 1."""
        total = sum(weights)
        shares = [max(1, round(weight / total * _UNIT)) for weight in weights]
        shares[shares.index(max(shares))] += _UNIT - sum(shares)
        return cls(tuple(shares))

    @property
    def fractions(self) -> tuple[float, ...]:
        """The share of each source of the sequences, together 1."""
        return tuple(share / _UNIT for share in self.shares)

    def draws(self, positions: torch.Tensor) -> torch.Tensor:
        """Count the draws of each source before positions; see Note [A draw without a table].

        Args:
            positions: (num_positions,) int64, below 2**43.

        Returns:
            (num_positions, num_sources) int64; each row adds up to its position.
        """
        remaining, weight, counts = positions, _UNIT, []
        for share in self.shares[:-1]:
            counts.append(remaining * share // weight)
            remaining, weight = remaining - counts[-1], weight - share
        return torch.stack([*counts, remaining], dim=1)
