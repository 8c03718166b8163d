"""Patterns of hybrid models: the kinds of layers, groups of layers, pipeline stages and multi-token prediction.

    pattern := main ("/" mtp)*
    main    := segment ("|" segment)*              a segment a pipeline stage, or a virtual one
    segment := (symbol | "[" symbol+ "]")*         a group becomes one unit, and one layer of an overlap schedule
    mtp     := symbol+                             the same for each depth

Symbols are megatron-core 0.19's. No release of megatron-core has brackets: `HybridModel` takes `Pattern.flat`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

ATTENTIONS = frozenset("*D+")
EXPERTS, MLP = "E", "-"
SYMBOLS = frozenset("MG" + EXPERTS + MLP) | ATTENTIONS
_BREAK, _DEPTH, _OPEN, _CLOSE = "|/[]"


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """A layer by itself, or a group of layers.

    Attributes:
        symbols: A symbol for each layer.
        first: Physical number of the first layer, from 0, over all segments.
        is_group: Whether the item stands in brackets.
    """

    symbols: str
    first: int
    is_group: bool

    def __str__(self) -> str:
        return f"[{self.symbols}]" if self.is_group else self.symbols

    @property
    def layers(self) -> range:
        """The physical numbers of the item's layers."""
        return range(self.first, self.first + len(self.symbols))


@dataclass(frozen=True, slots=True)
class Pattern:
    """A parsed pattern.

    Attributes:
        segments: The items of each pipeline stage.
        mtp: The layers of one depth of multi-token prediction; "" without.
        num_depths: Depths of multi-token prediction.
    """

    segments: tuple[tuple[LayerGroup, ...], ...]
    mtp: str = ""
    num_depths: int = 0

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The items of all segments. The place of an item is its logical number."""
        return tuple(group for segment in self.segments for group in segment)

    @property
    def symbols(self) -> str:
        """A symbol for each physical layer, without multi-token prediction's."""
        return "".join(group.symbols for group in self.groups)

    @property
    def flat(self) -> str:
        """The pattern without brackets."""
        main = _BREAK.join("".join(group.symbols for group in segment) for segment in self.segments)
        return _DEPTH.join([main, *[self.mtp] * self.num_depths])


def parse_pattern(text: str) -> Pattern:
    """Parse a pattern.

    Args:
        text: With or without brackets.

    Raises:
        ValueError: The place and the character are in the message: an unknown symbol, a bracket without its other half,
            brackets in brackets or around nothing, a stage's end in brackets, experts before the end of a group,
            brackets or stages in multi-token prediction; or depths that differ, or kinds of attention that
            megatron-core does not mix.
    """
    main, *depths = text.split(_DEPTH)
    segments: list[tuple[LayerGroup, ...]] = []
    first = start = 0
    for segment in main.split(_BREAK):
        groups = tuple(_groups(text, start, segment, first))
        segments.append(groups)
        first += sum(len(group.symbols) for group in groups)
        start += len(segment) + 1
    start = len(main) + 1
    if not any(depths):
        depths = []  # a separator alone is megatron-core's way to say none
    for depth in depths:
        for at, symbol in enumerate(depth, start):
            if symbol not in SYMBOLS:
                raise _error(text, at, "a layer: multi-token prediction has neither groups nor stages")
        if depth != depths[0] or not depth:
            raise _error(text, start, f"the layers of the first depth again ({depths[0]!r}), or no depth at all")
        start += len(depth) + 1
    pattern = Pattern(tuple(segments), depths[0] if depths else "", len(depths))
    _check_attention(text, pattern)
    return pattern


def _groups(text: str, start: int, segment: str, first: int) -> Iterator[LayerGroup]:
    """The items of a segment, which begins at `start` in the text."""
    opened: int | None = None
    for at, symbol in enumerate(segment, start):
        if symbol == _OPEN:
            if opened is not None:
                raise _error(text, at, "a layer or ']': groups do not contain groups")
            opened = at
        elif symbol == _CLOSE:
            if opened is None:
                raise _error(text, at, "a layer or '[': no group is open")
            symbols = text[opened + 1 : at]
            if not symbols:
                raise _error(text, at, "a layer in the group")
            if EXPERTS in symbols[:-1]:
                place = opened + 1 + symbols.index(EXPERTS)
                raise _error(text, place, "experts at the end of their group, whose tokens leave the rank once")
            yield LayerGroup(symbols, first, is_group=True)
            first, opened = first + len(symbols), None
        elif symbol not in SYMBOLS:
            raise _error(text, at, f"one of {sorted(SYMBOLS)}, '[', ']', '|' or '/'")
        elif opened is None:
            yield LayerGroup(symbol, first, is_group=False)
            first += 1
    if opened is not None:
        raise _error(text, start + len(segment), "']' within the stage: a group lies in one stage")


def _check_attention(text: str, pattern: Pattern) -> None:
    for start, layers in ((0, pattern.symbols), (text.find(_DEPTH), pattern.mtp)):
        if "*" in layers and (other_kinds := ATTENTIONS & set(layers) - {"*"}):
            at = min(text.index(other, start) for other in other_kinds)
            raise _error(text, at, "no other kind of attention beside '*', which megatron-core does not mix")


def _error(text: str, at: int, expected: str) -> ValueError:
    symbol = repr(text[at]) if at < len(text) else "the end"
    return ValueError(f"Expected {expected}, got {symbol} at position {at} of the pattern {text!r}.")
