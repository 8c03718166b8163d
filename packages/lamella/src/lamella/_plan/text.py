"""A plan as text: the step, its kinds of work, and the exposed traffic of its units."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Final

from lamella._plan.calibration import Calibration
from lamella._plan.run_plan import RunPlan
from lamella._plan.search import SearchedPlan
from lamella._plan.step_plan import UnitTraffic
from lamella._settings.sizes import size

_MOST_UNITS: Final = 8
_TOLERANCE: Final = 0.1
"""Part of the measured step by which a plan with fitted rates may miss it."""


def lines(plan: RunPlan) -> Iterator[str]:
    """Yield the lines of a plan."""
    step, ranks = plan.step, plan.config.parallel.ranks or 1
    yield (
        f"step of {ranks} ranks: {_ms(step.seconds)}, {plan.tokens_per_second:,.0f} tokens/s, "
        f"{plan.tokens_per_second / ranks:,.0f} a GPU, {step.flops / step.seconds / 1e12:,.0f} TFLOP/s a GPU"
    )
    memory = size(plan.estimate.total_nbytes)
    yield f"memory of a GPU: {memory}, {'within' if plan.fits else 'MORE THAN'} {plan.cluster.gpu_memory}"
    yield f"host: {_ms(step.host_seconds)} of launches, which the GPU waits for if they take longer than its work"
    yield ""
    yield f"  {'work alone':24s}{'ms':>10s}"
    for kind, seconds in sorted(step.kinds.items(), key=lambda pair: -pair[1]):
        yield f"  {kind:24s}{seconds * 1e3:10.1f}"
    yield ""
    yield f"  {'unit':24s}{'sent':>12s}{'gathers ms':>12s}{'exposed':>9s}{'reductions':>12s}{'exposed':>9s}"
    for unit, traffic in _units(step.units):
        yield _row(unit, [traffic])
    yield _row("all units", [*step.units.values()])
    for note in plan.estimate.notes:
        yield f"  note: {note}"


def search_lines(candidates: Sequence[SearchedPlan]) -> Iterator[str]:
    """Yield a table of stages and meshes, the fastest that fits first."""
    yield f"  {'step ms':>10s}{'tokens/s':>12s}{'GPU':>12s}{'exposed ms':>12s}  options"
    for index, candidate in enumerate(candidates):
        plan = candidate.plan
        mark = "->" if not index else "  " if plan.fits else " x"
        memory = size(plan.estimate.total_nbytes)
        times = f"{plan.step.seconds * 1e3:8.1f}{plan.tokens_per_second:12,.0f}{memory:>12s}"
        yield f"{mark}{times:>34s}{plan.step.exposed_seconds * 1e3:12.1f}  {candidate.flags}"


def calibration_lines(calibration: Calibration) -> Iterator[str]:
    """Yield the fitted rates."""
    measured, predicted = calibration.measured_seconds, calibration.predicted_seconds
    yield f"step: measured {_ms(measured)}, planned with the fitted rates {_ms(predicted)}"
    if not abs(predicted - measured) <= _TOLERANCE * measured:
        yield "  note: no likely rates explain the measured step. Check --step-time, in seconds, and the options."
    for name, number in asdict(calibration.cluster).items():
        yield f"  {name:24s}{number if isinstance(number, str) else format(number, '.4g'):>12s}"


def _units(units: Mapping[str, UnitTraffic]) -> list[tuple[str, UnitTraffic]]:
    """Return the units with the most exposed time, in the order of the step."""
    exposed = {unit: sum(traffic.exposed_seconds.values()) for unit, traffic in units.items()}
    chosen = sorted(units, key=lambda unit: -exposed[unit])[:_MOST_UNITS]
    return [(unit, traffic) for unit, traffic in units.items() if unit in chosen]


def _row(name: str, traffic: Sequence[UnitTraffic]) -> str:
    sent = sum(sum(unit.sent_nbytes.values()) for unit in traffic)
    columns = ""
    for kind in ("gather", "reduce"):
        seconds = sum(unit.seconds.get(kind, 0.0) for unit in traffic)
        exposed = sum(unit.exposed_seconds.get(kind, 0.0) for unit in traffic)
        columns += f"{seconds * 1e3:12.2f}{exposed * 1e3:9.2f}"
    return f"  {name:24s}{size(round(sent)):>12s}{columns}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"
