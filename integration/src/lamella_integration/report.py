"""What a benchmark found: rows, the comparison of their losses, and the table, JSON and plot made of them."""

import json
import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

PEAK_TFLOPS = 989.0  # Dense bf16 of one H100 or H200.

# Note [Loss tolerances]
#   The first loss is a forward pass over equal bf16 weights. Backends that compute alike agree to the last bit;
#   autocast keeps the residual stream in fp32. bf16 rounds each activation by up to 2**-9, and the mean over
#   thousands of tokens averages that away: 1e-3 is generous. The last loss has gone through a dozen AdamW
#   updates, whose first ones move every weight by the sign of its gradient, whatever its size, so roundings of small
#   gradients count in full. A reduction that drops a rank, or a gradient read after it was freed, moves the loss
#   by far more than 2 %. (A gradient scaled as a whole does not: AdamW divides the scale out.)
FIRST_LOSS_TOLERANCE = 1e-3
LAST_LOSS_TOLERANCE = 2e-2
LEAK_TOLERANCE_GIB = 0.25  # cuBLAS keeps a workspace of 32 MiB for each stream that it was used on.


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One backend's figures, the slowest or fullest rank's. Losses are means over ranks.

    `built_gib` is allocated before the first step; `at_rest_gib` between steps, with optimizer state and
    without gradients. Memory is counted without what was allocated before the backend was built.
    """

    step_s: float
    tokens_per_s: float
    tflops: float
    peak_allocated_gib: float
    peak_reserved_gib: float
    built_gib: float
    at_rest_gib: float
    first_loss: float
    last_loss: float
    trained: bool
    leaked_gib: float = 0.0

    @property
    def mfu(self) -> float:
        return self.tflops / PEAK_TFLOPS

    def with_leak(self, leaked_gib: float) -> "Measurement":
        return replace(self, leaked_gib=leaked_gib)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A backend that raised."""

    error: str
    leaked_gib: float = 0.0

    def with_leak(self, leaked_gib: float) -> "Failure":
        return replace(self, leaked_gib=leaked_gib)


@dataclass(kw_only=True)
class Report:
    """Rows by backend, in the order they ran."""

    title: str
    environment: dict[str, str]
    rows: dict[str, Measurement | Failure] = field(default_factory=dict)

    def measurements(self) -> dict[str, Measurement]:
        return {name: row for name, row in self.rows.items() if isinstance(row, Measurement)}

    def ratio_of_ideal(self, name: str) -> float | None:
        measurements = self.measurements()
        if "ideal" not in measurements:
            return None
        return measurements[name].tokens_per_s / measurements["ideal"].tokens_per_s

    def disagreements(self) -> dict[str, str]:
        """Backends whose losses are not those of the first that trained, with both values."""
        trained = {name: row for name, row in self.measurements().items() if row.trained}
        if not trained:
            return {}
        reference = next(iter(trained))
        return {
            name: text
            for name, row in self.measurements().items()
            if (text := _disagreement(row, trained[reference], reference))
        }

    def is_sound(self) -> bool:
        """Whether every backend ran and the losses agree."""
        return len(self.measurements()) == len(self.rows) and not self.disagreements()

    def markdown(self) -> str:
        """The table that people paste."""
        header = "| backend | tokens/s/GPU | of ideal | step s | MFU | peak GiB | reserved | at rest | built "
        header += "| first loss | last loss | notes |"
        rule = "|---|" + "--:|" * 10 + "---|"
        lines = [self._line(name, row) for name, row in self.rows.items()]
        environment = ", ".join(f"{key} {value}" for key, value in self.environment.items())
        return "\n".join([f"**{self.title}** ({environment})", "", header, rule, *lines, ""])

    def write(self, folder: Path) -> None:
        """Write `report.json`, `report.md` and, where matplotlib is installed, `report.png`."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.json").write_text(json.dumps(self._as_json(), indent=2) + "\n")
        (folder / "report.md").write_text(self.markdown())
        self._plot(folder / "report.png")

    def _line(self, name: str, row: Measurement | Failure) -> str:
        if isinstance(row, Failure):
            return f"| {name} |" + " - |" * 10 + f" {' '.join(row.error.split())[:300]} |"
        ratio = self.ratio_of_ideal(name)
        figures = [
            f"{row.tokens_per_s:,.0f}",
            "-" if ratio is None else f"{ratio:.1%}",
            f"{row.step_s:.4f}",
            f"{row.mfu:.1%}",
            *(f"{gib:.1f}" for gib in (row.peak_allocated_gib, row.peak_reserved_gib)),
            *(f"{gib:.1f}" for gib in (row.at_rest_gib, row.built_gib)),
            f"{row.first_loss:.5f}",
            f"{row.last_loss:.5f}" if row.trained else "-",
            self._notes(name, row),
        ]
        return f"| {name} | " + " | ".join(figures) + " |"

    def _notes(self, name: str, row: Measurement) -> str:
        leak = f"leaked {row.leaked_gib:.2f} GiB" if row.leaked_gib > LEAK_TOLERANCE_GIB else ""
        return "; ".join(filter(None, [self.disagreements().get(name, ""), leak]))

    def _as_json(self) -> dict[str, object]:
        rows = {
            name: asdict(row)
            | ({"mfu": row.mfu, "of_ideal": self.ratio_of_ideal(name)} if isinstance(row, Measurement) else {})
            for name, row in self.rows.items()
        }
        return {
            "title": self.title,
            "environment": self.environment,
            "rows": rows,
            "disagreements": self.disagreements(),
        }

    def _plot(self, path: Path) -> None:
        try:
            import matplotlib as mpl
        except ModuleNotFoundError:
            return
        mpl.use("Agg")
        from matplotlib import pyplot as plt

        measurements = self.measurements()
        names = list(measurements)
        figure, (speed, memory) = plt.subplots(1, 2, figsize=(12, 0.5 * len(names) + 1.8), sharey=True)
        speed.barh(names, [row.tokens_per_s for row in measurements.values()], color="tab:blue")
        speed.set_xlabel("tokens/s/GPU")
        memory.barh(names, [row.peak_allocated_gib for row in measurements.values()], color="tab:orange", label="peak")
        memory.barh(names, [row.at_rest_gib for row in measurements.values()], color="tab:gray", label="at rest")
        memory.set_xlabel("allocated GiB")
        memory.legend()
        speed.invert_yaxis()
        figure.suptitle(self.title)
        figure.tight_layout()
        figure.savefig(path, dpi=120)
        plt.close(figure)


def _disagreement(row: Measurement, reference: Measurement, reference_name: str) -> str:
    pairs = [("first", row.first_loss, reference.first_loss, FIRST_LOSS_TOLERANCE)]
    if row.trained:
        pairs.append(("last", row.last_loss, reference.last_loss, LAST_LOSS_TOLERANCE))
    return "; ".join(
        f"LOSS DISAGREES: expected a {which} loss of {expected:.5f} as {reference_name} has, got {loss:.5f}"
        for which, loss, expected, tolerance in pairs
        if not math.isclose(loss, expected, rel_tol=tolerance)
    )
