"""A report as tables, as text and as JSON."""

import json
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict

from lamella_trace._report import OverlapReport, StepReport, Traffic, UnitReport
from lamella_trace._verdict import losses, verdict

Row = Sequence[str]

_WIDTH = 120


def headline(report: OverlapReport) -> str:
    """Return one line: rank, number of steps, kernels or operators, unit of time."""
    rank = "" if report.rank is None else f"rank {report.rank} of {report.num_ranks}, "
    events = "GPU kernels" if report.on_gpu else "operators of the host's main thread"
    steps = f"{len(report.steps)} step{'s' if len(report.steps) > 1 else ''}"
    return f"{rank}{steps}, {events}; milliseconds"


def step_table(report: OverlapReport) -> list[Row]:
    """Return a header and a row per step: compute, exposed (without a GPU: collectives) and idle add up to the span."""
    alone = "exposed" if report.on_gpu else "in collectives"
    header = ["step", "span", "compute", alone, "idle", "", "collectives", "copies", "optimizer", "host gaps"]
    return [header, *(_step_row(step) for step in report.steps)]


def _step_row(step: StepReport) -> Row:
    parts = [step.span, step.compute, step.exposed, step.idle]
    details = [step.collectives, step.whole.copies, step.optimizer, step.whole.host_gaps]
    return [step.name, *map(_ms, parts), "", *map(_ms, details)]


def unit_table(report: OverlapReport) -> list[Row]:
    """Return a header and a row per unit, the mean over steps. Columns without values are omitted."""
    roles = ["forward", "backward", "reduced", "exchanged", "other"]
    header = ["unit", *(cell for role in roles for cell in (role, "ms", "exposed", "GB/s")), "copies", "host gaps"]
    num_steps = len(report.steps)
    return _without_empty_columns(
        header, [_unit_row(unit, num_steps) for unit in (*report.total.units, report.total.whole)]
    )


def _without_empty_columns(header: Row, rows: Sequence[Row]) -> list[Row]:
    """The table without columns that have no values."""
    columns = zip(header, *rows, strict=True)
    return list(zip(*(column for column in columns if any(cell not in ("", "-") for cell in column[1:])), strict=True))


def node_table(report: OverlapReport) -> list[Row]:
    """Return a header and a row per layer of a schedule, the mean over steps: each node's time, and the exposed part.

    Empty for a report without nodes.
    """
    nodes = list(dict.fromkeys(exchange.node for exchange in report.total.nodes))
    layers = list(dict.fromkeys(exchange.layer for exchange in report.total.nodes))
    traffic = {(exchange.layer, exchange.node): exchange.traffic for exchange in report.total.nodes}
    cells = {key: _traffic_cells(node_traffic, len(report.steps))[1:3] for key, node_traffic in traffic.items()}
    header = ["node", *(cell for node in nodes for cell in (node, "exposed"))]
    rows = [[layer, *(cell for node in nodes for cell in cells.get((layer, node), ("", "")))] for layer in layers]
    return _without_empty_columns(header, rows)


NODE_CAPTION = "Mean per step: milliseconds of each layer's exchanges of tokens."


def unit_caption(report: OverlapReport) -> str:
    """Return the caption of the units' table."""
    counts = "Mean per step and unit: number of gathers in forward and in backward, and of reductions"
    if not report.on_gpu:
        return f"{counts}, and the main thread's time in them (ms)."
    return f"{counts}; their duration and exposed time (ms); and each rank's rate of sending."


def _unit_row(unit: UnitReport, num_steps: int) -> Row:
    cells = [cell for traffic in unit.traffic.values() for cell in _traffic_cells(traffic, num_steps)]
    return [unit.unit, *cells, _ms(unit.copies, num_steps), _ms(unit.host_gaps, num_steps)]


def _traffic_cells(traffic: Traffic, num_steps: int) -> Row:
    if not traffic.num:
        return ["", "", "", ""]
    rate = "-" if traffic.gb_per_s is None else f"{traffic.gb_per_s:.0f}"
    return [f"{traffic.num / num_steps:g}", _ms(traffic.duration, num_steps), _ms(traffic.exposed, num_steps), rate]


def _ms(value: float | None, num_steps: int = 1) -> str:
    return "-" if value is None else f"{value / num_steps:.2f}"


def as_text(report: OverlapReport) -> str:
    """Return the report for a terminal."""
    caption, conclusion = (textwrap.fill(text, _WIDTH) for text in (unit_caption(report), verdict(report)))
    nodes = [NODE_CAPTION, _aligned(node_table(report))] if report.total.nodes else []
    parts = [headline(report), _aligned(step_table(report)), caption, _aligned(unit_table(report)), *nodes, conclusion]
    return "\n\n".join(parts)


def _aligned(rows: Sequence[Row]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    align: list[Callable[[str, int], str]] = [str.ljust, *[str.rjust] * (len(widths) - 1)]
    lines = ["  ".join(f(cell, width) for f, cell, width in zip(align, row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def as_json(report: OverlapReport) -> str:
    """Return the report for programs: the attributes of `OverlapReport` but its timeline, in milliseconds and bytes.

    The values of `total` are sums over all steps. Unknown values are null.
    """
    values = {
        "rank": report.rank,
        "num_ranks": report.num_ranks,
        "on_gpu": report.on_gpu,
        "steps": [_step_values(step) for step in report.steps],
        "total": _step_values(report.total),
        "losses": [asdict(loss) for loss in losses(report)],
        "verdict": verdict(report),
    }
    return json.dumps(values, indent=2)


def _step_values(step: StepReport) -> dict[str, object]:
    by_kind = {kind.name.lower(): ms for kind, ms in step.by_kind.items()}
    return asdict(step) | {"by_kind": by_kind}
