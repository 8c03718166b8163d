"""A benchmark's results: rows, the comparison of losses, and the tables, JSON and plot."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PEAK_TFLOPS = 989.0  # Dense bf16 of one H100 or H200.

# Note [Loss tolerances]
#   The first loss is a forward pass over equal bf16 weights. Backends with the same arithmetic agree to the last bit;
#   autocast keeps the residual stream in fp32. bf16 rounds each activation by up to 2**-9, and the mean over
#   thousands of tokens averages the rounding out: 1e-3 is generous. AdamW's first updates move every weight by the
#   sign of the gradient, of any size, so roundings of small gradients count in full, and on a steeply falling loss two
#   runs of one backend end 8 % apart. Their means over all steps differ by at most 0.6 %, and by 0.2 % for longer
#   sequences. A reduction without one of four ranks moves the mean by more than 1 %, even when little is learnt. (A
#   scaled gradient does not move the mean: AdamW divides the scale out.)
FIRST_LOSS_TOLERANCE = 1e-3
MEAN_LOSS_TOLERANCE = 1e-2
LEAK_TOLERANCE_GIB = 0.25  # cuBLAS keeps a workspace of 32 MiB per stream.

_COLUMNS = [
    *("tokens/s/GPU", "of ideal", "x FSDP2", "step s", "MFU", "peak GiB", "reserved", "at rest", "built"),
    *("first loss", "mean loss", "last loss", "notes"),
]


@dataclass(frozen=True, kw_only=True)
class Phases:
    """Milliseconds of a step on rank 0's device. Kernels running at the same time count in each of their phases.

    `compute_ms` is matrix products, attention and elementwise kernels; `copies_ms` includes fills; `exposed_ms` is the
    time of collectives without any other kernel, `idle_ms` the time without any kernel.
    """

    span_ms: float
    compute_ms: float
    collectives_ms: float
    exposed_ms: float
    copies_ms: float
    optimizer_ms: float
    idle_ms: float


@dataclass(frozen=True, kw_only=True)
class HostTime:
    """Microseconds of the slowest rank's host per unit, forward and backward, without waits for the device.

    `total_us` is the whole time divided by the number of units. `above_ideal_us` is the excess over the unsharded
    model: hooks, collectives, casts and copies.
    """

    total_us: float
    above_ideal_us: float


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One backend's figures: times of the slowest rank, memory of the fullest rank.

    `losses` holds the mean over ranks for every step, warm-up steps included. `step_s` is the slowest rank's median
    step; `steps_s` holds the slowest rank's time for each measured step. `built_gib` is allocated before the first
    step; `at_rest_gib` between steps, with optimizer state and without gradients. Allocated memory excludes memory
    allocated before the backend was built; reserved memory is the whole process's, including the copy engines' windows
    of earlier rows. `trouble` is the error of a failed measurement of phases or host time.
    """

    step_s: float
    tokens_per_s: float
    tflops: float
    peak_allocated_gib: float
    peak_reserved_gib: float
    built_gib: float
    at_rest_gib: float
    losses: tuple[float, ...]
    trained: bool
    steps_s: tuple[float, ...] = ()
    phases: Phases | None = None
    host: HostTime | None = None
    trouble: str = ""
    leaked_gib: float = 0.0

    @property
    def first_loss(self) -> float:
        return self.losses[0]

    @property
    def mean_loss(self) -> float:
        return fmean(self.losses)

    @property
    def last_loss(self) -> float:
        return self.losses[-1]

    @property
    def mfu(self) -> float:
        return self.tflops / PEAK_TFLOPS

    def with_leak(self, leaked_gib: float) -> "Measurement":
        return replace(self, leaked_gib=leaked_gib)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The error of a failed backend."""

    error: str
    leaked_gib: float = 0.0

    def with_leak(self, leaked_gib: float) -> "Failure":
        return replace(self, leaked_gib=leaked_gib)


@dataclass(kw_only=True)
class BenchmarkReport:
    """Rows by backend, in the order of measurement."""

    title: str
    environment: dict[str, str]
    command: str = ""
    rows: dict[str, Measurement | Failure] = field(default_factory=dict)

    def measurements(self) -> dict[str, Measurement]:
        return {name: row for name, row in self.rows.items() if isinstance(row, Measurement)}

    def ratio(self, name: str, of: str) -> float | None:
        """Return a row's speed divided by that of the first row of backend `of`; None without a row of `of`."""
        rows = [row for other, row in self.measurements().items() if _backend(other) == of]
        return self.measurements()[name].tokens_per_s / rows[0].tokens_per_s if rows else None

    def disagreements(self) -> dict[str, str]:
        """Describe backends with losses outside the tolerances of the first trained backend's of the same format."""
        first: dict[str, tuple[str, Measurement]] = {}
        for name, row in self.measurements().items():
            if row.trained:
                first.setdefault(_number_format(name), (name, row))
        return {
            name: text
            for name, row in self.measurements().items()
            if (reference := first.get(_number_format(name)))
            and (text := _disagreement(row, reference[1], reference[0]))
        }

    def is_sound(self) -> bool:
        """True when every backend ran, every requested measurement exists, and the losses agree."""
        measurements = self.measurements()
        troubled = any(row.trouble for row in measurements.values())
        return len(measurements) == len(self.rows) and not troubled and not self.disagreements()

    def markdown(self) -> str:
        """Return the tables in Markdown."""
        environment = ", ".join(f"{key} {value}" for key, value in self.environment.items())
        command = [f"`{self.command}`", ""] if self.command else []
        rows = {name: self._cells(name, row) for name, row in self.rows.items()}
        lines = [f"**{self.title}** ({environment})", "", *command, *_table(_COLUMNS, rows), ""]
        return "\n".join([*lines, *self._phases_table()])

    def write(self, folder: Path) -> None:
        """Write `report.json`, `report.md` and, with matplotlib installed, `report.png`."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.json").write_text(json.dumps(self._as_json(), indent=2) + "\n")
        (folder / "report.md").write_text(self.markdown())
        self._plot(folder / "report.png")

    def _cells(self, name: str, row: Measurement | Failure) -> list[str]:
        if isinstance(row, Failure):
            return ["-"] * (len(_COLUMNS) - 1) + [" ".join(row.error.split())[:300]]
        to_ideal, to_fsdp2 = self.ratio(name, "ideal"), self.ratio(name, "fsdp2")
        return [
            f"{row.tokens_per_s:,.0f}",
            "-" if to_ideal is None else f"{to_ideal:.1%}",
            "-" if to_fsdp2 is None else f"{to_fsdp2:.2f}",
            f"{row.step_s:.4f}",
            f"{row.mfu:.1%}",
            *(f"{gib:.1f}" for gib in (row.peak_allocated_gib, row.peak_reserved_gib)),
            *(f"{gib:.1f}" for gib in (row.at_rest_gib, row.built_gib)),
            f"{row.first_loss:.5f}",
            *([f"{row.mean_loss:.5f}", f"{row.last_loss:.5f}"] if row.trained else ["-", "-"]),
            self._notes(name, row),
        ]

    def _phases_table(self) -> list[str]:
        rows = {name: row for name, row in self.measurements().items() if row.phases or row.host}
        if not rows:
            return []
        columns = [field.name.removesuffix("_ms") for field in fields(Phases)]
        columns += ["host us a unit", "above ideal's"]
        says = "Milliseconds of a step on rank 0's device (a profile of two steps), and microseconds of its host:"
        return [says, "", *_table(columns, {name: _phase_cells(row) for name, row in rows.items()}), ""]

    def _notes(self, name: str, row: Measurement) -> str:
        leak = f"leaked {row.leaked_gib:.2f} GiB" if row.leaked_gib > LEAK_TOLERANCE_GIB else ""
        return "; ".join(filter(None, [self.disagreements().get(name, ""), leak, row.trouble]))

    def _as_json(self) -> dict[str, object]:
        rows = {
            name: asdict(row) | (self._derived(name, row) if isinstance(row, Measurement) else {})
            for name, row in self.rows.items()
        }
        return {
            "title": self.title,
            "command": self.command,
            "environment": self.environment,
            "rows": rows,
            "disagreements": self.disagreements(),
        }

    def _derived(self, name: str, row: Measurement) -> dict[str, float | None]:
        return {"mfu": row.mfu, "of_ideal": self.ratio(name, "ideal"), "of_fsdp2": self.ratio(name, "fsdp2")}

    def _plot(self, path: Path) -> None:
        try:
            import matplotlib as mpl
        except ModuleNotFoundError:
            return
        mpl.use("Agg")
        from matplotlib import pyplot as plt

        measurements = self.measurements()
        names = list(measurements)
        has_curve = sum(_backend(name) == "lamella" for name in names) > 1
        num_axes = 3 if has_curve else 2
        figure, axes = plt.subplots(1, num_axes, figsize=(6 * num_axes, max(0.5 * len(names) + 1.8, 5 * has_curve)))
        speed, memory = axes[:2]
        speed.barh(names, [row.tokens_per_s for row in measurements.values()], color="tab:blue")
        speed.set_xlabel("tokens/s/GPU")
        memory.barh(names, [row.peak_allocated_gib for row in measurements.values()], color="tab:orange", label="peak")
        memory.barh(names, [row.at_rest_gib for row in measurements.values()], color="tab:gray", label="at rest")
        memory.set_xlabel("allocated GiB")
        memory.legend()
        memory.tick_params(labelleft=False)
        speed.invert_yaxis()
        memory.invert_yaxis()
        if has_curve:
            _plot_curve(axes[2], measurements)
        figure.suptitle(self.title)
        figure.tight_layout()
        figure.savefig(path, dpi=120)
        plt.close(figure)


def _plot_curve(axis: "Axes", measurements: dict[str, Measurement]) -> None:
    """Plot speed against memory: the trade of each option of lamella."""
    points = {name: (row.peak_allocated_gib, row.tokens_per_s) for name, row in measurements.items()}
    ours = sorted(point for name, point in points.items() if _backend(name) == "lamella")
    axis.plot(*zip(*ours, strict=True), color="tab:blue", linewidth=0.8)
    for name, (gib, tokens_per_s) in points.items():
        axis.scatter(gib, tokens_per_s, color="tab:blue" if _backend(name) == "lamella" else "tab:gray")
        axis.annotate(name, (gib, tokens_per_s), xytext=(4, 4), textcoords="offset points", fontsize=7)
    axis.margins(x=0.25)  # for the names
    axis.set_xlabel("peak allocated GiB")
    axis.set_ylabel("tokens/s/GPU")


def _backend(name: str) -> str:
    """Return the backend of a row's name, without options and repetition number."""
    return name.partition(":")[0].partition(" ")[0]


def _number_format(name: str) -> str:
    """Return the scales of a row's float8 operands, by the row's name; "" for bf16."""
    match = re.search(r"float8=(\w+)", name)
    kind = "" if match is None else match[1]
    return "tensor" if kind in ("delayed", "torchao") else kind


def _table(columns: Sequence[str], rows: dict[str, list[str]]) -> list[str]:
    last = "---" if columns[-1] == "notes" else "--:"
    header = [f"| backend | {' | '.join(columns)} |", "|---|" + "--:|" * (len(columns) - 1) + f"{last}|"]
    return header + [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()]


def _phase_cells(row: Measurement) -> list[str]:
    phases = ["-"] * len(fields(Phases)) if row.phases is None else [f"{ms:.1f}" for ms in astuple(row.phases)]
    host = ["-"] * len(fields(HostTime)) if row.host is None else [f"{us:.0f}" for us in astuple(row.host)]
    return phases + host


def _disagreement(row: Measurement, reference: Measurement, reference_name: str) -> str:
    pairs = [("first", row.first_loss, reference.first_loss, FIRST_LOSS_TOLERANCE)]
    if row.trained:
        pairs.append(("mean", row.mean_loss, reference.mean_loss, MEAN_LOSS_TOLERANCE))
    return "; ".join(
        f"LOSS DISAGREES: expected a {kind} loss of {expected:.5f} as {reference_name} has, got {loss:.5f}"
        for kind, loss, expected, tolerance in pairs
        if not math.isclose(loss, expected, rel_tol=tolerance)
    )
