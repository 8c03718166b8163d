"""Which boxes of which tensors are the same numbers: how two ways to name and cut a model's tensors correspond.

Fused projections that one side splits, experts that one side stacks, halves that one side names apart, heads that one
side interleaves: each is a table of boxes, equal on both sides, and reads from left to right as well as back.
"""

from dataclasses import dataclass
from typing import NamedTuple

from lamella_layout import Chunk


class Place(NamedTuple):
    """A box of a named tensor."""

    name: str
    chunk: Chunk


class Piece(NamedTuple):
    """Two boxes that hold the same numbers, in the same order row by row.

    Their sizes are equal but for sizes of 1 (`[1, 4, 8]` of stacked experts is `[4, 8]` of one).
    """

    left: Place
    right: Place


@dataclass(frozen=True, kw_only=True)
class Correspondence:
    """Tensors of the left side that are, together, tensors of the right side.

    Attributes:
        left: Shapes by name. The pieces cover each of them once.
        right: The same of the other side.
        pieces: The boxes that are equal.
        shift: What is added from left to right, and subtracted on the way back: norms whose weights are stored around
            zero have -1 where the others are on the left.
    """

    left: dict[str, tuple[int, ...]]
    right: dict[str, tuple[int, ...]]
    pieces: tuple[Piece, ...]
    shift: float = 0.0
