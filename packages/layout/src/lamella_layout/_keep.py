"""Blocks of a tensor kept on one rank."""

from dataclasses import dataclass
from math import prod

from lamella_layout._checks import Shape, check_at_least_one


@dataclass(frozen=True)
class Rows:
    """Blocks of `num_rows` rows (indices of dim 0) stay on one rank; the last block may be shorter.

    1 allows a cut between any two rows. MXFP8 scales need 32, blockwise float8 needs 128.
    """

    num_rows: int = 1

    def __post_init__(self) -> None:
        check_at_least_one("num_rows", self.num_rows)


@dataclass(frozen=True)
class Whole:
    """The tensor stays whole on one rank, for optimizers of whole matrices (Muon)."""


Keep = Rows | Whole
"""Block of a tensor that stays on one rank."""


def kept_numel(shape: Shape, keep: Keep) -> int:
    """Return the elements of one kept block; cuts fall at its multiples, counted from the tensor's start."""
    rows = shape[0] if isinstance(keep, Whole) else min(keep.num_rows, shape[0])
    return rows * prod(shape[1:])
