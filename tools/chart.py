"""Charts of the figures of benchmark records, as SVG: shared by the scripts that draw one each."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #334; }
  .title { font-weight: 600; font-size: 14px; fill: #012; }
  .axis { fill: #566; font-size: 11px; }
  line { stroke: #d5dde2; }
  circle { fill: #8a97a3; }
  .ours { fill: #00796b; }
  text.ours { font-weight: 600; }
  polyline { fill: none; stroke: #00796b; stroke-width: 2; }
  @media (prefers-color-scheme: dark) {
    text { fill: #d5dde3; } .title { fill: #fff; } .axis { fill: #a9b6c0; } line { stroke: #3b4750; }
    circle { fill: #93a1ad; } .ours { fill: #4db6ac; } polyline { stroke: #4db6ac; }
  }
"""


@dataclass(frozen=True)
class Scale:
    """The range of an axis, in the unit of its numbers.

    Attributes:
        low: The number at the beginning of the axis.
        high: The number at the end of the axis.
        step: The distance of the axis' lines.
        unit: Written behind each number, as " %".
    """

    low: float
    high: float
    step: float
    unit: str = ""

    def fraction(self, number: float) -> float:
        """Return the place of a number: 0 at `low`, 1 at `high`."""
        return (number - self.low) / (self.high - self.low)

    def numbers(self) -> list[float]:
        """Return the numbers that have a line."""
        return [self.low + line * self.step for line in range(round((self.high - self.low) / self.step) + 1)]


@dataclass(frozen=True)
class Plot:
    """A panel of a chart, in pixels.

    Attributes:
        left: The left edge.
        top: The upper edge.
        width: The length of the horizontal axis.
        height: The length of the vertical axis.
        across: The range of the horizontal axis.
        up: The range of the vertical axis.
    """

    left: int
    top: int
    width: int
    height: int
    across: Scale
    up: Scale

    def x(self, number: float) -> float:
        """Return the pixel of a number of the horizontal axis."""
        return self.left + self.width * self.across.fraction(number)

    def y(self, number: float) -> float:
        """Return the pixel of a number of the vertical axis."""
        return self.top + self.height * (1 - self.up.fraction(number))

    def grid(self, title: str, across: str) -> Iterator[str]:
        """Yield the title, the lines with their numbers, and the label of the horizontal axis."""
        right, bottom = self.left + self.width, self.top + self.height
        yield f'<text x="{self.left}" y="{self.top - 22}">{title}</text>'
        for number in self.up.numbers():
            y, text = self.y(number), f"{number:g}{self.up.unit}"
            yield f'<line x1="{self.left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
            yield f'<text class="axis" x="{self.left - 8}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
        for number in self.across.numbers():
            x, text = self.x(number), f"{number:g}{self.across.unit}"
            yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{self.top}" y2="{bottom}"/>'
            yield f'<text class="axis" x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{text}</text>'
        yield f'<text class="axis" x="{right}" y="{bottom + 36}" text-anchor="end">{across}</text>'


def drawing(width: int, height: int, caption: str, lines: list[str]) -> str:
    """Return the text of an SVG file.

    Args:
        width: Pixels from the left edge to the right.
        height: Pixels from the upper edge to the lower.
        caption: What a reader without pictures gets.
        lines: The elements.
    """
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{caption}">'
    return "\n".join([head, f"<style>{STYLE}</style>", *lines, "</svg>", ""])


def table_of(record: str, heading: str, columns: set[str]) -> list[Mapping[str, str]]:
    """Return the rows of a table of a section, as cells by the names of the columns: the first that has `columns`.

    Raises:
        ValueError: The record has no such heading, or no table below it, before the next heading, has `columns`.
    """
    sections = re.split(r"^##+ (.*)$", record, flags=re.MULTILINE)
    section = dict(zip(sections[1::2], sections[2::2], strict=True)).get(heading, "")
    for table in re.findall(r"(?:^\|.*\n)+", section, flags=re.MULTILINE):
        header, _, *rows = [_cells(line) for line in table.splitlines()]
        if columns <= {*header}:
            return [dict(zip(header, cells, strict=True)) for cells in rows]
    raise ValueError(f"Expected a table with columns {sorted(columns)} below {heading!r}, got none.")


def write_or_check(arguments: list[str], path: Path, source: Path, picture: Callable[[str], str]) -> str | None:
    """Write a picture of a record, or with `--check` compare the picture with the record; return an error.

    Args:
        arguments: The command line's.
        path: The picture's file, from the root.
        source: The record's file, from the root.
        picture: Draws the text of a record.
    """
    if arguments not in ([], ["--check"]):
        return f"Expected no argument or --check, got {' '.join(arguments)}."
    drawn, file = picture((ROOT / source).read_text(encoding="utf-8")), ROOT / path
    if not arguments:
        file.write_text(drawn, encoding="utf-8")
        return None
    if file.is_file() and file.read_text(encoding="utf-8") == drawn:
        return None
    return f"Expected {path} as drawn from {source}, got another picture. Draw the record again, without --check."


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]
