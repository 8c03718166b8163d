"""The numbers of a run over its steps, read from the metrics file by name, also from records of other versions."""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lamella._record.metrics import parsed_line

_INFINITE: Final = 1e100
"""Numbers from here on are passed over like infinity: no run has any, and an axis of them would overflow."""

_NATS: Final = re.compile(r"nats_per_(byte|token)")


@dataclass(frozen=True, kw_only=True)
class Series:
    """A number over the steps of a run.

    Attributes:
        name: The name of the number for a reader.
        unit: The unit of the number; empty for a pure number.
        points: Steps, ascending, and the number after each; below 1e100.
    """

    name: str
    unit: str
    points: tuple[tuple[int, float], ...]

    @property
    def numbers(self) -> list[float]:
        """The numbers without their steps."""
        return [number for _, number in self.points]


def metric_rows(path: Path) -> list[Mapping[str, object]]:
    """Return the objects of a metrics file that have a step; damaged lines are passed over."""
    if not path.exists():
        return []
    return [*_rows(path.read_text(encoding="utf-8", errors="replace").split("\n"))]


def _rows(lines: Iterable[str]) -> Iterator[Mapping[str, object]]:
    for line in lines:
        with suppress(ValueError):
            row = parsed_line(line)
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                yield row


def is_step(row: Mapping[str, object]) -> bool:
    """True for the record of an optimizer step."""
    return "loss" in row


def step_series(rows: Iterable[Mapping[str, object]], field: str, name: str, unit: str) -> Series:
    """Return a field of the records of steps; without points where no record has the field."""
    steps = (row for row in rows if is_step(row))
    return Series(name=name, unit=unit, points=tuple(_points(steps, field)))


def step_fields(rows: Iterable[Mapping[str, object]], suffix: str) -> list[str]:
    """Return the names of numbers in the records of steps that end in a suffix, in the order of their first record."""
    names = dict.fromkeys(name for row in rows if is_step(row) for name, number in row.items() if _is_number(number))
    return [name for name in names if name.endswith(suffix)]


def validation_series(rows: Iterable[Mapping[str, object]]) -> list[Series]:
    """Return the loss on each held-out set, in nats per byte or per token."""
    points: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in rows:
        for field, number in () if is_step(row) else row.items():
            match = _NATS.search(field)
            if match is not None and _is_number(number):
                key = (_name_of_set(row, field.replace(match[0], "")), f"nats/{match[1]}")
                points.setdefault(key, []).extend(_points([row], field))
    return [Series(name=name, unit=unit, points=tuple(points)) for (name, unit), points in points.items()]


def _name_of_set(row: Mapping[str, object], field: str) -> str:
    """Return the name of a held-out set: texts in its record, and the field without its unit."""
    texts = [text for text in row.values() if isinstance(text, str)]
    name = " ".join([*texts, *filter(None, re.split(r"[/_.]+", field))])
    return f"validation on {name}" if name else "validation"


def _points(rows: Iterable[Mapping[str, object]], field: str) -> Iterator[tuple[int, float]]:
    for row in rows:
        step, number = row["step"], row.get(field)
        if isinstance(step, int) and isinstance(number, int | float) and _is_number(number):
            yield step, float(number)


def _is_number(number: object) -> bool:
    return isinstance(number, int | float) and not isinstance(number, bool) and abs(number) < _INFINITE
