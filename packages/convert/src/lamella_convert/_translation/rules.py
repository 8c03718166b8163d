"""A family's names and cuts of tensors on two sides, as a table.

Note [Two compositions of one whole]
    A rule has a term on each side, and both terms compose the same tensor. A name is a tensor
    stored unchanged. `Join` concatenates terms along a dim, `Stack` puts numbered terms on a new first
    dim, and `Grouped` is a tensor stored in groups, each with a share of every part: heads' queries, keys and values
    side by side, or tensor-parallel ranks' parts. The common boxes of the two compositions are the
    correspondence, so every rule reads from left to right and back:

        Rule(
            Join(("{layer}.q", "{layer}.k", "{layer}.v"), sizes=("q", "kv", "kv")),
            Grouped("{layer}.linear_qkv.weight", groups="num_groups", sizes=("q", "kv", "kv")),
        )

Note [Once for all layers]
    The result of a rule depends on the shapes of tensors, not on the numbers in the names. So the result is computed
    once for all layers and experts of the same shapes, under templates of the names, and the numbers are filled in.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, product
from typing import NamedTuple, TypeAlias

from lamella_convert._errors import SizeUnknown
from lamella_convert._translation.templates import Names, captures_of, fill
from lamella_files import Correspondence, Piece, Place, Side, carried, meetings, whole_box
from lamella_layout import Chunk

Size: TypeAlias = "int | str"
"""A size from the configuration, by name; or, as a number, a share of the whole."""


@dataclass(frozen=True)
class Join:
    """Terms concatenated along a dim.

    Attributes:
        terms: The terms to join.
        sizes: The sizes of each term along the dim: all by name, or all as shares ((1, 1) is halves).
        dim: The dim of the terms.
    """

    terms: "tuple[Term, ...]"
    sizes: tuple[Size, ...]
    dim: int = 0

    def __post_init__(self) -> None:
        _check_sizes(self.sizes)
        if len(self.sizes) != len(self.terms):
            raise ValueError(f"Expected a size for each of {len(self.terms)} terms, got {self.sizes!r}.")


@dataclass(frozen=True)
class Stack:
    """Terms with the numbers 0, 1, ... for `index` in their names, on a new dim 0."""

    term: "Term"
    index: str


@dataclass(frozen=True)
class Grouped:
    """A tensor stored as groups along a dim, one after another, each with a share of every part.

    The whole is the parts, one after another. With one group, stored tensor and whole are equal.

    Attributes:
        term: The stored term.
        groups: Number of groups, or the name of this size: `"tp"` for tensor-parallel ranks' parts.
        sizes: The sizes of the parts, all groups together: all by name, or all as shares.
        dim: The dim of groups and parts.
    """

    term: "Term"
    groups: Size
    sizes: tuple[Size, ...]
    dim: int = 0

    def __post_init__(self) -> None:
        _check_sizes(self.sizes)


@dataclass(frozen=True)
class Padded:
    """A tensor stored with padding rows behind the whole's rows: a vocabulary padded for division among ranks.

    Attributes:
        name: The name of the tensor.
        rows: The whole's number of rows, by name.
        to: The name of the padded number of rows. Without this size, there is no padding.
    """

    name: str
    rows: str
    to: str


Term: TypeAlias = "str | Join | Stack | Grouped | Padded"
"""A name is a template, as of `templates`: `{layer}` is a number, `{rest*}` any text, a leading `**.` any names."""


@dataclass(frozen=True)
class Rule:
    """Two compositions of one tensor: Note [Two compositions of one whole].

    Attributes:
        left: The left composition.
        right: The right composition. Both have the same numbers in their names, except for stacked numbers.
        shift: Added from left to right.
        left_beside: If given, the rule holds on the left only beside this name with the same numbers:
            distinguishes kinds of layers with equal names for a tensor.
        right_beside: If given, the rule holds on the right only beside this name.
    """

    left: Term
    right: Term
    shift: float = field(default=0.0, kw_only=True)
    left_beside: str | None = field(default=None, kw_only=True)
    right_beside: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        captures = {frozenset(captures_of(leaf.template)) - {*leaf.indices} for leaf in _leaves(self)}
        if len(captures) != 1:
            raise ValueError(f"Expected the same numbers in all names of a rule, got {self!r}.")


@dataclass(frozen=True)
class Rules:
    """A family's table, and the sizes for its rules.

    Attributes:
        rules: The first rule that fits takes the names.
        sizes: By name: of a model's configuration, and of its parallelism ("tp"). Needed only where a rule with
            the size applies, and not for a `Join` whose terms show the size.
    """

    rules: tuple[Rule, ...]
    sizes: Mapping[str, int] = field(default_factory=dict)

    def match(self, shapes: Mapping[str, tuple[int, ...]], side: Side = "left") -> list[Correspondence]:
        """The correspondences of one side's tensors with the other side's.

        Args:
            shapes: By name. A rule with an absent name does not apply; names without a rule are in no
                correspondence (`translate` lists them).
            side: The side of the names.

        Raises:
            ValueError: A needed size is unknown or does not fit, or numbers are missing in a stack.
        """
        names = Names(shapes)
        matched_names: set[str] = set()
        correspondences = []
        for rule in self.rules:
            near_term, far_term, excluded_term = (
                (rule.left, rule.right, rule.left_beside)
                if side == "left"
                else (rule.right, rule.left, rule.right_beside)
            )
            cache: dict[_Shapes, Correspondence] = {}
            for instance in _instances(near_term, excluded_term, names, matched_names):
                matched_names.update(instance.names.values())
                named_shapes = tuple((template, tuple(shapes[name])) for template, name in instance.names.items())
                if named_shapes not in cache:  # Note [Once for all layers]
                    cache[named_shapes] = _correspondence(
                        near_term, far_term, instance, dict(named_shapes), self.sizes, rule.shift, side
                    )
                filled = partial(fill, captures=instance.captures)
                correspondences.append(cache[named_shapes].renamed(filled, filled))
        return correspondences


class _TermLeaf(NamedTuple):
    """A name in a term, and the numbers in the name stacked by the term."""

    template: str
    indices: tuple[str, ...]

    def numbers(self, index: tuple[int, ...]) -> dict[str, str]:
        """The stacked numbers, by their names in the template."""
        return {name: str(number) for name, number in zip(self.indices, index, strict=True)}


_Shapes = tuple[tuple[str, tuple[int, ...]], ...]
"""Shapes by template, with only the stacked numbers filled in."""


class _Instance(NamedTuple):
    """One set of names for a term: the numbers in the names, the count of each stack, the names by template."""

    captures: dict[str, str]
    counts: dict[str, int]
    names: dict[str, str]

    @property
    def example(self) -> str:
        """One of the names, for messages."""
        return next(iter(self.names.values()))


class _Made(NamedTuple):
    """A composed term: the whole's shape, and pairs of a stored box and the equal box of the whole."""

    shape: tuple[int, ...]
    boxes: list[tuple[Place, Chunk]]


def _leaves(rule: Rule) -> list[_TermLeaf]:
    return [*_leaves_of(rule.left), *_leaves_of(rule.right)]


def _leaves_of(term: Term) -> list[_TermLeaf]:
    if isinstance(term, str | Padded):
        return [_TermLeaf(term if isinstance(term, str) else term.name, ())]
    if isinstance(term, Join):
        return [leaf for operand in term.terms for leaf in _leaves_of(operand)]
    if isinstance(term, Stack):
        return [_TermLeaf(leaf.template, (term.index, *leaf.indices)) for leaf in _leaves_of(term.term)]
    return _leaves_of(term.term)


def _instances(term: Term, excluded_term: str | None, names: Names, matched_names: set[str]) -> Iterator[_Instance]:
    """The complete sets of names for `term`."""
    leaves = _leaves_of(term)
    excluded_keys = (
        None if excluded_term is None else {_key(match.groupdict()) for match in names.matches(excluded_term)}
    )
    names_by_key: dict[frozenset[tuple[str, str]], list[dict[tuple[int, ...], str]]] = {}
    for position, leaf in enumerate(leaves):
        for match in names.matches(leaf.template):
            if match.string not in matched_names:
                captures = match.groupdict()
                index = tuple(int(captures.pop(name)) for name in leaf.indices)
                names_by_leaf = names_by_key.setdefault(_key(captures), [{} for _ in leaves])
                names_by_leaf[position][index] = match.string
    for key, by_leaf in names_by_key.items():
        if all(by_leaf) and (excluded_keys is None or key in excluded_keys):
            captures = dict(key)
            names_by_template = {
                fill(leaf.template, leaf.numbers(index)) if index else leaf.template: name
                for leaf, leaf_names in zip(leaves, by_leaf, strict=True)
                for index, name in leaf_names.items()
            }
            yield _Instance(captures, _counts(leaves, by_leaf, captures), names_by_template)


def _counts(
    leaves: list[_TermLeaf], by_leaf: list[dict[tuple[int, ...], str]], captures: Mapping[str, str]
) -> dict[str, int]:
    """The count of each stack; numbers must go from 0 on without a gap."""
    counts: dict[str, int] = {}
    for leaf, leaf_names in zip(leaves, by_leaf, strict=True):
        for position, name in enumerate(leaf.indices):
            counts[name] = max(counts.get(name, 0), 1 + max(index[position] for index in leaf_names))
    for leaf, leaf_names in zip(leaves, by_leaf, strict=True):
        for index in product(*(range(counts[name]) for name in leaf.indices)):
            if index not in leaf_names:
                missing = fill(leaf.template, {**captures, **leaf.numbers(index)})
                raise ValueError(f"Expected {counts!r} stacked tensors, got no {missing!r}.")
    return counts


def _correspondence(
    near_term: Term,
    far_term: Term,
    instance: _Instance,
    named_shapes: Mapping[str, tuple[int, ...]],
    sizes: Mapping[str, int],
    shift: float,
    side: Side,
) -> Correspondence:
    """The correspondence of tensors of known shapes, under templates: Note [Once for all layers]."""
    if isinstance(near_term, str) and isinstance(far_term, str):
        left_term, right = (near_term, far_term) if side == "left" else (far_term, near_term)
        return Correspondence.rename(left_term, right, named_shapes[near_term], shift=shift)
    sizes = dict(sizes)  # A copy: sizes shown by `near` are added, and `far` may need them.
    try:
        near_tensor = _make(near_term, {}, instance.counts, named_shapes, sizes)
        derived, counts = _shapes_of(far_term, {}, near_tensor.shape, sizes)
        other = _make(far_term, {}, counts, derived, sizes)
    except SizeUnknown as error:
        raise SizeUnknown(error.size, error.known, instance.example) from None
    except ValueError as error:
        raise ValueError(f"{error} Needed for {instance.example!r}.") from error
    correspondence = Correspondence(
        left=named_shapes,
        right=derived,
        pieces=tuple(_pieces(near_tensor, other)),
        shift=shift if side == "left" else -shift,
        padded={
            padded_term.name: sizes[padded_term.rows]
            for padded_term in (near_term, far_term)
            if isinstance(padded_term, Padded)
        },
    )
    return correspondence if side == "left" else correspondence.inverse


def _pieces(left_tensor: _Made, right: _Made) -> Iterator[Piece]:
    """The pieces common to two compositions of one whole."""
    left_boxes, right_boxes = [box for _, box in left_tensor.boxes], [box for _, box in right.boxes]
    for mine, theirs, shared in meetings(left_boxes, right_boxes):
        places = (
            Place(place.name, carried(shared, box, place.chunk))
            for place, box in (left_tensor.boxes[mine], right.boxes[theirs])
        )
        yield Piece(*places)


def _make(
    term: Term,
    numbers: Mapping[str, str],
    counts: Mapping[str, int],
    shapes: Mapping[str, tuple[int, ...]],
    sizes: dict[str, int],
) -> _Made:
    """Compose a term from tensors of known shapes."""
    if isinstance(term, str):
        name = fill(term, numbers)
        full_box = whole_box(shapes[name])
        return _Made(shapes[name], [(Place(name, full_box), full_box)])
    if isinstance(term, Join):
        tensors = [_make(operand, numbers, counts, shapes, sizes) for operand in term.terms]
        return _joined(tensors, term, sizes)
    if isinstance(term, Stack):
        tensors = [
            _make(term.term, {**numbers, term.index: str(number)}, counts, shapes, sizes)
            for number in range(counts[term.index])
        ]
        return _stacked(tensors)
    if isinstance(term, Padded):
        return _cut_off(_make(term.name, numbers, counts, shapes, sizes), term, sizes)
    return _ungrouped(_make(term.term, numbers, counts, shapes, sizes), term, sizes)


def _joined(tensors: list[_Made], term: Join, sizes: dict[str, int]) -> _Made:
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
    return _Made(_with(tensors[0].shape, dim, sum(spans)), boxes)


def _stacked(tensors: list[_Made]) -> _Made:
    shapes = {tensor.shape for tensor in tensors}
    if len(shapes) != 1:
        raise ValueError(f"Expected tensors of one shape to stack, got {sorted(shapes)!r}.")
    boxes = [
        (place, Chunk((number, *box.offsets), (1, *box.sizes)))
        for number, tensor in enumerate(tensors)
        for place, box in tensor.boxes
    ]
    return _Made((len(tensors), *shapes.pop()), boxes)


def _cut_off(tensor: _Made, term: Padded, sizes: Mapping[str, int]) -> _Made:
    num_rows = _number(term.rows, sizes)
    if tensor.shape[0] < num_rows:
        raise ValueError(f"Expected {term.rows} ({num_rows}) rows or more, got {tensor.shape[0]}.")
    ((place, full_box),) = tensor.boxes
    rows = _along(full_box, 0, 0, num_rows)
    return _Made(rows.sizes, [(Place(place.name, rows), rows)])


def _ungrouped(tensor: _Made, term: Grouped, sizes: Mapping[str, int]) -> _Made:
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
    return _Made(tensor.shape, boxes)


def _shapes_of(
    term: Term, numbers: Mapping[str, str], shape: tuple[int, ...], sizes: Mapping[str, int]
) -> tuple[dict[str, tuple[int, ...]], dict[str, int]]:
    """The shapes of the tensors in a term of this shape, and the count of each stack."""
    if isinstance(term, str):
        return {fill(term, numbers): shape}, {}
    if isinstance(term, Grouped):
        return _shapes_of(term.term, numbers, shape, sizes)
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
        counts[term.index] = shape[0]
        parts = [(term.term, {**numbers, term.index: str(number)}, shape[1:]) for number in range(shape[0])]
    else:
        spans = _resolve(term.sizes, shape[term.dim], sizes)
        parts = [
            (operand, numbers, _with(shape, term.dim, span)) for operand, span in zip(term.terms, spans, strict=True)
        ]
    shapes: dict[str, tuple[int, ...]] = {}
    for part in parts:
        more_shapes, more_counts = _shapes_of(*part, sizes)
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


def _check_sizes(sizes: tuple[Size, ...]) -> None:
    if len({type(size) for size in sizes}) != 1:
        raise ValueError(f"Expected sizes that are all names or all shares, got {sizes!r}.")


def _with(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _along(box: Chunk, dim: int, offset: int, size: int) -> Chunk:
    return Chunk(_with(box.offsets, dim, offset), _with(box.sizes, dim, size))


def _key(captures: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    return frozenset(captures.items())
