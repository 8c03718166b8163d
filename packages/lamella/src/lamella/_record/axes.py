"""The axis of a plot, fitted to its numbers: a few outliers of the first steps do not flatten the curve."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

_FIRST_SHARE: Final = 0.05
"""The share of a run's steps in which outliers are expected."""

_TAIL: Final = 0.005
_LARGEST_STRETCH: Final = 2.0
"""An axis that would be longer than this by outliers, relative to the axis of the bulk, leaves them out."""

_LOG_RATIO: Final = 20.0
_MARGIN: Final = 0.05
_MOST_TICKS: Final = 6


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A range of numbers on a linear or a logarithmic scale.

    Attributes:
        low: The number at the beginning of the axis.
        high: The number at the end of the axis, above `low`.
        is_log: The scale is logarithmic, and `low` is positive.
    """

    low: float
    high: float
    is_log: bool = False

    def fraction(self, number: float) -> float:
        """Return the place of a number: 0 at `low`, 1 at `high`; outside the axis within an axis' length of it."""
        low, high = _scaled(self.low, self.is_log), _scaled(self.high, self.is_log)
        if self.is_log and number <= 0:
            return -1.0
        return min(2.0, max(-1.0, (_scaled(number, self.is_log) - low) / (high - low)))

    def ticks(self) -> list[float]:
        """Return round numbers along the axis, ascending."""
        return self._log_ticks() if self.is_log else self._linear_ticks()

    def _linear_ticks(self) -> list[float]:
        power = 10.0 ** math.floor(math.log10((self.high - self.low) / _MOST_TICKS))
        spacing = next(
            power * factor for factor in (1, 2, 5, 10) if power * factor * _MOST_TICKS >= self.high - self.low
        )
        first, last = math.ceil(self.low / spacing - 1e-9), math.floor(self.high / spacing + 1e-9)
        return [number * spacing for number in range(first, last + 1)]

    def _log_ticks(self) -> list[float]:
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        factors = (1, 2, 5) if len(decades) <= 3 else (1,)
        stride = max(1, len(decades) // _MOST_TICKS)
        ticks = (factor * 10.0**decade for decade in decades[::stride] for factor in factors)
        return [tick for tick in ticks if self.low <= tick <= self.high]


def fitted_axis(numbers: Iterable[float], *, may_be_log: bool = True, from_zero: bool = False) -> Axis:
    """Return the axis on which the bulk of a run's numbers fills the plot.

    Outliers are left out where they would more than double the axis. The scale is logarithmic where the bulk spans a
    factor of 20 or more.

    Args:
        numbers: Finite numbers in the order of the steps; none of them gives the axis from 0 to 1.
        may_be_log: Allow a logarithmic scale.
        from_zero: Begin at 0, for amounts such as bytes or tokens per second, on a linear scale.
    """
    ordered = [number for number in numbers if math.isfinite(number)]
    if not ordered:
        return Axis(low=0.0, high=1.0)
    bulk = _bulk(ordered)
    is_log = may_be_log and not from_zero and min(ordered) > 0 and bulk[-1] >= _LOG_RATIO * bulk[0]
    low, high = (_scaled(bound, is_log) for bound in (bulk[0], bulk[-1]))
    lowest, highest = (_scaled(bound, is_log) for bound in (min(ordered), max(ordered)))
    if highest - lowest <= _LARGEST_STRETCH * (high - low):
        low, high = lowest, highest
    if from_zero:
        return Axis(low=0.0, high=high * (1 + _MARGIN) if high > 0 else 1.0)
    margin = _MARGIN * (high - low) or 0.1 * abs(high) or 0.5
    bounds = (low - margin, high + margin)
    return Axis(low=_unscaled(bounds[0], is_log), high=_unscaled(bounds[1], is_log), is_log=is_log)


def _bulk(ordered: Sequence[float]) -> list[float]:
    """Return the sorted numbers without those of the first steps, and without the tails."""
    later = sorted(ordered[int(_FIRST_SHARE * len(ordered)) :])
    num_cut = int(_TAIL * len(later))
    return later[num_cut : len(later) - num_cut]


def _scaled(number: float, is_log: bool) -> float:
    return math.log10(number) if is_log else number


def _unscaled(number: float, is_log: bool) -> float:
    return 10.0**number if is_log else number
