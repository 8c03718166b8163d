"""Draw speed against memory beside the peers, from a record's tables: docs/explanation/speed.svg.

    python tools/speed_chart.py            rewrites the picture
    python tools/speed_chart.py --check    fails where the picture differs from the record

A panel is a table of the record. Speed is the column "of ideal", memory the column "peak GiB".
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORD = Path("docs/benchmarks/0008-ends-and-graphs-on-four-gpus.md")
PICTURE = Path("docs/explanation/speed.svg")

WIDTH, HEIGHT, GAP = 340, 250, 96  # Of a panel, in pixels; the gap has the labels of the vertical axis.
LEFT, TOP, BOTTOM = 66, 74, 84
CAPTION = "Speed against peak memory of a decoder of 8 billion parameters on four H200s"
SOURCE = (
    "Speed is a share of the same step without communication: up and left is better. "
    "Source: record 0008, 2026-11-22, torch 2.11."
)
STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #334; }
  .title { font-weight: 600; font-size: 14px; fill: #012; }
  .axis { fill: #566; font-size: 11px; }
  line { stroke: #d5dde2; }
  circle { fill: #8a97a3; }
  .ours { fill: #00796b; }
  text.ours { font-weight: 600; }
  @media (prefers-color-scheme: dark) {
    text { fill: #d5dde3; } .title { fill: #fff; } .axis { fill: #a9b6c0; } line { stroke: #3b4750; }
    circle { fill: #93a1ad; } .ours { fill: #4db6ac; }
  }
"""


@dataclass(frozen=True)
class Panel:
    """One table of the record, and the ranges of its axes.

    Attributes:
        heading: The record's heading above the table.
        title: The title in the picture.
        memory: The lowest and the highest GiB of the horizontal axis, and the distance of its lines.
        speed: The lowest and the highest percentage of the vertical axis, and the distance of its lines.
    """

    heading: str
    title: str
    memory: tuple[int, int, int]
    speed: tuple[int, int, int]


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
    Panel("8 billion parameters, 4,096 tokens", "4,096 tokens a GPU", (45, 70, 5), (80, 95, 5)),
    Panel("8 billion parameters, 1,024 tokens", "1,024 tokens a GPU", (30, 50, 5), (40, 90, 10)),
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
        ValueError: The record has no such heading, or the table below lacks one of the two columns.
    """
    section = record.partition(f"\n## {heading}\n")[2]
    table = re.search(r"(?:^\|.*\n)+", section, flags=re.MULTILINE)
    header, *rows = [_cells(line) for line in table[0].splitlines()] if table else [[]]
    if not {"of ideal", "peak GiB"} <= {*header}:
        raise ValueError(f"Expected a table with `of ideal` and `peak GiB` below {heading!r} of {RECORD}, got {header}")
    speed, memory = header.index("of ideal"), header.index("peak GiB")
    return {row[0]: (float(row[speed].rstrip("%")), float(row[memory])) for row in rows[1:]}


def picture(record: str) -> str:
    """Return the SVG of all panels."""
    width = LEFT + len(PANELS) * WIDTH + (len(PANELS) - 1) * GAP + 20
    height = TOP + HEIGHT + BOTTOM
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{CAPTION}">',
        f"<style>{STYLE}</style>",
        f'<text class="title" x="{LEFT}" y="22">Decoder of 8 billion parameters, ZeRO-3, four H200s</text>',
    ]
    for number, panel in enumerate(PANELS):
        lines += _panel(panel, figures(record, panel.heading), LEFT + number * (WIDTH + GAP))
    return "\n".join([*lines, f'<text class="axis" x="{LEFT}" y="{height - 12}">{SOURCE}</text>', "</svg>", ""])


def _panel(panel: Panel, rows: dict[str, tuple[float, float]], left: int) -> Iterator[str]:
    (lowest_memory, highest_memory, memory_step), (lowest, highest, step) = panel.memory, panel.speed

    def x_of(memory: float) -> float:
        return left + WIDTH * (memory - lowest_memory) / (highest_memory - lowest_memory)

    def y_of(speed: float) -> float:
        return TOP + HEIGHT * (highest - speed) / (highest - lowest)

    yield f'<text x="{left}" y="52">{panel.title}</text>'
    for speed in range(lowest, highest + 1, step):
        y = y_of(speed)
        yield f'<line x1="{left}" x2="{left + WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text class="axis" x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{speed} %</text>'
    for memory in range(lowest_memory, highest_memory + 1, memory_step):
        x = x_of(memory)
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{TOP + HEIGHT}"/>'
        yield f'<text class="axis" x="{x:.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{memory}</text>'
    right, below = left + WIDTH, TOP + HEIGHT + 36
    yield f'<text class="axis" x="{right}" y="{below}" text-anchor="end">peak memory, GiB a GPU</text>'
    for backend in BACKENDS:
        speed, peak = rows[backend.row]
        kind = ' class="ours"' if backend.row.startswith("lamella") else ""
        x, y = x_of(peak), y_of(speed)
        yield f'<circle{kind} cx="{x:.1f}" cy="{y:.1f}" r="5"/>'
        dx, dy, anchor = {"right": (10, 4, "start"), "below": (0, 20, "middle"), "above": (0, -11, "middle")}[
            backend.side
        ]
        label = escape(f"{backend.name} {speed} %, {peak} GiB")
        yield f'<text{kind} x="{x + dx:.1f}" y="{y + dy:.1f}" text-anchor="{anchor}">{label}</text>'


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def main(arguments: list[str]) -> str | None:
    """Write the picture, or check the picture; return an error."""
    drawn, path = picture((ROOT / RECORD).read_text()), ROOT / PICTURE
    if arguments != ["--check"]:
        path.write_text(drawn)
        return None
    if path.is_file() and path.read_text() == drawn:
        return None
    return f"Expected {PICTURE} as drawn from {RECORD}, got another picture. Run python tools/speed_chart.py."


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
