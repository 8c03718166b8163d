"""Draw layouts, an overlap schedule and pipelines with the packages' own arithmetic, into docs/explanation.

    python tools/pictures.py            rewrites the pictures
    python tools/pictures.py --check    fails where a picture differs from the packages

`layouts.svg` has one unit's parameters in the even and in the flat layout; `overlap.svg` an order of expert-parallel
layers, simulated with and without a second microbatch beside the first; `pipelines.svg` three orders of pipeline
stages, simulated.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from typing import Final

from lamella_layout import EvenLayout, FlatLayout, Range, Rows
from lamella_schedule import (
    Event,
    Kind,
    Lane,
    PassKind,
    PipelineTimeline,
    Slot,
    StagePass,
    Timeline,
    order,
    pipeline,
    pipeline_events,
    run_order,
    simulate,
    simulate_pipeline,
    work,
)

ROOT: Final = Path(__file__).resolve().parent.parent
FOLDER: Final = Path("docs/explanation")

STYLE: Final = """
  text { font: 12px system-ui, sans-serif; fill: #334; }
  .name { font-weight: 600; fill: #012; }
  .small { font-size: 11px; fill: #566; }
  rect { stroke: #fff; }
  .gap { fill: #eef1f3; stroke: #d5dde2; }
  .p0, .forward { fill: #9fd3cd; } .p1, .backward { fill: #f5c88a; }
  .p2, .wgrad { fill: #b3bae6; } .p3 { fill: #e6a8b8; }
  .second { opacity: 0.6; }
  @media (prefers-color-scheme: dark) {
    text { fill: #d5dde3; } .name { fill: #fff; } .small { fill: #a9b6c0; } rect { stroke: #1e2429; }
    .gap { fill: #262d33; stroke: #3b4750; }
    .p0, .forward { fill: #1d6b63; } .p1, .backward { fill: #8a5a1a; }
    .p2, .wgrad { fill: #464fa0; } .p3 { fill: #86384e; }
  }
"""
LEFT, WIDTH, ROW, BAR = 124, 780, 34, 26

NAMES: Final = ("up.weight (10 x 4)", "up.bias (10)", "down.weight (4 x 10)", "down.bias (4)")
SHAPES: Final = ((10, 4), (10,), (4, 10), (4,))
NUM_RANKS: Final = 4

NUM_LAYERS, NUM_MICROBATCHES = 2, 2
DURATIONS: Final = {Slot.PRE: 2.0, Slot.EXPERTS: 3.0, Slot.DISPATCH: 1.5, Slot.COMBINE: 1.5}
TEXTS: Final = {Slot.PRE: "attention", Slot.EXPERTS: "experts", Slot.DISPATCH: "dispatch", Slot.COMBINE: "combine"}


@dataclass(frozen=True)
class Bar:
    """A rectangle of a row, from `start` to `stop` in the row's unit."""

    start: float
    stop: float
    classes: str
    text: str = ""


def picture(title: str, rows: Sequence[tuple[str, Sequence[Bar]]], lines: Sequence[str], *, total: float) -> str:
    """Return an SVG picture: rows of bars to one scale under a title, and lines of text below."""
    height = 40 + ROW * len(rows) + 18 * len(lines)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 12} {height}" role="img" '
    parts = [head + f'aria-label="{escape(title)}">', f"<style>{STYLE}</style>"]
    parts.append(f'<text class="name" x="16" y="24">{escape(title)}</text>')
    y = 40
    for name, bars in rows:
        parts.append(f'<text x="16" y="{y + 17}">{escape(name)}</text>')
        parts += [_rectangle(bar, y, WIDTH / total) for bar in bars]
        y += ROW
    for line in lines:
        parts.append(f'<text class="small" x="16" y="{y + 12}">{escape(line)}</text>')
        y += 18
    return "\n".join([*parts, "</svg>"]) + "\n"


def _rectangle(bar: Bar, y: int, scale: float) -> str:
    x, width = LEFT + bar.start * scale, (bar.stop - bar.start) * scale
    rectangle = f'<rect class="{bar.classes}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" rx="3"/>'
    if width < 6.2 * len(bar.text) + 5:
        return rectangle
    return f'{rectangle}<text class="small" x="{x + width / 2:.1f}" y="{y + 17}" text-anchor="middle">{bar.text}</text>'


# -- layouts ---------------------------------------------------------------------------------------------------------


def layouts() -> str:
    """Return the picture of one unit's parameters in both layouts, a row for each rank's shard."""
    even = EvenLayout.build(SHAPES, num_shards=NUM_RANKS, alignment=2)
    keep = (Rows(5), Rows(1), Rows(1), Rows(1))
    flat = FlatLayout.build(SHAPES, num_shards=NUM_RANKS, keep=keep, alignment=2)
    rows = [(f"even, rank {rank}", list(_shard(even, rank))) for rank in range(NUM_RANKS)]
    rows += [(f"flat, rank {rank}", list(_shard(flat, rank))) for rank in range(NUM_RANKS)]
    lines = [
        "Colours: " + ", ".join(f"{index + 1} {name}" for index, name in enumerate(NAMES)) + "; grey: padding.",
        "Even: every rank has rows of every parameter, fewer at the end.",
        "Flat: parameter 1 is cut at its fifth row alone, as scales of blocks need; others fill the gaps.",
    ]
    title = "One unit's parameters on four ranks, in the even and in the flat layout"
    return picture(title, rows, lines, total=max(even.shard_numel, flat.shard_numel))


def _shard(layout: EvenLayout | FlatLayout, rank: int) -> Iterator[Bar]:
    yield Bar(0, layout.shard_numel, "gap")
    for index in range(layout.num_tensors):
        slot: Range = layout.local_slot(index, rank)
        if slot.numel:
            yield Bar(slot.start, slot.stop, f"p{index}", f"{index + 1}: {slot.numel}")


# -- an overlap schedule ---------------------------------------------------------------------------------------------


def overlap() -> str:
    """Return the picture of microbatches through layers with experts: one after another, and overlapped."""
    alone = [
        event
        for microbatch in range(NUM_MICROBATCHES)
        for event in (
            *order(NUM_LAYERS, None, forward_microbatch=microbatch, delayed=False),
            *order(None, NUM_LAYERS, backward_microbatch=microbatch, delayed=False),
        )
    ]
    timelines = {
        "One after another": simulate(work(alone), partial(_duration, backward=2.0)),
        "Overlapped": simulate(work(run_order(NUM_MICROBATCHES, NUM_LAYERS)), partial(_duration, backward=1.0)),
    }
    rows = [(f"{lane}", list(_spans(timeline, lane))) for timeline in timelines.values() for lane in timeline.lanes]
    lines = [
        f"{name}: {timeline.total:g} units of time, {timeline.exposed:g} of them communication that no compute hides."
        for name, timeline in timelines.items()
    ]
    lines.append("Green: forward; orange: backward; blue: delayed weight gradients. Pale: the second microbatch.")
    title = "Two microbatches through two layers with experts: one after another (above), and overlapped (below)"
    return picture(title, rows, lines, total=max(timeline.total for timeline in timelines.values()))


def _duration(event: Event, *, backward: float) -> float:
    """Return an event's duration: a backward of compute takes twice its forward, half of it for weight gradients."""
    is_compute = event.lane is Lane.COMPUTE
    return DURATIONS.get(event.slot, 0.0) * (backward if is_compute and event.kind is Kind.BACKWARD else 1.0)


def _spans(timeline: Timeline, lane: Lane) -> Iterator[Bar]:
    for span in timeline.spans:
        if isinstance(span.event, Event) and span.lane is lane and span.stop > span.start:
            yield Bar(span.start, span.stop, _classes(span.event), TEXTS[span.event.slot])


def _classes(event: Event) -> str:
    kind = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.WEIGHT_GRADIENT: "wgrad"}[event.kind]
    return f"{kind} second" if event.microbatch else kind


# -- pipelines --------------------------------------------------------------------------------------------------------


def pipelines() -> str:
    """Return the picture of three orders of one model's stages, a row for each rank."""
    timelines = {name: _pipeline_timeline(name) for name in ("1F1B", "ZBVZeroBubble", "DualPipeV")}
    rows = [
        (f"{name.removesuffix('ZeroBubble')}, rank {rank}", list(_passes(rank_timeline)))
        for name, timeline in timelines.items()
        for rank, rank_timeline in enumerate(timeline.ranks)
    ]
    lines = [
        f"{name}: {timeline.total:g} units of time, ranks idle for {timeline.bubble:.0%}"
        for name, timeline in timelines.items()
    ]
    lines.append("Green: forward; orange: backward, of inputs alone in short bars; blue: delayed weight gradients.")
    lines.append("Numbers: microbatches. Pale: the second of a rank's two stages, half as long as those of 1F1B.")
    title = "Eight microbatches through a model on four ranks, in three orders of the same work"
    return picture(title, rows, lines, total=max(timeline.total for timeline in timelines.values()))


def _pipeline_timeline(schedule: str) -> PipelineTimeline:
    ours = pipeline(schedule, NUM_RANKS, 2 * NUM_RANKS)
    forward = 2.0 * NUM_RANKS / ours.num_stages
    times = {kind: forward * (2 if kind is PassKind.BACKWARD else 1) for kind in PassKind}
    return simulate_pipeline(pipeline_events(ours), times)


def _passes(timeline: Timeline) -> Iterator[Bar]:
    kinds = {PassKind.FORWARD: "forward", PassKind.WEIGHT_GRADIENT: "wgrad"}
    for span in timeline.spans:
        assert isinstance(span.event, StagePass)
        second = " second" if span.event.stage >= NUM_RANKS else ""
        classes = kinds.get(span.event.kind, "backward") + second
        yield Bar(span.start, span.stop, classes, str(span.event.microbatch))


PICTURES: Final = {"layouts.svg": layouts, "overlap.svg": overlap, "pipelines.svg": pipelines}


def main(arguments: Sequence[str]) -> int:
    """Write the pictures, or check them; return the exit status."""
    stale = [name for name, draw in PICTURES.items() if _content(name) != draw()]
    if arguments == ["--check"]:
        for name in stale:
            print(f"Expected {FOLDER / name} as the packages draw it, got another. Run: python tools/pictures.py")
        return 1 if stale else 0
    for name in stale:
        (ROOT / FOLDER / name).write_text(PICTURES[name](), encoding="utf-8")
    return 0


def _content(name: str) -> str | None:
    file = ROOT / FOLDER / name
    return file.read_text(encoding="utf-8") if file.is_file() else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
