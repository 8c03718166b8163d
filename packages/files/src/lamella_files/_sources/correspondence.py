"""Correspondence of two ways to name and cut a model's tensors: pairs of boxes that hold the same numbers.

Fused projections split on the other side, stacked experts, separately named halves, interleaved heads: each
is a table of equal boxes, and reads from left to right as well as back.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from math import prod
from typing import Literal, NamedTuple

from lamella_files._base.boxes import whole_box
from lamella_layout import Chunk

Side = Literal["left", "right"]


class Place(NamedTuple):
    """A box of a named tensor."""

    name: str
    chunk: Chunk


class Piece(NamedTuple):
    """Two boxes that hold the same numbers, in the same order row by row.

    The sizes are equal but for sizes of 1 (`[1, 4, 8]` of stacked experts is `[4, 8]` of a single expert).
    """

    left: Place
    right: Place


@dataclass(frozen=True, kw_only=True)
class Correspondence:
    """Tensors of the left side that together equal tensors of the right side.

    Attributes:
        left: Shapes by name. The pieces cover each tensor exactly once.
        right: The other side's shapes by name, covered in the same way.
        pieces: The pairs of equal boxes.
        shift: Added from left to right, and subtracted on the way back: norm weights stored around zero on the right
            have -1 here.
        padded: By name, the number of rows that the pieces cover, for tensors with padding rows behind. Padding
            is written as zeros, and dropped on the way back.

    Raises:
        ValueError: The pieces do not cover a tensor exactly once, or a piece's boxes differ in size.
    """

    left: Mapping[str, tuple[int, ...]]
    right: Mapping[str, tuple[int, ...]]
    pieces: tuple[Piece, ...]
    shift: float = 0.0
    padded: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for piece in self.pieces:
            if _without_ones(piece.left.chunk.sizes) != _without_ones(piece.right.chunk.sizes):
                raise ValueError(f"Expected boxes of one size, but for 1s, got {piece.left!r} and {piece.right!r}.")
        _check_cover(self._covered(self.left), [piece.left for piece in self.pieces])
        _check_cover(self._covered(self.right), [piece.right for piece in self.pieces])

    @classmethod
    def rename(cls, left: str, right: str, shape: Sequence[int], *, shift: float = 0.0) -> "Correspondence":
        """One tensor under two names."""
        full_box = whole_box(shape)
        piece = Piece(Place(left, full_box), Place(right, full_box))
        return cls(left={left: tuple(shape)}, right={right: tuple(shape)}, pieces=(piece,), shift=shift)

    @property
    def is_rename(self) -> bool:
        """Whether both sides are a single tensor, of one shape and in one order."""
        return len(self.pieces) == 1 and list(self.left.values()) == list(self.right.values())

    @property
    def inverse(self) -> "Correspondence":
        """The same, with the sides exchanged."""
        pieces = tuple([Piece(right, left_box) for left_box, right in self.pieces])
        return self._but(left=self.right, right=self.left, pieces=pieces, shift=-self.shift)

    def renamed(
        self, left: Callable[[str], str] = lambda name: name, right: Callable[[str], str] = lambda name: name
    ) -> "Correspondence":
        """The same correspondence, with new tensor names.

        Args:
            left: The new names of the left side, by the old ones.
            right: The new names of the right side, by the old ones.

        Raises:
            ValueError: Two names of a side would become one.
        """
        lefts, rights = {name: left(name) for name in self.left}, {name: right(name) for name in self.right}
        for names in (lefts, rights):
            if len({*names.values()}) < len(names):
                raise ValueError(f"Expected a name for each tensor, got {names!r}.")
        return self._but(
            left={lefts[name]: shape for name, shape in self.left.items()},
            right={rights[name]: shape for name, shape in self.right.items()},
            pieces=tuple(
                [Piece(Place(lefts[a.name], a.chunk), Place(rights[b.name], b.chunk)) for a, b in self.pieces]
            ),
            padded={(rights | lefts)[name]: rows for name, rows in self.padded.items()},
        )

    def padding(self, name: str, shape: tuple[int, ...]) -> Chunk | None:
        """The padding rows of a tensor; None without padding."""
        if not shape or (first := self.padded.get(name, shape[0])) == shape[0]:
            return None
        return Chunk((first, *(0 for _ in shape[1:])), (shape[0] - first, *shape[1:]))

    def _but(self, **changes: object) -> "Correspondence":
        """A copy with some attributes changed, unchecked: pieces, maybe tens of thousands, are checked already."""
        other = copy(self)
        vars(other).update(changes)
        return other

    def _covered(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        return {name: (self.padded.get(name, shape[0]), *shape[1:]) if shape else () for name, shape in shapes.items()}


def carried(chunk: Chunk, origin: Chunk, goal: Chunk) -> Chunk:
    """The part of `goal` that holds the same numbers as a part of `origin`.

    Args:
        chunk: Inside `origin`, and not empty.
        origin: A box.
        goal: A box of the same sizes, but for 1s. May have another number of dims.
    """
    if chunk is origin or chunk == origin:
        return goal
    if origin.sizes == goal.sizes:
        shifts = zip(chunk.offsets, origin.offsets, goal.offsets, strict=True)
        return Chunk(tuple([offset - start + to for offset, start, to in shifts]), chunk.sizes)
    along = zip(chunk.offsets, chunk.sizes, origin.offsets, origin.sizes, strict=True)
    moves = iter([(offset - start, size) for offset, size, start, span in along if span != 1])
    moved = [(0, 1) if span == 1 else next(moves) for span in goal.sizes]
    offsets = tuple(start + step for start, (step, _) in zip(goal.offsets, moved, strict=True))
    return Chunk(offsets, tuple(size for _, size in moved))


def meetings(some: Iterable[Chunk], other_chunks: Iterable[Chunk]) -> Iterator[tuple[int, int, Chunk]]:
    """Overlapping pairs of boxes from two lists: both indices, and the intersection.

    Boxes are compared along dim 0 first, so that thousands of experts do not cost quadratic time.
    """
    mine, theirs = _by_start(some), _by_start(other_chunks)
    open_boxes: list[tuple[int, Chunk]] = []
    upcoming = 0
    for index, box in mine:
        start, stop = _along_dim0(box)
        while upcoming < len(theirs) and _along_dim0(theirs[upcoming][1])[0] < stop:
            open_boxes.append(theirs[upcoming])
            upcoming += 1
        open_boxes = [numbered_box for numbered_box in open_boxes if _along_dim0(numbered_box[1])[1] > start]
        for other_index, other in open_boxes:
            shared = box if box == other else box.intersection(other)
            if shared.numel:
                yield index, other_index, shared


def _by_start(boxes: Iterable[Chunk]) -> list[tuple[int, Chunk]]:
    return sorted(enumerate(boxes), key=lambda numbered_box: _along_dim0(numbered_box[1])[0])


def _along_dim0(box: Chunk) -> tuple[int, int]:
    return (box.offsets[0], box.offsets[0] + box.sizes[0]) if box.sizes else (0, 1)


def _without_ones(sizes: Sequence[int]) -> list[int]:
    return [size for size in sizes if size != 1]


def _check_cover(shapes: Mapping[str, tuple[int, ...]], places: Iterable[Place]) -> None:
    """Check that every element of each tensor is in exactly one box, and no box is outside."""
    boxes: dict[str, list[Chunk]] = {name: [] for name in shapes}
    for place in places:
        if place.name not in boxes:
            raise ValueError(f"Expected pieces of {sorted(shapes)!r}, got one of {place.name!r}.")
        boxes[place.name].append(place.chunk)
    for name, shape in shapes.items():
        _check_boxes(name, shape, boxes[name])


def _check_boxes(name: str, shape: Sequence[int], boxes: Sequence[Chunk]) -> None:
    full_box = whole_box(shape)
    if len(boxes) == 1 and boxes[0] == full_box:
        return
    for box in boxes:
        if len(box.sizes) != len(shape) or full_box.intersection(box) != box:
            raise ValueError(f"Expected boxes inside {name!r} of shape {tuple(shape)!r}, got {box!r}.")
    # Equal counts, and no box overlaps another: then no element is missing and none is covered twice.
    num_covered = sum(box.numel for box in boxes)
    if num_covered != prod(shape):
        raise ValueError(f"Expected pieces of all {prod(shape)} elements of {name!r}, got {num_covered}.")
    if len(boxes) > 1:
        for first, second, shared in meetings(boxes, boxes):
            if first != second:
                raise ValueError(f"Expected each element of {name!r} in one piece, got {shared!r} in two.")
