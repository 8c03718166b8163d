"""Orders and timelines as text, and timelines as an SVG picture."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Final

from lamella_schedule._events import Action, Kind, Lane, ResidenceEvent, Slot
from lamella_schedule._passes import PassKind, PipelineEvent, StagePass, TransferEvent, WorkEvent
from lamella_schedule._timeline import PipelineTimeline, Span, Timeline

_SHORT: Final = {Kind.FORWARD: "fwd", Kind.BACKWARD: "bwd", Kind.WEIGHT_GRADIENT: "wgrad"}
_COLORS: Final = {
    Kind.FORWARD: "#4c8bb8",
    Kind.BACKWARD: "#c9713c",
    Kind.WEIGHT_GRADIENT: "#8a9a3b",
    PassKind.FORWARD: "#4c8bb8",
    PassKind.BACKWARD: "#c9713c",
    PassKind.INPUT_GRADIENT: "#d99a6c",
    PassKind.WEIGHT_GRADIENT: "#8a9a3b",
}
_OF_NO_WORK: Final = "#888888"  # gathers, reductions, messages
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


def table(events: Iterable[PipelineEvent]) -> str:
    """Draw an order: a line for each event from the host's first to its last, a column for each lane.

    A name is the microbatch, the layer behind a dot, the slot and the kind; a stage stands before them if the order has
    several. A pass in one piece is `2F0`. Residence and messages have columns of their own if the order has any.
    """
    rows = [_cells(event) for event in events]
    heads = ["compute", "communication", "residence", "messages"]
    columns = [place for place in range(4) if place < 2 or any(row[place] for row in rows)]
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


def bars(timeline: Timeline | PipelineTimeline, width: int = 100) -> str:
    """Draw a timeline: a line for each lane, on which a letter of the slot stands for its share of the time.

    The letters are i (preprocess), p (pre), d (dispatch), e (experts), c (combine), t (post) and o (postprocess), large
    in forward, small in backward, and `'` for a delayed weight gradient. A pass in one piece is as much of its name, as
    `2F0`, as fits, and dashes. Gathers are g, reductions r, messages s. A span of less than a column may be missing.

    Args:
        timeline: Simulated or measured; of a pipeline, each rank's lanes below the other's.
        width: Number of columns for the whole time.

    Raises:
        ValueError: `width` is below 1.
    """
    if width < 1:
        raise ValueError(f"Expected width to be a number of columns, got {width}. Give 1 or more.")
    begin, scale = _scale(timeline, width)
    rows = _rows(timeline)
    label_width = max([13, *(len(label) for label, _ in rows)])
    lines = []
    for label, spans in rows:
        cells = [" "] * width
        for span in spans:
            start, stop = round((span.start - begin) * scale), round((span.stop - begin) * scale)
            cells[start:stop] = _letters(span.event, stop - start)
        lines.append(f"{label:{label_width}} |{''.join(cells)}|")
    return "\n".join([*lines, _note(timeline)])


def svg(timeline: Timeline | PipelineTimeline, width: int = 1200) -> str:
    """Draw a timeline as an SVG picture, to be written to a file: a row for each lane, a bar for each span.

    Args:
        timeline: Simulated or measured; of a pipeline, each rank's lanes below the other's.
        width: Pixels for the whole time.
    """
    begin, scale = _scale(timeline, width)
    rows = _rows(timeline)
    height = _ROW * len(rows) + 30
    size = f'width="{width + _LABEL}" height="{height}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">']
    for row, (label, spans) in enumerate(rows):
        parts.append(f'<text x="4" y="{_ROW * row + 18}">{label}</text>')
        parts += [_bar(span, begin, scale, row) for span in spans]
    parts += [f'<text x="{_LABEL}" y="{height - 8}">{_note(timeline)}</text>', "</svg>"]
    return "\n".join(parts) + "\n"


def _rows(timeline: Timeline | PipelineTimeline) -> list[tuple[str, list[Span]]]:
    """The spans of each lane, with a label. Lanes of a pipeline without spans have no row."""
    if isinstance(timeline, Timeline):
        return [(str(lane), [span for span in timeline.spans if span.lane is lane]) for lane in timeline.lanes]
    rows = [
        (f"rank {rank} {label}", spans)
        for rank, rank_timeline in enumerate(timeline.ranks)
        for label, spans in _rows(rank_timeline)
    ]
    return [(label, spans) for label, spans in rows if spans]


def _note(timeline: Timeline | PipelineTimeline) -> str:
    if isinstance(timeline, Timeline):
        return f"total {timeline.total:g}, exposed communication {timeline.exposed:g}"
    return f"total {timeline.total:g}, bubble {timeline.bubble:.1%}"


def _bar(span: Span, begin: float, scale: float, row: int) -> str:
    x, width = _LABEL + (span.start - begin) * scale, (span.stop - span.start) * scale
    name = escape(_name(span.event))
    shade = "1" if span.event.microbatch % 2 else "0.65"  # neighbours in the pipeline are told apart
    bar = (
        f'<rect x="{x:.1f}" y="{_ROW * row}" width="{width:.1f}" height="{_BAR}" fill="{_color(span.event)}" '
        f'fill-opacity="{shade}" stroke="white"><title>{name}: {span.start:g} to {span.stop:g}</title></rect>'
    )
    if width < 7 * len(name):
        return bar
    return bar + f'<text x="{x + 3:.1f}" y="{_ROW * row + 17}" fill="white">{name}</text>'


def _color(event: PipelineEvent) -> str:
    return _COLORS[event.kind] if isinstance(event, WorkEvent) else _OF_NO_WORK


def _scale(timeline: Timeline | PipelineTimeline, width: int) -> tuple[float, float]:
    timelines = (timeline,) if isinstance(timeline, Timeline) else timeline.ranks
    begin = min((span.start for rank_timeline in timelines for span in rank_timeline.spans), default=0.0)
    return begin, width / timeline.total if timeline.total else 0.0


def _cells(event: PipelineEvent) -> tuple[str, str, str, str]:
    name = _name(event)
    if isinstance(event, TransferEvent):
        return "", "", "", name
    if isinstance(event, ResidenceEvent):
        return "", "", name, ""
    return (name, "", "", "") if event.lane is Lane.COMPUTE else ("", name, "", "")


def _name(event: PipelineEvent) -> str:
    if isinstance(event, StagePass | TransferEvent):
        return str(event)
    layer = "" if event.layer is None else f".{event.layer}"
    stage = f"s{event.stage} " if event.stage else ""
    if isinstance(event, ResidenceEvent):
        return f"{stage}{event.microbatch}{layer} {event.phase} {event.action}"
    return f"{stage}{event.microbatch}{layer} {event.slot} {_SHORT[event.kind]}"


def _letters(event: PipelineEvent, num: int) -> str:
    """As many characters as a span has columns."""
    if isinstance(event, StagePass):
        return str(event).ljust(num, "-")[:num]
    if isinstance(event, TransferEvent):
        return "s" * num
    if isinstance(event, ResidenceEvent):
        return ("g" if event.action is Action.ACQUIRE else "r") * num
    if event.kind is Kind.WEIGHT_GRADIENT:
        return "'" * num
    letter = _LETTERS[event.slot]
    return (letter.upper() if event.kind is Kind.FORWARD else letter) * num
