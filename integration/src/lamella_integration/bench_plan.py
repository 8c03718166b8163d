"""Planned beside measured times of steps: calibrated on one row, and predicted for the rest.

    python -m lamella_integration.bench_plan --ranks 2 --out plan.json
    python -m lamella_integration.bench_plan --ranks 2 --out plan.json --rows "llama" --calibrate-on "qwen3 ..."
    python -m lamella_integration.bench_plan --again plan.json --trace trace.json --out again.json

A row is a model with options, as in `bench_estimate`. The ranks take steps of the rows in turn; then processes without
a GPU record the works of all rows, which would take cores from the ranks' hosts meanwhile. The first row is profiled
too, rates are fitted to the profile, and the steps of the remaining rows are planned with the rates. `--traces` keeps
the profile. `--again` plans the rows of an earlier file anew, without steps, from the measured times in the file and
the kept trace.
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
from lamella_integration.launch import leave

_TOLERANCE: Final = 0.10
_LEAST_DIFFERENCE: Final = 0.03
_SHORT: Final = "--batch-size 8 --sequence-length 2048"
ROWS: Final = (
    f"llama {_SHORT}",
    f"llama {_SHORT} --stage 2",
    f"llama {_SHORT} --stage 1",
    f"llama {_SHORT} --recompute selective",
    f"llama {_SHORT} --recompute full",
    f"llama {_SHORT} --reduce bf16",
    "llama --batch-size 2 --sequence-length 4096",
    "llama --batch-size 4 --sequence-length 1024",
    "llama --batch-size 16 --accumulation 4 --sequence-length 2048",
    f"qwen3 {_SHORT}",
    "decoder 1b --tokens 4096",
    "decoder 5b --tokens 1024",
    "decoder 5b --tokens 4096",
)


@dataclass(kw_only=True)
class PlanRow:
    """A row of the table.

    Attributes:
        name: The model and the options.
        measured: `plan_peer`'s record of every rank; empty after a failure.
        planned: The plan of the row; empty likewise.
        errors: Lines on failures.
        seconds: Times of the parts of the measurement.
    """

    name: str
    measured: Sequence[Mapping[str, Any]] = ()
    planned: Mapping[str, Any] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def measured_seconds(self) -> float:
        """The median step of the slowest rank."""
        return max(float(record["seconds"]) for record in self.measured)

    @property
    def difference(self) -> float | None:
        """The planned over the measured time, less 1; None if either is missing."""
        if not (self.measured and self.planned):
            return None
        return float(self.planned["seconds"]) / self.measured_seconds - 1

    def line(self) -> str:
        """Return the row of the table."""
        planned = self.planned
        difference = "-" if self.difference is None else f"{self.difference:+.1%}"
        cells = [
            self.name,
            f"{self.measured_seconds * 1e3:.1f}" if self.measured else "-",
            f"{planned['seconds'] * 1e3:.1f}" if planned else "-",
            difference,
            f"{planned['host_seconds'] * 1e3:.1f}" if planned else "-",
            f"{planned['exposed_seconds'] * 1e3:.1f}" if planned else "-",
            "; ".join(error.splitlines()[-1][:200] for error in self.errors),
        ]
        return f"| {' | '.join(cells)} |"


_COLUMNS: Final = ("row", "measured ms", "planned ms", "difference", "host ms", "exposed ms", "trouble")
_HEADER: Final = f"| {' | '.join(_COLUMNS)} |\n|---|--:|--:|--:|--:|--:|---|"


def main() -> None:
    """Measure and plan the rows, print a table, and write the JSON."""
    options = _options()
    rows = [PlanRow(name=name) for name in ROWS if not options.rows or any(part in name for part in options.rows)]
    if options.again is not None:
        measured = {row["name"]: row["measured"] for row in json.loads(options.again.read_text())["rows"]}
        rows = [PlanRow(name=name, measured=measured[name]) for name in measured if measured[name]]
    rows.sort(key=lambda row: options.calibrate_on not in row.name)
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # of the recording processes
    pool = ProcessPoolExecutor(options.processes, mp_context=get_context("spawn"))
    with TemporaryDirectory() as folder:
        if options.again is None:
            _measure(rows, options, Path(folder), gpus)
        works = {row.name: pool.submit(recorded, row.name, options, folder) for row in rows}
        _write(options.out, rows, options, {})
        trace = options.trace or next((Path(rank["trace"]) for rank in rows[0].measured if rank["trace"]), None)
        fitted = _plan(rows, works, trace, options)
        _write(options.out, rows, options, fitted)
        pool.shutdown(wait=False, cancel_futures=True)
        for process in active_children():
            process.kill()
    print(_HEADER, *(row.line() for row in rows), "", json.dumps(fitted), *_summary(rows), sep="\n", flush=True)
    leave(0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--cluster", default="h100", help="gives what the profile does not tell")
    parser.add_argument("--rows", nargs="*", default=[], metavar="SUBSTRING")
    parser.add_argument("--calibrate-on", default=ROWS[0], metavar="SUBSTRING", help="the row whose profile counts")
    parser.add_argument("--steps", type=int, default=36, help="timed steps of a row")
    parser.add_argument("--row-timeout", type=float, default=60.0, help="seconds")
    parser.add_argument("--seconds", type=float, default=200.0, help="no row begins after these")
    parser.add_argument("--processes", type=int, default=4, help="processes that record works")
    parser.add_argument("--traces", type=Path, help="folder of the profile, to keep it")
    parser.add_argument("--trace", type=Path, help="a kept profile, in place of a fresh one")
    parser.add_argument("--again", type=Path, metavar="OUT", help="plan the rows of an earlier file, without steps")
    parser.add_argument("--tiny", action="store_true", help="cut the models, for a trial")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def _measure(rows: Sequence[PlanRow], options: argparse.Namespace, folder: Path, gpus: str | None) -> None:
    end = time.monotonic() + options.seconds
    traces = options.traces or folder
    traces.mkdir(parents=True, exist_ok=True)
    flags = ["--profiled", rows[0].name, "--traces", str(traces)]
    ranks = RankProcesses(options, folder, gpus, flags, "lamella_integration.plan_peer")
    try:
        for row in rows:
            if time.monotonic() > end:
                row.errors.append("no time was left to measure")
                continue
            measurement = ranks.measure(row.name)
            row.measured, row.seconds["steps"] = measurement.records, measurement.seconds
            row.errors += measurement.errors
            print(row.line(), flush=True)
            _write(options.out, rows, options, {})
    finally:
        ranks.stop()


def recorded(name: str, options: argparse.Namespace, folder: str) -> Any:
    """Return the works of a row's step."""
    import torch

    from lamella.testing import record_works
    from lamella_integration.estimate_decoder import decoder_works
    from lamella_integration.estimate_rows import recipe_config

    torch.set_num_threads(1)
    if name.startswith("decoder "):
        return decoder_works(name, options.ranks, options.device, is_tiny=options.tiny).works
    config = recipe_config(name, Path(folder), options.ranks, options.device, is_tiny=options.tiny)
    return record_works(config).works


def _plan(
    rows: Sequence[PlanRow], works: Mapping[str, Future[Any]], trace: Path | None, options: argparse.Namespace
) -> dict[str, Any]:
    """Plan each row whose works were recorded; return the fitted rates."""
    from lamella.testing import calibrate, plan_of, read_cluster
    from lamella_trace import read_trace

    cluster = read_cluster(options.cluster)
    fitted: dict[str, Any] = {}
    if trace is not None and options.device == "cuda":
        first = rows[0]
        calibration = calibrate(
            read_trace(trace), works[first.name].result(), cluster, step_seconds=first.measured_seconds
        )
        cluster, fitted = calibration.cluster, asdict(calibration)
    for row in rows:
        try:
            plan = plan_of(works[row.name].result(), cluster)
        except Exception as error:  # noqa: BLE001  A row's failure leaves the remaining rows.
            row.errors.append(f"plan: {type(error).__name__}: {str(error).strip()[:600]}")
            continue
        names = ("seconds", "host_seconds", "exposed_seconds", "sent_nbytes", "kinds")
        row.planned = {name: getattr(plan, name) for name in names}
    return fitted


def _write(out: Path | None, rows: Sequence[PlanRow], options: argparse.Namespace, fitted: Mapping[str, Any]) -> None:
    if out is None:
        return
    settings = {name: str(option) for name, option in vars(options).items() if name != "out"}
    values = {
        "options": settings,
        "fitted": fitted,
        "rows": [asdict(row) | {"difference": row.difference} for row in rows],
    }
    staged = out.with_name(f"{out.name}.partial")  # A run cut off leaves the last complete file.
    staged.write_text(json.dumps(values, indent=1) + "\n")
    staged.replace(out)


def _summary(rows: Sequence[PlanRow]) -> list[str]:
    """Return the rows within the tolerance but the calibrated row, and the pairs in another order than measured."""
    compared = [row for row in rows if row.difference is not None]
    predicted = [row for row in compared if row is not rows[0]]
    if not predicted:
        return ["no row has a plan and a measured step"]
    within = sum(abs(row.difference or 0.0) <= _TOLERANCE for row in predicted)
    pairs = [
        (first, second)
        for index, first in enumerate(compared)
        for second in compared[index + 1 :]
        if abs(first.measured_seconds / second.measured_seconds - 1) > _LEAST_DIFFERENCE
    ]
    swapped = [
        f"  {first.name!r} and {second.name!r}"
        for first, second in pairs
        if (first.measured_seconds < second.measured_seconds) != (first.planned["seconds"] < second.planned["seconds"])
    ]
    is_met = within == len(predicted) and not swapped
    verdict = (
        f"{within} of {len(predicted)} predicted rows within {_TOLERANCE:.0%}; {len(swapped)} of {len(pairs)} pairs "
        f"that differ by more than {_LEAST_DIFFERENCE:.0%} out of order: {'met' if is_met else 'not met'}"
    )
    return [verdict, *swapped]


if __name__ == "__main__":
    main()
