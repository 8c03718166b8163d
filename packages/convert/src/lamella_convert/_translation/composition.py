"""Terms composed of tensors of known shapes, and the shapes of the tensors in a term of known shape."""

from collections.abc import Mapping
from itertools import accumulate
from typing import NamedTuple

from lamella_convert._errors import SizeUnknown
from lamella_convert._translation.templates import fill
from lamella_convert._translation.terms import Grouped, Join, Padded, Size, Stack, Term
from lamella_files import Place, carried, meetings, whole_box
from lamella_layout import Chunk


class Composition(NamedTuple):
    """A composed term: the whole's shape, and pairs of a stored box and the equal box of the whole."""

    shape: tuple[int, ...]
    boxes: list[tuple[Place, Chunk]]


def compose(
    term: Term,
    numbers: Mapping[str, str],
    counts: Mapping[str, int],
    shapes: Mapping[str, tuple[int, ...]],
    sizes: dict[str, int],
) -> Composition:
    """Compose a term from tensors of known shapes."""
    if isinstance(term, str):
        name = fill(term, numbers)
        full_box = whole_box(shapes[name])
        return Composition(shapes[name], [(Place(name, full_box), full_box)])
    if isinstance(term, Join):
        tensors = [compose(operand, numbers, counts, shapes, sizes) for operand in term.terms]
        return _joined(tensors, term, sizes)
    if isinstance(term, Stack):
        _check_count(term, counts[term.index], sizes)
        tensors = [
            compose(term.term, {**numbers, term.index: str(number)}, counts, shapes, sizes)
            for number in range(counts[term.index])
        ]
        return _stacked(tensors)
    if isinstance(term, Padded):
        return _cut_off(compose(term.name, numbers, counts, shapes, sizes), term, sizes)
    return _ungrouped(compose(term.term, numbers, counts, shapes, sizes), term, sizes)


def _check_count(term: Stack, num_stacked: int, sizes: Mapping[str, int]) -> None:
    if term.count is not None and num_stacked != sizes.get(term.count, num_stacked):
        raise ValueError(f"Expected {term.count} ({sizes[term.count]}) to stack, got {num_stacked}.")


def _joined(tensors: list[Composition], term: Join, sizes: dict[str, int]) -> Composition:
    dim = term.dim
    spans = [tensor.shape[dim] for tensor in tensors]
    for size, span in zip(term.sizes, spans, strict=True):
        if isinstance(size, str):
            sizes.setdefault(size, span)
    _resolve(term.sizes, sum(spans), sizes, expected=spans)
    other_sizes = {(*tensor.shape[:dim], *tensor.shape[dim + 1 :]) for tensor in tensors}
    if len(other_sizes) != 1:
        raise ValueError(
            f"Expected parts that differ along dim {dim} alone, got {[tensor.shape for tensor in tensors]!r}."
        )
    boxes = []
    for offset, tensor in zip(accumulate(spans, initial=0), tensors, strict=False):
        boxes += [(place, _along(box, dim, box.offsets[dim] + offset, box.sizes[dim])) for place, box in tensor.boxes]
    return Composition(_with(tensors[0].shape, dim, sum(spans)), boxes)


def _stacked(tensors: list[Composition]) -> Composition:
    shapes = {tensor.shape for tensor in tensors}
    if len(shapes) != 1:
        raise ValueError(f"Expected tensors of one shape to stack, got {sorted(shapes)!r}.")
    boxes = [
        (place, Chunk((number, *box.offsets), (1, *box.sizes)))
        for number, tensor in enumerate(tensors)
        for place, box in tensor.boxes
    ]
    return Composition((len(tensors), *shapes.pop()), boxes)


def _cut_off(tensor: Composition, term: Padded, sizes: Mapping[str, int]) -> Composition:
    num_rows = _number(term.rows, sizes)
    if tensor.shape[0] < num_rows:
        raise ValueError(f"Expected {term.rows} ({num_rows}) rows or more, got {tensor.shape[0]}.")
    ((place, full_box),) = tensor.boxes
    rows = _along(full_box, 0, 0, num_rows)
    return Composition(rows.sizes, [(Place(place.name, rows), rows)])


def _ungrouped(tensor: Composition, term: Grouped, sizes: Mapping[str, int]) -> Composition:
    dim, num_groups = term.dim, _number(term.groups, sizes)
    spans = _resolve(term.sizes, tensor.shape[dim], sizes)
    if any(span % num_groups for span in spans):
        raise ValueError(f"Expected parts that divide by {term.groups!r} ({num_groups}), got {spans!r}.")
    starts = list(accumulate(spans, initial=0))
    full_box = whole_box(tensor.shape)
    segments, goals, position = [], [], 0
    for group in range(num_groups):
        for start, span in zip(starts, spans, strict=False):
            share = span // num_groups
            segments.append(_along(full_box, dim, position, share))
            goals.append(_along(full_box, dim, start + group * share, share))
            position += share
    boxes = []
    for index, segment, shared in meetings([box for _, box in tensor.boxes], segments):
        place, box = tensor.boxes[index]
        part = Place(place.name, carried(shared, box, place.chunk))
        boxes.append((part, carried(shared, segments[segment], goals[segment])))
    return Composition(tensor.shape, boxes)


def shapes_of(
    term: Term, numbers: Mapping[str, str], shape: tuple[int, ...], sizes: Mapping[str, int]
) -> tuple[dict[str, tuple[int, ...]], dict[str, int]]:
    """The shapes of the tensors in a term of this shape, and the count of each stack."""
    if isinstance(term, str):
        return {fill(term, numbers): shape}, {}
    if isinstance(term, Grouped):
        return shapes_of(term.term, numbers, shape, sizes)
    if isinstance(term, Padded):
        num_rows, num_stored = _number(term.rows, sizes), sizes.get(term.to, shape[0])
        if shape[0] != num_rows or num_stored < num_rows:
            raise ValueError(
                f"Expected {term.rows} ({num_rows}) rows, and {term.to} to be no less, got {shape[0]} and {num_stored}."
            )
        return {fill(term.name, numbers): _with(shape, 0, num_stored)}, {}
    parts: list[tuple[Term, Mapping[str, str], tuple[int, ...]]]
    counts: dict[str, int] = {}
    if isinstance(term, Stack):
        _check_count(term, shape[0], sizes)
        counts[term.index] = shape[0]
        parts = [(term.term, {**numbers, term.index: str(number)}, shape[1:]) for number in range(shape[0])]
    else:
        spans = _resolve(term.sizes, shape[term.dim], sizes)
        parts = [
            (operand, numbers, _with(shape, term.dim, span)) for operand, span in zip(term.terms, spans, strict=True)
        ]
    shapes: dict[str, tuple[int, ...]] = {}
    for part in parts:
        more_shapes, more_counts = shapes_of(*part, sizes)
        shapes.update(more_shapes)
        counts.update(more_counts)
    return shapes, counts


def _resolve(
    sizes: tuple[Size, ...], total: int, named: Mapping[str, int], *, expected: list[int] | None = None
) -> list[int]:
    """Sizes as numbers, which must add up to `total`, and equal the expected sizes."""
    shares = [size for size in sizes if isinstance(size, int)]
    if shares and total % sum(shares):
        raise ValueError(f"Expected a size that divides into shares of {shares!r}, got {total}.")
    spans = [share * total // sum(shares) for share in shares] or [_number(size, named) for size in sizes]
    if sum(spans) != total or (expected is not None and spans != expected):
        texts = " + ".join(f"{size} ({span})" for size, span in zip(sizes, spans, strict=True))
        raise ValueError(f"Expected {texts} rows or columns, got {expected or total!r}.")
    return spans


def _number(size: Size, named: Mapping[str, int]) -> int:
    if isinstance(size, int):
        return size
    if size not in named:
        raise SizeUnknown(size, named)
    return named[size]


def _with(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _along(box: Chunk, dim: int, offset: int, size: int) -> Chunk:
    return Chunk(_with(box.offsets, dim, offset), _with(box.sizes, dim, size))
