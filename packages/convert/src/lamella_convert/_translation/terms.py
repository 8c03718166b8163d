"""The terms of rules: compositions of a tensor out of stored tensors, written as data.

Note [Two compositions of one whole]
    A rule has a term on each side, and both terms compose the same tensor. A name is a tensor stored unchanged. `Join`
    concatenates terms along a dim, `Stack` puts numbered terms on a new first dim, and `Grouped` is a tensor stored in
    groups, each with a share of every part: heads' queries, keys and values side by side, or tensor-parallel ranks'
    parts. The common boxes of the two compositions are the correspondence, so every rule reads from left to right and
    back:

        Rule(
            Join(("{layer}.q", "{layer}.k", "{layer}.v"), sizes=("q", "kv", "kv")),
            Grouped("{layer}.linear_qkv.weight", groups="num_groups", sizes=("q", "kv", "kv")),
        )
"""

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

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
    """Terms with the numbers 0, 1, ... for `index` in their names, on a new dim 0.

    Attributes:
        term: The term to stack.
        index: The number in the names.
        count: The name of the number of terms in `Rules.stacked`. None: as many as the checkpoint has.
    """

    term: "Term"
    index: str
    count: str | None = None


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


class TermLeaf(NamedTuple):
    """A name in a term, and the numbers in the name stacked by the term."""

    template: str
    indices: tuple[str, ...]

    def numbers(self, index: tuple[int, ...]) -> dict[str, str]:
        """The stacked numbers, by their names in the template."""
        return {name: str(number) for name, number in zip(self.indices, index, strict=True)}


def leaves_of(term: Term) -> list[TermLeaf]:
    if isinstance(term, str | Padded):
        return [TermLeaf(term if isinstance(term, str) else term.name, ())]
    if isinstance(term, Join):
        return [leaf for operand in term.terms for leaf in leaves_of(operand)]
    if isinstance(term, Stack):
        return [TermLeaf(leaf.template, (term.index, *leaf.indices)) for leaf in leaves_of(term.term)]
    return leaves_of(term.term)


def _check_sizes(sizes: tuple[Size, ...]) -> None:
    if len({type(size) for size in sizes}) != 1:
        raise ValueError(f"Expected sizes that are all names or all shares, got {sizes!r}.")
