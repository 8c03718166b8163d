"""The estimate of memory beside `torch.cuda.max_memory_allocated`, row by row.

    python -m lamella_integration.bench_estimate --ranks 2 --out estimate.json
    python -m lamella_integration.bench_estimate --ranks 2 --out estimate.json --rows qwen3 "llama --stage 2"
    python -m lamella_integration.bench_estimate --ranks 2 --out estimate.json --seed 7 --drawn 10

A row is a model with options: of `lamella train` for transformers' models, of `estimate_decoder` for the reference
decoder. Processes without a GPU estimate all rows, while the ranks take a few real steps of the rows in turn. A
row that fails or outlasts `--row-timeout` ends the ranks, and fresh ranks take the next row. `--rows` keeps the rows
with any of the texts. `--device cpu` counts the bytes of CPU tensors, for a trial.
"""

import argparse
import json
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import active_children, get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from lamella_integration.estimate_ranks import RankProcesses
from lamella_integration.estimate_rows import drawn_rows, fixed_rows
from lamella_integration.launch import leave

_GIB: Final = 1 << 30
_TOLERANCE: Final = 0.03
_SHARE_WITHIN: Final = 0.9
_MOST_LEFTOVER_NBYTES: Final = 64 << 20
_LAST_S: Final = 20.0


@dataclass(kw_only=True)
class EstimateRow:
    """A row of the table.

    Attributes:
        name: The model and the options.
        estimated: `estimate_rows.estimated`; empty before the end, and after a failure.
        measured: `estimate_peer`'s record of every rank; empty likewise.
        errors: Lines on failures.
        seconds: Durations of the estimate, and of the steps with the making of the model.
    """

    name: str
    estimated: Mapping[str, Any] = field(default_factory=dict)
    measured: Sequence[Mapping[str, Any]] = ()
    errors: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def measured_nbytes(self) -> int:
        """The largest peak of any rank."""
        return max(int(record["peak_nbytes"]) for record in self.measured)

    @property
    def difference(self) -> float | None:
        """The estimate over the measured peak, less 1; None if either is missing."""
        if not (self.estimated and self.measured):
            return None
        return float(self.estimated["allocated_nbytes"]) / self.measured_nbytes - 1

    def line(self) -> str:
        """Return the row of the table."""
        estimated, measured = self.estimated, self.measured
        at_rest = [
            _gib(sum(estimated["at_rest"].values()) if estimated else None),
            _gib(max(record["at_rest_nbytes"] for record in measured) if measured else None),
        ]
        peaks = [
            _gib(estimated["allocated_nbytes"] if estimated else None),
            _gib(self.measured_nbytes if measured else None),
        ]
        difference = "-" if self.difference is None else f"{self.difference:+.1%}"
        moment = estimated["peak_moment"] if estimated else "-"
        trouble = "; ".join(error.splitlines()[-1][:200] for error in self.errors)
        if measured and (leftover := max(record["leftover_nbytes"] for record in measured)) > _MOST_LEFTOVER_NBYTES:
            trouble += f" {_gib(leftover)} GiB of the row before were left"
        return f"| {' | '.join([self.name, *at_rest, *peaks, difference, moment, trouble])} |"

    def detail(self) -> str:
        """Return the kinds of the estimated peak, and the moments whose estimate is furthest off."""
        if not self.estimated:
            return ""
        kinds = ", ".join(f"{kind} {_gib(nbytes)}" for kind, nbytes in self.estimated["peak_kinds"].items())
        moments = self.measured[0].get("moments", {}) if self.measured else {}
        off = [
            (estimate / moments[name] - 1, name)
            for name, estimate in self.estimated["moments"].items()
            if moments.get(name)
        ]
        off.sort(key=lambda pair: -abs(pair[0]))
        furthest = ", ".join(f"{name} {difference:+.1%}" for difference, name in off[:3])
        return f"    kinds: {kinds}" + (f"; furthest moments: {furthest}" if furthest else "")


def main() -> None:
    """Estimate and measure the rows, print a table, and write the JSON after each row."""
    options = _options()
    end = time.monotonic() + options.seconds
    names = fixed_rows() if options.fixed else []
    names += drawn_rows(options.seed, options.drawn)
    names.sort(key=lambda name: "--compile" in name)  # Compilation takes the time of several rows.
    rows = [EstimateRow(name=name) for name in names if not options.rows or any(part in name for part in options.rows)]
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # of the estimating processes
    pool = _pool(options)
    printed: set[str] = set()
    with TemporaryDirectory() as folder:
        estimates = {row.name: pool.submit(_estimate, row.name, options, folder) for row in rows}
        ranks = RankProcesses(options, Path(folder), gpus, ["--moments"])
        print(_HEADER, flush=True)
        try:
            for row in rows:
                if options.steps and time.monotonic() > end:
                    row.errors.append("no time was left to measure")
                elif options.steps:
                    _measure(row, ranks)
                _finish(rows, estimates, end if not options.steps else 0.0)
                _write(options.out, rows, options)
                _print_ended([r for r in rows if r.measured or r.errors or not options.steps], printed)
        finally:
            ranks.stop()
        _finish(rows, estimates, end + _LAST_S)
        _write(options.out, rows, options)
        _print_ended(rows, printed)
        pool.shutdown(wait=False, cancel_futures=True)
        for process in active_children():
            process.kill()
    print(f"\n{_HEADER}", *(row.line() for row in rows), "", _summary(rows), sep="\n", flush=True)
    leave(0)  # An exit would wait for abandoned estimates.


_COLUMNS: Final = ("row", "rest est. GiB", "rest", "peak est. GiB", "peak", "difference", "at", "trouble")
_HEADER: Final = f"| {' | '.join(_COLUMNS)} |\n|---|--:|--:|--:|--:|--:|---|---|"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rows", nargs="*", default=[], metavar="SUBSTRING")
    parser.add_argument("--no-fixed", dest="fixed", action="store_false", help="drawn rows alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drawn", type=int, default=0, help="further rows, drawn by the seed")
    parser.add_argument(
        "--steps", type=int, default=4, help="steps of a row, whose peak is of all but the first; 0: none"
    )
    parser.add_argument("--row-timeout", type=float, default=75.0, help="seconds")
    parser.add_argument("--seconds", type=float, default=520.0, help="no row begins after these")
    parser.add_argument("--processes", type=int, help="processes that estimate (default: half of the cores)")
    parser.add_argument("--tiny", action="store_true", help="cut the models, for a trial")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def _pool(options: argparse.Namespace) -> ProcessPoolExecutor:
    count = options.processes or max(1, len(os.sched_getaffinity(0)) // 2)
    return ProcessPoolExecutor(count, mp_context=get_context("spawn"))


def _estimate(name: str, options: argparse.Namespace, folder: str) -> tuple[dict[str, Any], float]:
    from lamella_integration.estimate_rows import estimated

    start = time.monotonic()
    values = estimated(name, Path(folder), options.ranks, options.device, is_tiny=options.tiny)
    return values, time.monotonic() - start


def _measure(row: EstimateRow, ranks: RankProcesses) -> None:
    measurement = ranks.measure(row.name)
    row.measured, row.seconds["steps"] = measurement.records, measurement.seconds
    row.errors += measurement.errors


def _finish(rows: Sequence[EstimateRow], estimates: Mapping[str, Future[Any]], end: float) -> None:
    """Take over the estimates that end before a time of the monotonic clock."""
    for row in rows:
        future = estimates[row.name]
        if "estimate" in row.seconds:
            continue
        try:
            row.estimated, row.seconds["estimate"] = future.result(timeout=max(0.0, end - time.monotonic()))
        except TimeoutError:
            continue
        except Exception as error:  # noqa: BLE001  A row's failure leaves the remaining rows.
            row.seconds["estimate"] = 0.0
            row.errors.append(f"estimate: {type(error).__name__}: {str(error).strip()[:600]}")


def _print_ended(rows: Sequence[EstimateRow], printed: set[str]) -> None:
    """Print the rows whose estimate has ended, once."""
    for row in rows:
        if "estimate" in row.seconds and row.name not in printed:
            printed.add(row.name)
            print(row.line(), row.detail(), sep="\n", flush=True)


def _write(out: Path | None, rows: Sequence[EstimateRow], options: argparse.Namespace) -> None:
    if out is None:
        return
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    values = {
        "options": settings,
        "rows": [asdict(row) | {"difference": row.difference} for row in rows if row.measured or row.seconds],
    }
    staged = out.with_name(f"{out.name}.partial")  # A run cut off leaves the last complete file.
    staged.write_text(json.dumps(values, indent=1) + "\n")
    staged.replace(out)


def _summary(rows: Sequence[EstimateRow]) -> str:
    differences = [row.difference for row in rows if row.difference is not None]
    if not differences:
        return "no row has an estimate and a measured peak"
    within = sum(abs(difference) <= _TOLERANCE for difference in differences)
    lowest = min(differences)
    is_met = within >= _SHARE_WITHIN * len(differences) and lowest >= -_TOLERANCE
    return (
        f"{within} of {len(differences)} rows within {_TOLERANCE:.0%}, lowest {lowest:+.1%}, highest "
        f"{max(differences):+.1%}, {len(rows) - len(differences)} rows without a comparison: "
        f"{'met' if is_met else 'not met'}"
    )


def _gib(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / _GIB:.2f}"


if __name__ == "__main__":
    main()
