"""Draw the loss curves of the ready configurations, from a record's table: docs/how-to/losses.svg.

    python tools/loss_chart.py            rewrites the picture
    python tools/loss_chart.py --check    fails where the picture differs from the record

A column of the table is a panel; the rows are steps.
"""

import math
import sys
from pathlib import Path

from chart import Plot, Scale, drawing, table_of, write_or_check

RECORD = Path("docs/benchmarks/0019-the-recipe-beside-the-trainer.md")
HEADING = "Loss curves of the ready configurations"
PICTURE = Path("docs/how-to/losses.svg")
STEPS = Scale(0, 60, 20)
GRIDS = {0.5: 1.5, 1: 6, 2: 12, 4: math.inf}  # Nats between lines of the grid: the most nats of a curve.
CONFIGURATIONS = (
    "laptop",
    "pretrain",
    "fine-tune",
    "adapters",
    "last-layers",
    "one-gpu",
    "many-hosts",
    "pretrain-float8",
)

WIDTH, HEIGHT, COLUMNS = 220, 150, 3  # Of a panel, in pixels; panels in a row.
LEFT, TOP, GAP, BOTTOM = 46, 50, 56, 84
CAPTION = "Training losses of eight ready configurations over their first steps"
SOURCE = "Nats a token; scales differ. Source: record 0019, 2026-11-29, one NVIDIA H200 or (last row) two."


def losses(record: str, configuration: str) -> list[tuple[int, float]]:
    """Return steps and losses of a column of the record's table; steps that were not run have an empty cell.

    Raises:
        ValueError: The record lacks the table, or has a step beyond the axis.
    """
    rows = table_of(record, HEADING, {"step", configuration})
    points = [(int(row["step"]), float(row[configuration])) for row in rows if row[configuration]]
    if points[-1][0] > STEPS.high:
        raise ValueError(f"Expected steps up to {STEPS.high}, got {points[-1][0]}. Lengthen STEPS.")
    return points


def picture(record: str) -> str:
    """Return the SVG of all panels."""
    lines = []
    for number, configuration in enumerate(CONFIGURATIONS):
        row, column = divmod(number, COLUMNS)
        left, top = LEFT + column * (WIDTH + GAP), TOP + row * (HEIGHT + BOTTOM)
        lines += _panel(configuration, losses(record, configuration), left, top)
    height = TOP + math.ceil(len(CONFIGURATIONS) / COLUMNS) * (HEIGHT + BOTTOM)
    lines.append(f'<text class="axis" x="{LEFT}" y="{height - 12}">{SOURCE}</text>')
    return drawing(LEFT + COLUMNS * (WIDTH + GAP) - GAP + 20, height, CAPTION, lines)


def _panel(configuration: str, points: list[tuple[int, float]], left: int, top: int) -> list[str]:
    lowest, highest = (limit(loss for _, loss in points) for limit in (min, max))
    distance = next(distance for distance, most in GRIDS.items() if highest - lowest <= most)
    up = Scale(math.floor(lowest / distance) * distance, math.ceil(highest / distance) * distance, distance)
    plot = Plot(left, top, WIDTH, HEIGHT, STEPS, up)
    places = " ".join(f"{plot.x(step):.1f},{plot.y(loss):.1f}" for step, loss in points)
    return [*plot.grid(f"{configuration}.toml", "step"), f'<polyline points="{places}"/>']


if __name__ == "__main__":
    sys.exit(write_or_check(sys.argv[1:], PICTURE, RECORD, picture))
