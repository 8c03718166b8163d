"""The order of a mixture: the source of each sequence of the endless stream, by weights.

Note [A draw without a table]
    The stream gives each source its share of the positions as evenly as whole sequences can: before position p, the
    source with the largest share has had p * share draws, rounded, the next the same of the remaining positions with
    its share of the remaining weight, and so on. The numbers of draws follow from the position alone, in
    O(num_sources): no rank and no checkpoint keeps a count. Roundings of larger sources are shared by the smaller, so
    the k-th source is off by less than (1 + 1 + 1/2 + ... + 1 / (k - 1)) / 2 draws; a step, between two positions, by
    twice as many: less than three with up to five sources.
"""

import math
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
        exponent = math.frexp(max(weights))[1]
        # The sum of the largest weights would be infinite; a power of two changes no digit of the shares.
        scaled = [math.ldexp(weight, -exponent) for weight in weights]
        total = sum(scaled)
        shares = [max(1, round(weight / total * _UNIT)) for weight in scaled]
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
        remaining, weight = positions, _UNIT
        counts = [positions] * len(self.shares)
        *larger, smallest = sorted(range(len(self.shares)), key=lambda source: -self.shares[source])
        for source in larger:
            counts[source] = (remaining * self.shares[source] + weight // 2) // weight
            remaining, weight = remaining - counts[source], weight - self.shares[source]
        counts[smallest] = remaining
        return torch.stack(counts, dim=1)
