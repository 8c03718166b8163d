"""Draw speed against memory beside the peers, from a record's tables: docs/explanation/speed.svg.

    python tools/speed_chart.py            rewrites the picture
    python tools/speed_chart.py --check    fails where the picture differs from the record

A panel is a table of the record. Speed is the column "of ideal", memory the column "peak GiB".
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

from chart import Plot, Scale, drawing, table_of, write_or_check

RECORD = Path("docs/benchmarks/0008-ends-and-graphs-on-four-gpus.md")
PICTURE = Path("docs/explanation/speed.svg")

WIDTH, HEIGHT, GAP = 340, 250, 96  # Of a panel, in pixels; the gap has the labels of the vertical axis.
LEFT, TOP, BOTTOM = 66, 74, 84
CAPTION = "Speed against peak memory of a decoder of 8 billion parameters on four H200s"
SOURCE = (
    "Speed is a share of the same step without communication: up and left is better. "
    "Source: record 0008, 2026-11-22, torch 2.11."
)


@dataclass(frozen=True)
class Panel:
    """One table of the record, and the ranges of its axes.

    Attributes:
        heading: The record's heading above the table.
        title: The title in the picture.
        memory: GiB, along the horizontal axis.
        speed: Percentages, along the vertical axis.
    """

    heading: str
    title: str
    memory: Scale
    speed: Scale


@dataclass(frozen=True)
class Backend:
    """A row of the tables, and the label of its point.

    Attributes:
        row: The first cell of the row.
        name: The name in the picture.
        side: The label's side of the point: "right", "below" or "above".
    """

    row: str
    name: str
    side: str


PANELS = [
    Panel("8 billion parameters, 4,096 tokens", "4,096 tokens a GPU", Scale(45, 70, 5), Scale(80, 95, 5, " %")),
    Panel("8 billion parameters, 1,024 tokens", "1,024 tokens a GPU", Scale(30, 50, 5), Scale(40, 90, 10, " %")),
]
BACKENDS = [
    Backend("lamella", "lamella", "right"),
    Backend("lamella, late", "ends hidden", "right"),
    Backend("lamella, late, `keep=13GiB`", "units kept", "above"),
    Backend("fsdp2", "FSDP2", "right"),
    Backend("megatron_fsdp_experimental", "Megatron-FSDP", "below"),
]


def figures(record: str, heading: str) -> dict[str, tuple[float, float]]:
    """Return speed in percent and memory in GiB of each row of the first table below a heading.

    Raises:
        ValueError: The record lacks the table.
    """
    rows = table_of(record, heading, {"backend", "of ideal", "peak GiB"})
    return {row["backend"]: (float(row["of ideal"].rstrip("%")), float(row["peak GiB"])) for row in rows}


def picture(record: str) -> str:
    """Return the SVG of all panels."""
    width = LEFT + len(PANELS) * WIDTH + (len(PANELS) - 1) * GAP + 20
    height = TOP + HEIGHT + BOTTOM
    lines = [f'<text class="title" x="{LEFT}" y="22">Decoder of 8 billion parameters, ZeRO-3, four H200s</text>']
    for number, panel in enumerate(PANELS):
        plot = Plot(LEFT + number * (WIDTH + GAP), TOP, WIDTH, HEIGHT, panel.memory, panel.speed)
        lines += _panel(plot, panel.title, figures(record, panel.heading))
    return drawing(width, height, CAPTION, [*lines, f'<text class="axis" x="{LEFT}" y="{height - 12}">{SOURCE}</text>'])


def _panel(plot: Plot, title: str, rows: dict[str, tuple[float, float]]) -> Iterator[str]:
    yield from plot.grid(title, "peak memory, GiB a GPU")
    for backend in BACKENDS:
        speed, peak = rows[backend.row]
        kind = ' class="ours"' if backend.row.startswith("lamella") else ""
        x, y = plot.x(peak), plot.y(speed)
        yield f'<circle{kind} cx="{x:.1f}" cy="{y:.1f}" r="5"/>'
        dx, dy, anchor = {"right": (10, 4, "start"), "below": (0, 20, "middle"), "above": (0, -11, "middle")}[
            backend.side
        ]
        label = escape(f"{backend.name} {speed} %, {peak} GiB")
        yield f'<text{kind} x="{x + dx:.1f}" y="{y + dy:.1f}" text-anchor="{anchor}">{label}</text>'


if __name__ == "__main__":
    sys.exit(write_or_check(sys.argv[1:], PICTURE, RECORD, picture))
