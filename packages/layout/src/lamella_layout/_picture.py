"""Layouts drawn in ASCII: memory from left to right, ranks from top to bottom, one letter per tensor."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from string import ascii_letters

from lamella_layout._arithmetic import ceil_div
from lamella_layout._checks import check_at_least_one, per_tensor
from lamella_layout._even import EvenLayout
from lamella_layout._flat import FlatLayout
from lamella_layout._keep import Rows
from lamella_layout._range import Range

GAP, SLACK, STAGED, MANY = ".", "-", "~", "#"


def picture(
    layout: EvenLayout | FlatLayout, *, names: Sequence[str] | None = None, width: int = 72, max_ranks: int = 16
) -> str:
    """Draw the memory of each rank and the owners of each tensor.

    One column stands for ceil(numel / `width`) elements of the longest row. A column with several tensors shows the
    smallest: a bias beside a matrix stays visible. Columns without any tensor are padding.

    Args:
        layout: The layout to draw.
        names: One per tensor, for the legend. None leaves names out.
        width: Columns of the longest row of memory.
        max_ranks: Largest number of rows of memory; the drawing omits middle ranks beyond `max_ranks`.

    Raises:
        ValueError: `names` does not name every tensor, or `width` or `max_ranks` is below 1.
    """
    check_at_least_one("width", width)
    check_at_least_one("max_ranks", max_ranks)
    named = [""] * layout.num_tensors if names is None else per_tensor("name", names, layout.num_tensors)
    if isinstance(layout, EvenLayout):
        lines = [*_even_memory(layout, width, max_ranks), "", *_even_legend(layout, named)]
    else:
        lines = [*_flat_memory(layout, width, max_ranks), "", *_flat_legend(layout, named)]
    return "\n".join(line.rstrip() for line in lines)


Span = tuple[Range, str]  # elements of a buffer, and their glyph


@dataclass(frozen=True, kw_only=True)
class _Row:
    """One row of memory; elements outside every span are drawn as `blank`."""

    label: str
    numel: int
    spans: list[Span]
    blank: str = GAP

    def draw(self, column_numel: int) -> str:
        columns = [self.blank] * ceil_div(self.numel, column_numel)
        # Slack first, then tensors from large to small: later glyphs overwrite earlier glyphs of the same column.
        for where, glyph in sorted(self.spans, key=lambda span: (span[1] != SLACK, -span[0].numel)):
            if where.numel:
                painted = slice(where.start // column_numel, ceil_div(where.stop, column_numel))
                columns[painted] = glyph * len(columns[painted])
        return "".join(columns)


def _glyph(index: int) -> str:
    return ascii_letters[index] if index < len(ascii_letters) else MANY


def _draw(rows: list[_Row], width: int, num_left_out: int = 0) -> Iterator[str]:
    """Draw rows of memory to one scale; a count of the omitted ranks precedes the last row."""
    column_numel = max(1, *(ceil_div(row.numel, width) for row in rows))
    label_width = max(len(row.label) for row in rows)
    lines = [f"{row.label:<{label_width}} |{row.draw(column_numel)}|" for row in rows]
    if num_left_out:
        lines.insert(-1, f"{'...':<{label_width}} |{num_left_out:,} more")
    return iter([*lines, f"{'':<{label_width}}  one column is {_count(column_numel, 'element')}"])


def _shown_ranks(num_ranks: int, max_ranks: int) -> list[int]:
    """Return the ranks to draw: all, or the first `max_ranks - 1` and the last."""
    return list(range(num_ranks)) if num_ranks <= max_ranks else [*range(max_ranks - 1), num_ranks - 1]


def _flat_memory(layout: FlatLayout, width: int, max_ranks: int) -> Iterator[str]:
    yield (
        f"FlatLayout of {_count(layout.num_tensors, 'tensor')} on {_count(layout.num_shards, 'rank')}, "
        f"{_count(layout.shard_numel, 'element')} each"
    )
    yield ""
    ranks = _shown_ranks(layout.num_shards, max_ranks)
    rows = [_Row(label=f"rank {rank}", numel=layout.shard_numel, spans=_owned_spans(layout, rank)) for rank in ranks]
    yield from _draw(rows, width, layout.num_shards - len(ranks))


def _even_memory(layout: EvenLayout, width: int, max_ranks: int) -> Iterator[str]:
    yield (
        f"EvenLayout of {_count(layout.num_tensors, 'tensor')} on {_count(layout.num_shards, 'rank')}, "
        f"{_count(layout.shard_numel, 'element')} each, {layout.full_numel:,} unsharded"
    )
    yield ""
    ranks = _shown_ranks(layout.num_shards, max_ranks)
    shards = [
        _Row(
            label=f"rank {rank}",
            numel=layout.shard_numel,
            spans=[*_slack_spans(layout.shard_slot, layout), *_owned_spans(layout, rank)],
        )
        for rank in ranks
    ]
    yield from _draw(shards, width, layout.num_shards - len(ranks))
    yield ""
    tensors = _Row(label="unsharded", numel=layout.full_numel, spans=_unsharded_spans(layout))
    sources = _Row(label="from rank", numel=layout.full_numel, spans=_source_spans(layout), blank=" ")
    yield from _draw([tensors, sources], width)


def _owned_spans(layout: EvenLayout | FlatLayout, rank: int) -> list[Span]:
    return [(layout.local_slot(index, rank), _glyph(index)) for index in range(layout.num_tensors)]


def _slack_spans(slot: Callable[[int], Range], layout: EvenLayout) -> list[Span]:
    return [(slot(index), SLACK) for index in range(layout.num_tensors)]


def _unsharded_spans(layout: EvenLayout) -> list[Span]:
    tensors = [
        (Range(0, prod(shape)).shift(layout.full_slot(index).start), _glyph(index))
        for index, shape in enumerate(layout.shapes)
    ]
    return [*_slack_spans(layout.full_slot, layout), *tensors]


def _source_spans(layout: EvenLayout) -> list[Span]:
    """Mark each element of the unsharded buffer with the last digit of the rank that sends it."""
    spans = []
    for index in range(layout.num_tensors):
        if layout.is_contiguous(index):
            pieces = [layout.full_shard(index, rank) for rank in range(layout.num_shards)]
            spans += [(piece, str(rank % 10)) for rank, piece in enumerate(pieces)]
        else:
            spans.append((layout.full_slot(index), STAGED))
    return spans


def _flat_legend(layout: FlatLayout, names: Sequence[str]) -> Iterator[str]:
    keep_texts = [f"rows of {keep.num_rows}" if isinstance(keep, Rows) else "whole" for keep in layout.keep]
    yield from _tensor_legend(layout, names, keep_texts)
    if layout.padding_numel:
        share = layout.padding_numel / layout.full_numel
        yield f"{GAP}  padding: {_count(layout.padding_numel, 'element')}, {share:.1%} of all"


def _even_legend(layout: EvenLayout, names: Sequence[str]) -> Iterator[str]:
    tensors = range(layout.num_tensors)
    yield from _tensor_legend(layout, names, [f"Shard({dim})" for dim in layout.dims])
    if sum(layout.shard_slot(index).numel for index in tensors) < layout.shard_numel:
        yield f"{GAP}  alignment: tensors start at multiples of {layout.alignment:,} elements"
    if any(layout.full_slot(index).numel > prod(layout.shapes[index]) for index in tensors):
        yield f"{SLACK}  slack: a chunk shorter than rank 0's"
    if not all(layout.is_contiguous(index) for index in tensors):
        yield f"{STAGED}  chunks of all ranks in turn: gathered elsewhere, then copied here"


def _tensor_legend(layout: EvenLayout | FlatLayout, names: Sequence[str], kinds: Sequence[str]) -> Iterator[str]:
    """Explain the letters; tensors beyond the alphabet appear as a count."""
    num_listed = min(layout.num_tensors, len(ascii_letters))
    table = [
        (_glyph(index), names[index], repr(layout.shapes[index]), kinds[index], _owners(layout, index))
        for index in range(num_listed)
    ]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for cells in table:
        yield "  ".join(f"{cell:<{size}}" for cell, size in zip(cells, widths, strict=True) if size)
    if num_listed < layout.num_tensors:
        yield f"{MANY}  {layout.num_tensors - num_listed:,} more"


def _owners(layout: EvenLayout | FlatLayout, index: int) -> str:
    ranks = [rank for rank in range(layout.num_shards) if layout.local_slot(index, rank).numel]
    if not ranks:
        return "empty"
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
