"""A family's names and cuts of tensors on two sides, as a table.

Note [Once for all layers]
    The result of a rule depends on the shapes of tensors, not on the numbers in the names. So the result is computed
    once for all layers and experts of the same shapes, under templates of the names, and the numbers are filled in.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import NamedTuple

from lamella_convert._errors import SizeUnknown
from lamella_convert._translation.composition import Composition, compose, shapes_of
from lamella_convert._translation.templates import Names, captures_of, fill
from lamella_convert._translation.terms import Padded, Term, TermLeaf, leaves_of
from lamella_files import Correspondence, Piece, Place, Side, Source, carried, is_of_model, meetings, own_name


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
        numbered: By template of a prefix on the left, how many numbers a whole model has: 48 for
            "model.layers.{layer}.".
        stacked: By the `count` of a `Stack`, how many terms a whole model has: 128 for "experts". A stack whose count
            is not there takes all terms.
    """

    rules: tuple[Rule, ...]
    sizes: Mapping[str, int] = field(default_factory=dict)
    numbered: Mapping[str, int] = field(default_factory=dict)
    stacked: Mapping[str, int] = field(default_factory=dict)

    def match(self, shapes: Mapping[str, tuple[int, ...]], side: Side = "left") -> list[Correspondence]:
        """The correspondences of one side's tensors with the other side's.

        Args:
            shapes: By name. A rule with an absent name does not apply; names without a rule are in no
                correspondence (`translate` lists them).
            side: The side of the names.

        Raises:
            ValueError: A needed size is unknown or does not fit, or numbers are missing in a stack.
        """
        names, sizes = Names(shapes), {**self.sizes, **self.stacked}
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
                        near_term, far_term, instance, dict(named_shapes), sizes, rule.shift, side
                    )
                filled = partial(fill, captures=instance.captures)
                correspondences.append(cache[named_shapes].renamed(filled, filled))
        return correspondences

    def check_complete(self, names: Iterable[str], left_over: Iterable[str], side: Side) -> None:
        """Refuse tensors that a rule composes with absent tensors.

        Args:
            names: The names of all tensors of the side.
            left_over: The names in no correspondence.
            side: The side of the names.

        Raises:
            ValueError: A rule names one of the left-over names, and lacks another name.
        """
        present, unmatched = frozenset(names), Names(left_over)
        for rule in self.rules:
            term, beside = (rule.left, rule.left_beside) if side == "left" else (rule.right, rule.right_beside)
            templates = [*(leaf.template for leaf in leaves_of(term)), *([] if beside is None else [beside])]
            for match in (match for leaf in leaves_of(term) for match in unmatched.matches(leaf.template)):
                needed = [fill(template, match.groupdict()) for template in templates]
                if absent := [name for name in needed if name not in present]:
                    raise ValueError(
                        f"Expected {absent[0]!r} beside {match.string!r}, as the model has them, got none. The "
                        f"checkpoint is not whole, or is another model's."
                    )

    def check_numbers(self, names: Iterable[str]) -> None:
        """Refuse names of the left side that lack one of the model's layers, say, and have others.

        Raises:
            ValueError: A number of a prefix in `numbered` is missing.
        """
        all_names = Names(names)
        for prefix, count in self.numbered.items():
            [index] = captures_of(prefix)
            numbers = {int(match[index]) for match in all_names.matches(f"{prefix}{{rest*}}")}
            missing = next((number for number in range(count) if number not in numbers), None)
            if numbers and missing is not None:
                raise ValueError(
                    f"Expected tensors of {count} {index}s, as the model's configuration has it, got none of "
                    f"{fill(prefix, {index: str(missing)})!r}. The checkpoint is not whole, or is another model's."
                )


def parameter_shapes(source: Source) -> dict[str, tuple[int, ...]]:
    """The shapes of the model's tensors by parameter name: the argument of `Rules.match`.

    Empty for a checkpoint of an optimizer alone.
    """
    return {own_name(name): tuple(info.shape) for name, info in source.tensors.items() if is_of_model(name)}


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


def _leaves(rule: Rule) -> list[TermLeaf]:
    return [*leaves_of(rule.left), *leaves_of(rule.right)]


def _instances(term: Term, excluded_term: str | None, names: Names, matched_names: set[str]) -> Iterator[_Instance]:
    """The complete sets of names for `term`."""
    leaves = leaves_of(term)
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
    leaves: list[TermLeaf], by_leaf: list[dict[tuple[int, ...], str]], captures: Mapping[str, str]
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
        near_tensor = compose(near_term, {}, instance.counts, named_shapes, sizes)
        derived, counts = shapes_of(far_term, {}, near_tensor.shape, sizes)
        other = compose(far_term, {}, counts, derived, sizes)
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


def _pieces(left_tensor: Composition, right: Composition) -> Iterator[Piece]:
    """The pieces common to two compositions of one whole."""
    left_boxes, right_boxes = [box for _, box in left_tensor.boxes], [box for _, box in right.boxes]
    for mine, theirs, shared in meetings(left_boxes, right_boxes):
        places = (
            Place(place.name, carried(shared, box, place.chunk))
            for place, box in (left_tensor.boxes[mine], right.boxes[theirs])
        )
        yield Piece(*places)


def _key(captures: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    return frozenset(captures.items())
