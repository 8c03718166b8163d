"""Charts of a run's numbers over its steps, as SVG inside a page."""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Final

from lamella._record.axes import Axis, fitted_axis
from lamella._record.page import Html, element
from lamella._record.series import Series

_WIDTH, _HEIGHT = 440, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 22, 10, 34
_NUM_COLOURS: Final = 6

_NUM_BUCKETS: Final = 350
"""Pieces of the steps that a curve keeps its lowest and highest number of: more would be closer than a pixel."""

_FEW_POINTS: Final = 30
"""Points up to this number are drawn one by one, as those of validations are."""

_SMOOTHED_FROM: Final = 100
_SMOOTHED_SHARE: Final = 0.02

Point = tuple[int, float]


def chart(title: str, curves: Sequence[Series], *, may_be_log: bool = True, from_zero: bool = False) -> Html:
    """Return a figure with a curve a series, all in the unit of the first; no markup without points.

    Args:
        title: The title, without the unit.
        curves: The series.
        may_be_log: Allow a logarithmic scale.
        from_zero: Begin the vertical axis at 0, on a linear scale.
    """
    drawn = [series for series in curves if series.points]
    if not drawn:
        return Html()
    points = sorted(point for series in drawn for point in series.points)
    numbers = [number for _, number in points]
    y = fitted_axis(numbers, may_be_log=may_be_log, from_zero=from_zero)
    x = _axis_of_steps(points[0][0], points[-1][0])
    curves_inside = _clipped(line for index, series in enumerate(drawn) for line in _curve(series, index, x, y))
    label = f"{title}: {', '.join(_last(series) for series in drawn)}"
    drawing = element(
        "svg", *_grid(x, y), curves_inside, viewBox=f"0 0 {_WIDTH} {_HEIGHT}", role="img", aria_label=label
    )
    return element("figure", _caption(title, drawn, y, numbers), drawing)


def shown_number(number: float) -> str:
    """Return a number with four significant digits, and a suffix for thousands, millions or billions."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(number) >= limit:
            return f"{number / (1e3 if suffix == 'k' else limit):.4g}{suffix}"
    return f"{number:.4g}"


def _axis_of_steps(first: int, last: int) -> Axis:
    return Axis(low=first, high=last if last > first else first + 1)


def _caption(title: str, drawn: Sequence[Series], y: Axis, numbers: Sequence[float]) -> Html:
    unit = drawn[0].unit
    notes = [f"{unit}{', logarithmic' if y.is_log else ''}".lstrip(", ")]
    if above := [number for number in numbers if number > y.high]:
        notes.append(f"{len(above)} of {len(numbers):,} points above the axis, up to {shown_number(max(above))}")
    keys = (
        element("span", element("span", class_=f"key c{index % _NUM_COLOURS}"), series.name)
        for index, series in enumerate(drawn if len(drawn) > 1 else ())
    )
    return element("figcaption", element("b", title), element("small", "; ".join(filter(None, notes))), *keys)


def _last(series: Series) -> str:
    step, number = series.points[-1]
    return f"{series.name} {shown_number(number)} {series.unit} at step {step}"


def _grid(x: Axis, y: Axis) -> Iterator[Html]:
    for tick in y.ticks():
        height = f"{_down(y, tick):.1f}"
        yield element("line", class_="grid", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=height, y2=height)
        yield element("text", shown_number(tick), x=_LEFT - 6, y=height, dy="4", text_anchor="end")
    ticks = [tick for tick in x.ticks() if tick == int(tick)]
    for tick in ticks:
        place = f"{_across(x, tick):.1f}"
        yield element("line", class_="grid", x1=place, x2=place, y1=_HEIGHT - _BOTTOM, y2=_HEIGHT - _BOTTOM + 4)
        yield element("text", f"{int(tick):,}", x=place, y=_HEIGHT - _BOTTOM + 16, text_anchor="middle")
    yield element("text", "step", x=(_LEFT + _WIDTH - _RIGHT) // 2, y=_HEIGHT - 4, text_anchor="middle")


def _clipped(drawings: Iterable[Html]) -> Html:
    """Return drawings cut at the ends of the axes: an inner drawing has no overflow."""
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    frame = {"x": _LEFT - 4, "y": _TOP - 4, "width": width + 8, "height": height + 8}
    return element("svg", *drawings, **frame, viewBox=" ".join(map(str, frame.values())))


def _curve(series: Series, index: int, x: Axis, y: Axis) -> Iterator[Html]:
    colour = f"c{index % _NUM_COLOURS}"
    is_smoothed = len(series.points) >= _SMOOTHED_FROM
    yield _line(_thinned(series.points), f"{colour} faint" if is_smoothed else colour, x, y)
    if is_smoothed:
        yield _line(_thinned(_smoothed(series.points)), colour, x, y)
    for step, number in series.points if len(series.points) <= _FEW_POINTS else ():
        text = element("title", f"{series.name}, step {step:,}: {shown_number(number)} {series.unit}".rstrip())
        circle = element("circle", class_=colour, cx=f"{_across(x, step):.1f}", cy=f"{_down(y, number):.1f}", r=3)
        yield element("g", circle, text)


def _line(points: Iterable[Point], classes: str, x: Axis, y: Axis) -> Html:
    places = " ".join(f"{_across(x, step):.1f},{_down(y, number):.1f}" for step, number in points)
    return element("polyline", class_=classes, points=places)


def _across(x: Axis, step: float) -> float:
    return _LEFT + x.fraction(step) * (_WIDTH - _LEFT - _RIGHT)


def _down(y: Axis, number: float) -> float:
    return _TOP + (1 - y.fraction(number)) * (_HEIGHT - _TOP - _BOTTOM)


def _thinned(points: Sequence[Point]) -> list[Point]:
    """Return the lowest and the highest point of each bucket of a long curve, in the order of their steps."""
    if len(points) <= 2 * _NUM_BUCKETS:
        return [*points]
    length = math.ceil(len(points) / _NUM_BUCKETS)
    buckets = (points[start : start + length] for start in range(0, len(points), length))
    return [
        point
        for bucket in buckets
        for point in sorted({min(bucket, key=lambda point: point[1]), max(bucket, key=lambda point: point[1])})
    ]


def _smoothed(points: Sequence[Point]) -> list[Point]:
    """Return means over 2 % of the points around each."""
    reach = max(1, int(_SMOOTHED_SHARE * len(points)) // 2)
    sums = [0.0, *accumulate(number for _, number in points)]
    means = []
    for index, (step, _) in enumerate(points):
        start, end = max(0, index - reach), min(len(points), index + reach + 1)
        means.append((step, (sums[end] - sums[start]) / (end - start)))
    return means
