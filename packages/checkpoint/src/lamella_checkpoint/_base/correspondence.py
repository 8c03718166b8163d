"""Which boxes of which tensors are the same numbers: how two ways to name and cut a model's tensors correspond.

Fused projections that one side splits, experts that one side stacks, halves that one side names apart, heads that one
side interleaves: each is a table of boxes, equal on both sides, and reads from left to right as well as back.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from math import prod
from typing import Literal, NamedTuple

from lamella_checkpoint._base.boxes import whole_box
from lamella_layout import Chunk

Side = Literal["left", "right"]


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
        padded: By name, the rows of a tensor that the pieces cover, of those that have others behind them. They hold
            nothing: zeros are written, and on the way back they are left out.

    Raises:
        ValueError: The pieces do not cover a tensor once, or the boxes of one are not of one size.
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
        whole = whole_box(shape)
        piece = Piece(Place(left, whole), Place(right, whole))
        return cls(left={left: tuple(shape)}, right={right: tuple(shape)}, pieces=(piece,), shift=shift)

    @property
    def is_rename(self) -> bool:
        """Whether it is one tensor on both sides, of one shape and in one order."""
        return len(self.pieces) == 1 and list(self.left.values()) == list(self.right.values())

    @property
    def inverse(self) -> "Correspondence":
        """The same, with the sides exchanged."""
        pieces = tuple([Piece(right, left) for left, right in self.pieces])
        return self._but(left=self.right, right=self.left, pieces=pieces, shift=-self.shift)

    def renamed(
        self, left: Callable[[str], str] = lambda name: name, right: Callable[[str], str] = lambda name: name
    ) -> "Correspondence":
        """The same, of tensors with other names.

        Args:
            left: The new names of the left side, by the old ones.
            right: The same of the right side.

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
        """The rows of a tensor that are padding; None where it has none."""
        if not shape or (first := self.padded.get(name, shape[0])) == shape[0]:
            return None
        return Chunk((first, *(0 for _ in shape[1:])), (shape[0] - first, *shape[1:]))

    def _but(self, **changes: object) -> "Correspondence":
        """The same but for some attributes, which are right because these are: there may be tens of thousands."""
        other = copy(self)
        vars(other).update(changes)
        return other

    def _covered(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        return {name: (self.padded.get(name, shape[0]), *shape[1:]) if shape else () for name, shape in shapes.items()}


def carried(chunk: Chunk, origin: Chunk, goal: Chunk) -> Chunk:
    """Where a part of one box lies in another that holds the same numbers.

    Args:
        chunk: Inside `origin`, and not empty.
        origin: A box.
        goal: One of the same sizes, but for 1s. May have another number of dims.
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


def meetings(some: Iterable[Chunk], others: Iterable[Chunk]) -> Iterator[tuple[int, int, Chunk]]:
    """Which boxes of two lists meet, by their indices, and in what.

    Boxes are compared along dim 0 first, so that thousands of experts do not cost their square.
    """
    mine, theirs = _by_start(some), _by_start(others)
    open_boxes: list[tuple[int, Chunk]] = []
    upcoming = 0
    for index, box in mine:
        start, stop = _along_dim0(box)
        while upcoming < len(theirs) and _along_dim0(theirs[upcoming][1])[0] < stop:
            open_boxes.append(theirs[upcoming])
            upcoming += 1
        open_boxes = [each for each in open_boxes if _along_dim0(each[1])[1] > start]
        for other_index, other in open_boxes:
            shared = box if box == other else box.intersection(other)
            if shared.numel:
                yield index, other_index, shared


def _by_start(boxes: Iterable[Chunk]) -> list[tuple[int, Chunk]]:
    return sorted(enumerate(boxes), key=lambda each: _along_dim0(each[1])[0])


def _along_dim0(box: Chunk) -> tuple[int, int]:
    return (box.offsets[0], box.offsets[0] + box.sizes[0]) if box.sizes else (0, 1)


def _without_ones(sizes: Sequence[int]) -> list[int]:
    return [size for size in sizes if size != 1]


def _check_cover(shapes: Mapping[str, tuple[int, ...]], places: Iterable[Place]) -> None:
    """Every element of each tensor is in one box, and no box is outside."""
    boxes: dict[str, list[Chunk]] = {name: [] for name in shapes}
    for place in places:
        if place.name not in boxes:
            raise ValueError(f"Expected pieces of {sorted(shapes)!r}, got one of {place.name!r}.")
        boxes[place.name].append(place.chunk)
    for name, shape in shapes.items():
        _check_boxes(name, shape, boxes[name])


def _check_boxes(name: str, shape: Sequence[int], boxes: Sequence[Chunk]) -> None:
    whole = whole_box(shape)
    if len(boxes) == 1 and boxes[0] == whole:
        return
    for box in boxes:
        if len(box.sizes) != len(shape) or whole.intersection(box) != box:
            raise ValueError(f"Expected boxes inside {name!r} of shape {tuple(shape)!r}, got {box!r}.")
    # As many elements as there are, and each box meets itself alone: then none is missing and none is there twice.
    num_covered = sum(box.numel for box in boxes)
    if num_covered != prod(shape):
        raise ValueError(f"Expected pieces of all {prod(shape)} elements of {name!r}, got {num_covered}.")
    if len(boxes) > 1:
        for first, second, shared in meetings(boxes, boxes):
            if first != second:
                raise ValueError(f"Expected each element of {name!r} in one piece, got {shared!r} in two.")
