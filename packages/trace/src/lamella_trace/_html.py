"""A report as an HTML page: the tables, and a timeline with zoom."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from lamella_trace._intervals import Interval, intersect
from lamella_trace._report import KernelTimeline, OverlapReport
from lamella_trace._tables import NODE_CAPTION, Row, headline, node_table, step_table, unit_caption, unit_table
from lamella_trace._verdict import verdict

NUM_COLUMNS = 8000  # Columns per step. Bars narrower than a column share a column.
_MOST_COLUMNS = 32000
_LANE_HEIGHT = 20
_LONGEST_NAME = 100
_MOST_TICKS = 20  # of the axis

_EXPOSED = "exposed"
_COLOURS = {
    "all_gather": "#2a78b5",
    "reduce_scatter": "#7b4fa6",
    "collective": "#4a5fa5",
    "attention": "#3c8d5a",
    "matmul": "#6bb37f",
    "optimizer": "#b08a2e",
    "transfer": "#d9822b",
    "copy": "#e8a33d",
    "fill": "#c9c2b4",
    "elementwise": "#a9cfb4",
    "range": "#b9c4cf",
    "host_gap": "#d64550",
    _EXPOSED: "#d64550",
}


@dataclass
class _LaneBar:
    """A range of columns of a lane, its kind and its tooltip."""

    begin: int
    end: int
    kind: str
    text: str
    num_more: int = 0


@dataclass(frozen=True, kw_only=True)
class _LaneSpan:
    interval: Interval
    kind: str
    text: str


def as_html(report: OverlapReport) -> str:
    """Return the report as a self-contained page. Red under a bar marks exposed time.

    A lane has at most `NUM_COLUMNS` bars per step and 32,000 in all, for any number of kernels.
    """
    lanes = _lanes(report)
    num_columns = min(NUM_COLUMNS * len(report.steps), _MOST_COLUMNS)
    colours = "".join(f".{kind}{{fill:{colour};background:{colour}}}" for kind, colour in _COLOURS.items())
    legend = " ".join(f'<span class="{kind}">&emsp;</span> {kind.replace("_", " ")}' for kind in _COLOURS)
    labels = "".join(f"<div>{escape(name)}</div>" for name in ("step", "ms", *lanes))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Overlap report: {escape(headline(report))}</title>
<style>
body {{ font: 14px/1.4 system-ui, sans-serif; margin: 1.5em; color: #222; background: #fff }}
table {{ border-collapse: collapse; margin: 1em 0 }}
td, th {{ padding: 1px 8px; text-align: right; border-bottom: 1px solid #ddd; font-variant-numeric: tabular-nums }}
td:first-child, th:first-child {{ text-align: left }}
.timeline {{ display: flex; border: 1px solid #ccc }}
.labels {{ flex: none; font-size: 12px }}
.labels div {{ height: {_LANE_HEIGHT}px; padding: 0 6px; white-space: nowrap }}
.scroll {{ overflow-x: auto; flex: auto }}
.axis {{ position: relative; height: {_LANE_HEIGHT}px }}
.axis span {{ position: absolute; box-sizing: border-box; height: 100%; padding-left: 3px; border-left: 1px solid #999;
 font-size: 12px; overflow: hidden; text-overflow: ellipsis; white-space: nowrap }}
svg {{ display: block; width: 100%; height: {_LANE_HEIGHT * len(lanes)}px }}
.step {{ stroke: #222; stroke-width: 1; vector-effect: non-scaling-stroke }}
{colours}
</style>
</head>
<body>
<h1>Overlap report</h1>
<p>{escape(headline(report))}</p>
<p><strong>{escape(verdict(report))}</strong></p>
{_table(step_table(report))}
<p>{legend}</p>
<p>Zoom <input type="range" min="100" max="2000" value="100" aria-label="Zoom"
 oninput="document.querySelector('.zoomed').style.width = this.value + '%'"></p>
<div class="timeline"><div class="labels">{labels}</div><div class="scroll"><div class="zoomed">
<div class="axis">{_marks(_steps(report.timeline), report.timeline)}</div>
<div class="axis">{_marks(_ticks(report.timeline), report.timeline)}</div>
<svg viewBox="0 0 {num_columns} {_LANE_HEIGHT * len(lanes)}" preserveAspectRatio="none">
{"".join(_drawing(report.timeline, lanes.values(), num_columns))}
</svg>
</div></div></div>
<p>{escape(unit_caption(report))}</p>
{_table(unit_table(report))}
{_nodes(report)}
</body>
</html>
"""


def _nodes(report: OverlapReport) -> str:
    return f"<p>{escape(NODE_CAPTION)}</p>\n{_table(node_table(report))}" if report.total.nodes else ""


def _table(rows: Sequence[Row]) -> str:
    tags = ["th", *["td"] * (len(rows) - 1)]
    lines = ("".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row) for tag, row in zip(tags, rows, strict=True))
    return "<table>" + "".join(f"<tr>{line}</tr>\n" for line in lines) + "</table>"


def _steps(timeline: KernelTimeline) -> Iterator[tuple[Interval, str]]:
    for name, window in timeline.windows.items():
        yield window, name


def _ticks(timeline: KernelTimeline) -> Iterator[tuple[Interval, str]]:
    """Yield ticks at round numbers of milliseconds since the start of the first kernel."""
    start, end = timeline.span
    power = 10 ** math.floor(math.log10((end - start) / _MOST_TICKS))
    tick = next(power * factor for factor in (1, 2, 5, 10) if power * factor * _MOST_TICKS >= end - start)
    for number in range(math.ceil((end - start) / tick)):
        tick_start = start + number * tick
        yield (tick_start, min(tick_start + tick, end)), f"{number * tick / 1e3:g}"


def _marks(named: Iterable[tuple[Interval, str]], timeline: KernelTimeline) -> str:
    """Draw each name over its interval."""
    start, end = timeline.span
    return "".join(
        f'<span style="left:{(mark[0] - start) / (end - start):.3%};width:{(mark[1] - mark[0]) / (end - start):.3%}">'
        f"{escape(name)}</span>"
        for mark, name in named
    )


def _lanes(report: OverlapReport) -> dict[str, list[_LaneSpan]]:
    """Make a lane per stream, a lane of waits for the host, and a lane per depth of each thread's ranges."""
    timeline = report.timeline
    exposed = timeline.exposed if report.on_gpu else []
    lanes: dict[str, list[_LaneSpan]] = defaultdict(list)
    for launch in timeline.placed:
        kernel = launch.kernel
        lane = lanes[f"stream {kernel.stream}" if report.on_gpu else "main thread"]
        text = f"{launch.unit}: {kernel.name[:_LONGEST_NAME]}"
        lane.append(_LaneSpan(interval=kernel.interval, kind=kernel.kind.name.lower(), text=text))
        if kernel.kind.is_collective:
            parts = intersect([kernel.interval], exposed)
            lane.extend(_LaneSpan(interval=part, kind=_EXPOSED, text=f"{launch.unit}: exposed") for part in parts)
    for gap in timeline.host_gaps:
        lanes["waits for the host"].append(_LaneSpan(interval=gap.interval, kind="host_gap", text=gap.unit))
    threads = list(dict.fromkeys(host_range.thread for host_range in timeline.ranges))
    for host_range in sorted(
        timeline.ranges, key=lambda host_range: (threads.index(host_range.thread), host_range.depth)
    ):
        lane = lanes[f"host thread {threads.index(host_range.thread)}{' +' * host_range.depth}"]
        interval, text = (host_range.start_us, host_range.end_us), f"{host_range.unit}: {host_range.phase}"
        lane.append(_LaneSpan(interval=interval, kind="range", text=text))
    return lanes


def _drawing(timeline: KernelTimeline, lanes: Iterable[Sequence[_LaneSpan]], num_columns: int) -> Iterator[str]:
    """Yield the rectangles of all lanes, and a line at the start of each step."""
    start, end = timeline.span
    scale = num_columns / (end - start)
    for index, spans in enumerate(lanes):
        bars = [span for span in spans if span.kind != _EXPOSED]
        marks = [span for span in spans if span.kind == _EXPOSED]
        top = index * _LANE_HEIGHT
        yield from (_rect(bar, top + 2, _LANE_HEIGHT - 7) for bar in _bars(bars, start, scale))
        yield from (_rect(bar, top + _LANE_HEIGHT - 5, 3) for bar in _bars(marks, start, scale))
    for step_start, _ in timeline.windows.values():
        x = (step_start - start) * scale
        yield f'<line class="step" x1="{x:.0f}" x2="{x:.0f}" y1="0" y2="100%"/>\n'


def _bars(spans: Iterable[_LaneSpan], start: float, scale: float) -> list[_LaneBar]:
    """Reduce a lane to bars: one per span of at least a column, and one per column for all narrower spans."""
    bars: list[_LaneBar] = []
    for span in spans:
        begin, end = (int((time - start) * scale) for time in span.interval)
        if end < 0:  # Ranges of the host before the first kernel: the host runs ahead of the GPU.
            continue
        text = f"{span.text}, {span.interval[1] - span.interval[0]:.1f} us"
        last_end = bars[-1].end if bars else 0
        if end <= begin and begin < last_end:
            bars[-1].num_more += 1
        else:
            begin = max(begin, last_end)
            bars.append(_LaneBar(begin, max(end, begin + 1), span.kind, text))
    return bars


def _rect(bar: _LaneBar, top: int, height: int) -> str:
    more = f", and {bar.num_more} more" if bar.num_more else ""
    position = f'x="{bar.begin}" y="{top}" width="{bar.end - bar.begin}" height="{height}"'
    return f'<rect class="{bar.kind}" {position}><title>{escape(bar.text)}{more}</title></rect>\n'
