"""Axes fitted to a run's numbers: outliers of the first steps do not flatten the curve."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamella._record.axes import Axis, fitted_axis
from lamella._record.curves import chart
from lamella._record.plots import plot
from lamella._record.series import Series

LATER = [3.0 - step / 1000 for step in range(1000)]


@pytest.mark.parametrize("outlier", [11.0, 1e6])
def test_outliers_of_the_first_steps_do_not_flatten_the_curve(outlier: float) -> None:
    axis = fitted_axis([outlier] * 10 + LATER)
    assert not axis.is_log and axis.high < 3.2 and axis.low > 1.8


def test_a_curve_without_outliers_is_on_the_axis_as_a_whole() -> None:
    axis = fitted_axis(LATER)
    assert axis.low < min(LATER) and axis.high > max(LATER)


def test_numbers_over_a_large_ratio_have_a_logarithmic_axis() -> None:
    numbers = [10 * 0.99**step for step in range(1000)]
    axis = fitted_axis(numbers)
    assert axis.is_log and 0 < axis.low < numbers[-1]
    assert axis.fraction(math.sqrt(axis.low * axis.high)) == pytest.approx(0.5)
    assert not fitted_axis([-1.0, *numbers]).is_log and not fitted_axis(numbers, may_be_log=False).is_log
    assert fitted_axis(numbers, from_zero=True).low == 0


@given(st.lists(st.floats(-1e12, 1e12) | st.just(math.nan), max_size=50), st.booleans(), st.booleans())
def test_fitted_axes_have_a_length_and_ticks_within_their_bounds(
    numbers: list[float], may_be_log: bool, from_zero: bool
) -> None:
    axis = fitted_axis(numbers, may_be_log=may_be_log, from_zero=from_zero)
    assert axis.low < axis.high and -1 <= axis.fraction(0.0) <= 2
    ticks = axis.ticks()
    assert ticks == sorted(ticks) and len(ticks) <= 24
    assert all(-1e-6 <= axis.fraction(tick) <= 1 + 1e-6 for tick in ticks)


def test_a_logarithmic_axis_of_less_than_a_decade_has_ticks() -> None:
    assert Axis(low=1.5, high=8.0, is_log=True).ticks() == [2.0, 5.0]


def test_a_chart_of_a_long_curve_keeps_its_highest_point_and_stays_small() -> None:
    points = tuple((step, 100.0 if step == 7001 else 1.0 + step % 2) for step in range(100_000))
    drawn = chart("Loss", [Series(name="training", unit="nats/token", points=points)], may_be_log=False)
    assert len(drawn) < 60_000 and "1 of 100,000 points above the axis, up to 100" in drawn


def test_the_plot_has_both_losses_and_their_units_on_fitted_axes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    rows: list[dict[str, object]] = [{"step": step, "loss": loss} for step, loss in enumerate([11.0] * 10 + LATER)]
    rows += [{"step": step, "nats_per_byte": 1.2 - step / 2000} for step in (0, 500, 1000)]
    plot(rows, tmp_path / "loss.png")
    training, validation = figures[0].axes
    assert training.get_xlabel() == "step (optimizer steps)"
    assert training.get_ylabel() == "training loss (nats/token)" and training.get_ylim()[1] < 3.2
    assert validation.get_ylabel() == "validation loss (nats/byte)" and validation.get_ylim()[0] > 0.5
    assert [len(line.get_xdata()) for line in validation.lines] == [3]  # type: ignore[arg-type]
    plot([{"step": 1, "loss": 2.0}, {"step": 1, "nats_per_token": 2.0}], tmp_path / "loss.png")
    assert len(figures[1].axes) == 1 and len(figures[1].axes[0].lines) == 2
    plot([], tmp_path / "loss.png")
