"""Orders and timelines as text, and timelines as an SVG picture."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Final

from lamella_schedule._events import Event, Kind, Lane, ResidenceEvent, Slot
from lamella_schedule._order import AnyEvent
from lamella_schedule._simulate import Span, Timeline

_SHORT: Final = {Kind.FORWARD: "fwd", Kind.BACKWARD: "bwd", Kind.WEIGHT_GRADIENT: "wgrad"}
_COLORS: Final = {Kind.FORWARD: "#4c8bb8", Kind.BACKWARD: "#c9713c", Kind.WEIGHT_GRADIENT: "#8a9a3b"}
_LETTERS: Final = {
    Slot.PREPROCESS: "i",
    Slot.PRE: "p",
    Slot.DISPATCH: "d",
    Slot.EXPERTS: "e",
    Slot.COMBINE: "c",
    Slot.POST: "t",
    Slot.POSTPROCESS: "o",
}
_ROW, _LABEL, _BAR = 34, 130, 26


def table(events: Iterable[AnyEvent]) -> str:
    """Draw an order: a line for each event from the host's first to its last, a column for each lane.

    A name is the microbatch, the layer behind a dot, the slot and the kind. Residence has a column of its own if the
    order has any.
    """
    rows = [_cells(event) for event in events]
    heads = ["compute", "communication", "residence"]
    columns = [place for place in range(3) if place < 2 or any(row[2] for row in rows)]
    widths = [max([len(heads[place]), *(len(row[place]) for row in rows)]) for place in columns]
    lines = [[heads[place] for place in columns], *([row[place] for place in columns] for row in rows)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def exposures(measured: Timeline, predicted: Timeline) -> str:
    """Draw the exposed communication of two timelines of one order: a line for each layer, slot and kind.

    Times are sums over the microbatches, in the timelines' units. The last line has the sum of the lines above.
    """
    one, other = measured.exposed_by, predicted.exposed_by
    times_by_row = {
        (f"layer {layer}", slot, _SHORT[kind]): (one.get(key, 0.0), other.get(key, 0.0))
        for key in sorted({*one, *other}, key=lambda key: (key[0] or 0, list(Slot).index(key[1]), key[2] != "forward"))
        for layer, slot, kind in [key]
    }
    rows = [f"{'exposed':24} measured predicted"]
    rows += [f"{' '.join(key):24} {pair[0]:8.2f} {pair[1]:9.2f}" for key, pair in times_by_row.items()]
    return "\n".join([*rows, f"{'all':24} {sum(one.values()):8.2f} {sum(other.values()):9.2f}"])


def bars(timeline: Timeline, width: int = 100) -> str:
    """Draw a timeline: a line for each lane, on which a letter of the slot stands for its share of the time.

    The letters are i (preprocess), p (pre), d (dispatch), e (experts), c (combine), t (post) and o (postprocess), large
    in forward, small in backward, and `'` for a delayed weight gradient. A span of less than a column may be missing.

    Args:
        timeline: Simulated or measured.
        width: Number of columns for the whole time.

    Raises:
        ValueError: `width` is below 1.
    """
    if width < 1:
        raise ValueError(f"Expected width to be a number of columns, got {width}. Give 1 or more.")
    begin, scale = _scale(timeline, width)
    lines = []
    for lane in Lane:
        cells = [" "] * width
        for span in timeline.spans:
            if span.event.lane is lane:
                start, stop = (round((at - begin) * scale) for at in (span.start, span.stop))
                cells[start:stop] = _letter(span.event) * (stop - start)
        lines.append(f"{lane.ljust(13)} |{''.join(cells)}|")
    return "\n".join([*lines, f"total {timeline.total:g}, exposed communication {timeline.exposed:g}"])


def svg(timeline: Timeline, width: int = 1200) -> str:
    """Draw a timeline as an SVG picture, to be written to a file: a row for each lane, a bar for each span.

    Args:
        timeline: Simulated or measured.
        width: Pixels for the whole time.
    """
    begin, scale = _scale(timeline, width)
    height = _ROW * len(Lane) + 30
    size = f'width="{width + _LABEL}" height="{height}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">']
    for row, lane in enumerate(Lane):
        parts.append(f'<text x="4" y="{_ROW * row + 18}">{lane}</text>')
        parts += [_bar(span, begin, scale, row) for span in timeline.spans if span.event.lane is lane]
    note = f"total {timeline.total:g}, exposed communication {timeline.exposed:g}"
    parts += [f'<text x="{_LABEL}" y="{height - 8}">{note}</text>', "</svg>"]
    return "\n".join(parts) + "\n"


def _bar(span: Span, begin: float, scale: float, row: int) -> str:
    x, width = _LABEL + (span.start - begin) * scale, (span.stop - span.start) * scale
    name = escape(_name(span.event))
    shade = "1" if span.event.microbatch % 2 else "0.65"  # neighbours in the pipeline are told apart
    bar = (
        f'<rect x="{x:.1f}" y="{_ROW * row}" width="{width:.1f}" height="{_BAR}" fill="{_COLORS[span.event.kind]}" '
        f'fill-opacity="{shade}" stroke="white"><title>{name}: {span.start:g} to {span.stop:g}</title></rect>'
    )
    if width < 7 * len(name):
        return bar
    return bar + f'<text x="{x + 3:.1f}" y="{_ROW * row + 17}" fill="white">{name}</text>'


def _scale(timeline: Timeline, width: int) -> tuple[float, float]:
    begin = min((span.start for span in timeline.spans), default=0.0)
    return begin, width / timeline.total if timeline.total else 0.0


def _cells(event: AnyEvent) -> tuple[str, str, str]:
    if isinstance(event, ResidenceEvent):
        layer = "" if event.layer is None else f".{event.layer}"
        return "", "", f"{event.microbatch}{layer} {event.phase} {event.action}"
    name = _name(event)
    return (name, "", "") if event.lane is Lane.COMPUTE else ("", name, "")


def _name(event: Event) -> str:
    layer = "" if event.layer is None else f".{event.layer}"
    return f"{event.microbatch}{layer} {event.slot} {_SHORT[event.kind]}"


def _letter(event: Event) -> str:
    if event.kind is Kind.WEIGHT_GRADIENT:
        return "'"
    letter = _LETTERS[event.slot]
    return letter.upper() if event.kind is Kind.FORWARD else letter
