"""The plot of a run's losses."""

from collections.abc import Iterable, Mapping
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lamella._record.axes import fitted_axis
from lamella._record.series import Series, step_series, validation_series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

_TRAINING_UNIT: Final = "nats/token"
_VALIDATION_COLOURS: Final = ("tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown", "tab:pink")


def plot(rows: Iterable[Mapping[str, object]], path: Path) -> None:
    """Draw the losses over the steps: of training and, a line a held-out set, of validations.

    The axes are fitted to the losses, see `fitted_axis`. Validations in another unit have an axis of their own.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = list(rows)
    training = step_series(records, "loss", "training", _TRAINING_UNIT)
    by_unit: dict[str, list[Series]] = {_TRAINING_UNIT: []}
    for series in validation_series(records):
        by_unit.setdefault(series.unit, []).append(series)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="step (optimizer steps)")
    colours = cycle(_VALIDATION_COLOURS)
    lines = axes.plot(*_columns(training), color="tab:blue", lw=1, label=training.name)
    for unit, validations in by_unit.items():
        is_first = unit == _TRAINING_UNIT
        unit_axes = axes if is_first else axes.twinx()
        for series in validations:
            lines += unit_axes.plot(*_columns(series), "o-", ms=4, color=next(colours), label=series.name)
        if is_first or validations:
            _fit(unit_axes, [training, *validations] if is_first else validations)
            unit_axes.set_ylabel(f"{'training' if is_first else 'validation'} loss ({unit})")
    _legend(axes, lines)
    figure.savefig(path, dpi=120)


def _columns(series: Series) -> tuple[list[int], list[float]]:
    return [step for step, _ in series.points], series.numbers


def _fit(axes: "Axes", lines: Iterable[Series]) -> None:
    points = sorted(point for series in lines for point in series.points)
    axis = fitted_axis(number for _, number in points)
    axes.set_yscale("log" if axis.is_log else "linear")
    axes.set_ylim(axis.low, axis.high)
    if axis.is_log:  # matplotlib would print powers of ten alone, of which a short axis has none.
        axes.set_yticks(axis.ticks(), labels=[f"{tick:g}" for tick in axis.ticks()], minor=False)
        axes.set_yticks([], minor=True)


def _legend(axes: "Axes", lines: "list[Line2D]") -> None:
    drawn = [line for line in lines if len(line.get_xdata())]  # type: ignore[arg-type]
    if drawn:
        axes.legend(handles=drawn)
