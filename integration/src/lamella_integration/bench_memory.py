"""The options that `--memory` chooses, beside the fastest hand-found options that fit: peaks and step times on GPUs.

    python -m lamella_integration.bench_memory --ranks 2 --out memory.json

A grid of hand settings runs first, without a limit. Meanwhile a process without a GPU chooses options for each
budget: a share of the estimated peak without options. Then, for each budget, the choice and the fastest hand setting
whose measured peak fits take turns; with `--hold`, the caching allocator is held to the budget, a run that needs more
fails, and each runs once, in processes of its own: windows of copy engines last as long as a process, and a row's would
be taken from the next row's budget. All other rows run in the same processes, one after another. `--device cpu --tiny`
is a trial.
"""

import argparse
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import active_children, get_context
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final

from lamella_integration.estimate_ranks import RankProcesses
from lamella_integration.launch import leave

_GIB: Final = 1 << 30
_TOLERANCE: Final = 1.05
_NUM_TURNS: Final = 2
_RECOMPUTE: Final = ("", "--recompute selective", "--recompute full")
_WEIGHTS: Final = ("", "--stage 2", "--no-reshard-after-forward")
_FURTHER: Final = (
    *(f"--recompute {kind} --recompute-layers {number}" for kind in ("selective", "full") for number in (4, 8, 12)),
    "--recompute full --recompute-layers 4 --stage 2",
    "--recompute full --recompute-layers 8 --stage 2",
    "--stage 1",
    "--stage 1 --recompute selective",
    "--keep-budget 1GiB",
    "--keep-budget 1GiB --recompute selective",
    "--keep-budget 1GiB --recompute full",
    "--offload-activations",
    "--offload-activations --recompute selective",
    "--offload-activations --recompute full",
    "--rest cpu --recompute full",
)


@dataclass(kw_only=True)
class Setting:
    """Options of the model, with the steps measured so far.

    Attributes:
        flags: The options, as of `lamella train`.
        peak_nbytes: The most that `torch.cuda.max_memory_allocated` tells of any rank in any step; 0 before a
            measurement.
        reserved_nbytes: The most segments of the caching allocator, likewise.
        step_seconds: The seconds of all steps of the slowest rank.
        errors: Lines on a failure.
    """

    flags: str
    peak_nbytes: int = 0
    reserved_nbytes: int = 0
    step_seconds: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def step_median(self) -> float:
        """The median of the seconds of a step."""
        return median(self.step_seconds)

    def line(self) -> str:
        """Return the row of the table of settings."""
        if not self.step_seconds:
            return f"| {self.flags or '(none)'} | - | - | - | {'; '.join(self.errors).splitlines()[-1][:160]} |"
        sizes = f"{_gib(self.peak_nbytes)} | {_gib(self.reserved_nbytes)}"
        spread = f"{1e3 * min(self.step_seconds):.1f} to {1e3 * max(self.step_seconds):.1f}"
        return f"| {self.flags or '(none)'} | {sizes} | {1e3 * self.step_median:.1f} | {spread} |"


@dataclass(kw_only=True)
class Budget:
    """A budget, the choice of `--memory`, and the fastest hand setting that fits.

    Attributes:
        share: The share of the estimated peak without options.
        nbytes: The budget, with CUDA's context.
        allocator_nbytes: The budget of the caching allocator.
        choice: The chosen flags, the estimated bytes, the lines to print and the seconds of the choice.
        chosen: The steps with the choice, within the budget.
        by_hand: The steps of the hand setting, within the budget.
    """

    share: float
    nbytes: int
    allocator_nbytes: int
    choice: Mapping[str, Any] = field(default_factory=dict)
    chosen: Setting = field(default_factory=lambda: Setting(flags=""))
    by_hand: Setting = field(default_factory=lambda: Setting(flags=""))

    @property
    def ratio(self) -> float | None:
        """The step time of the choice over that of the hand setting; None where either is missing."""
        if not (self.chosen.step_seconds and self.by_hand.step_seconds):
            return None
        return self.chosen.step_median / self.by_hand.step_median

    def line(self) -> str:
        """Return the row of the table of budgets."""
        cells = [f"{self.share:.0%}, {_gib(self.nbytes)}", self.choice.get("flags", "-")]
        cells += [_gib(self.choice["allocated_nbytes"]) if self.choice else "-"]
        for setting in (self.chosen, self.by_hand):
            cells += [setting.flags] * (setting is self.by_hand)
            cells += [_gib(setting.peak_nbytes), f"{1e3 * setting.step_median:.1f}" if setting.step_seconds else "-"]
        cells.append("-" if self.ratio is None else f"{self.ratio:.3f}")
        return f"| {' | '.join(cells)} |"


_BUDGETS: Final = (
    "| budget GiB | choice | est. GiB | peak | step ms | by hand | peak | step ms | ratio |\n"
    "|---|---|--:|--:|--:|---|--:|--:|--:|"
)
_SETTINGS: Final = "| setting | peak GiB | segments | step ms | from, to |\n|---|--:|--:|--:|---|"


def main() -> None:
    """Measure the grid, then the choices beside the fastest settings that fit; print tables, and write the JSON."""
    options = _options()
    end = time.monotonic() + options.seconds
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # of the processes that choose
    pool = ProcessPoolExecutor(options.processes, mp_context=get_context("spawn"))
    grid = [Setting(flags=flags) for flags in _grid() if not options.settings or flags in options.settings]
    with TemporaryDirectory() as folder:
        budgets = pool.submit(_budgets, options, folder)
        ranks = RankProcesses(options, Path(folder), gpus)
        choices: list[Future[Any]] = []
        try:
            print(_SETTINGS, flush=True)
            for setting in grid:
                if time.monotonic() > end - options.reserve:
                    setting.errors.append("no time was left")
                    continue
                _measure(setting, ranks, options)
                print(setting.line(), flush=True)
                if not choices and budgets.done():
                    choices = [pool.submit(_choice, budget.nbytes, options, folder) for budget in budgets.result()]
            choices = choices or [pool.submit(_choice, b.nbytes, options, folder) for b in budgets.result()]
            for budget, choice in zip(budgets.result(), choices, strict=True):
                _compare(budget, choice, grid, ranks, options)
                _write(options, grid, budgets.result())
        finally:
            ranks.stop()
        pool.shutdown(wait=False, cancel_futures=True)
        for process in active_children():
            process.kill()
    for budget in budgets.result():
        print("", *budget.choice.get("lines", ()), *budget.chosen.errors, *budget.by_hand.errors, sep="\n")
    print("", _BUDGETS, *(budget.line() for budget in budgets.result()), "", _summary(budgets.result()), sep="\n")
    leave(0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--model", default="llama --batch-size 16 --sequence-length 2048", help="a model with options")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.8, 0.55, 0.35])
    parser.add_argument("--settings", nargs="*", default=[], metavar="FLAGS", help="of the grid; all by default")
    parser.add_argument("--steps", type=int, default=10, help="of a setting; fewer where they take long")
    parser.add_argument("--row-timeout", type=float, default=60.0, help="seconds")
    parser.add_argument("--seconds", type=float, default=300.0, help="for all rows")
    parser.add_argument("--reserve", type=float, default=90.0, help="seconds of these for the choices")
    parser.add_argument("--processes", type=int, default=3, help="processes that choose")
    parser.add_argument("--hold", action="store_true", help="hold the caching allocator to the budget")
    parser.add_argument("--tiny", action="store_true", help="cut the model, for a trial")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def _grid() -> Iterator[str]:
    for weights in _WEIGHTS:
        for recompute in _RECOMPUTE:
            yield f"{weights} {recompute}".strip()
    yield from _FURTHER


def _budgets(options: argparse.Namespace, folder: str) -> list[Budget]:
    """Return the budgets: shares of the estimated memory of a GPU without options."""
    import lamella
    from lamella_integration.estimate_rows import recipe_config

    config = recipe_config(options.model, Path(folder), options.ranks, options.device, is_tiny=options.tiny)
    estimate = lamella.estimate(config)
    nbytes = [int(share * estimate.total_nbytes) for share in options.shares]
    return [
        Budget(share=share, nbytes=size, allocator_nbytes=size - estimate.context_nbytes)
        for share, size in zip(options.shares, nbytes, strict=True)
    ]


def _choice(nbytes: int, options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Return the choice of `--memory` as plain values."""
    import torch

    import lamella
    from lamella_integration.estimate_rows import recipe_config

    torch.set_num_threads(1)
    start = time.monotonic()
    config = recipe_config(options.model, Path(folder), options.ranks, options.device, is_tiny=options.tiny)
    fitting = lamella.fit_options(config, str(nbytes))
    return {
        "flags": fitting.chosen.fields.flags(),
        "allocated_nbytes": fitting.chosen.estimate.allocated_nbytes,
        "lines": [*fitting.lines()],
        "seconds": time.monotonic() - start,
    }


def _compare(
    budget: Budget,
    choice: "Future[dict[str, Any]]",
    grid: Sequence[Setting],
    ranks: RankProcesses,
    options: argparse.Namespace,
) -> None:
    """Let the choice and the fastest hand setting that fits take turns within the budget."""
    try:
        budget.choice = choice.result()
    except Exception as error:  # noqa: BLE001  One budget's failure leaves the other budgets.
        budget.chosen.errors.append(f"{type(error).__name__}: {error}")
        return
    flags, limit_nbytes = budget.choice["flags"], budget.allocator_nbytes if options.hold else None
    budget.chosen.flags = "" if flags.startswith("(") else flags
    fitting = [one for one in grid if one.step_seconds and one.peak_nbytes <= budget.allocator_nbytes]
    for setting in sorted(fitting, key=lambda one: one.step_median):
        budget.by_hand = Setting(flags=setting.flags)
        _measure(budget.by_hand, ranks, options, limit_nbytes)
        if budget.by_hand.step_seconds:
            break  # Segments of a setting whose peak fits may still exceed the budget.
    num_turns = 1 if options.hold else _NUM_TURNS
    for turn in range(num_turns):
        _measure(budget.chosen, ranks, options, limit_nbytes)
        if turn + 1 < num_turns and budget.by_hand.step_seconds:
            _measure(budget.by_hand, ranks, options, limit_nbytes)
    print(budget.line(), flush=True)


def _measure(
    setting: Setting, ranks: RankProcesses, options: argparse.Namespace, limit_nbytes: int | None = None
) -> None:
    if limit_nbytes is not None:
        ranks.stop()
    measurement = ranks.measure(f"{options.model} {setting.flags}".strip(), limit_nbytes)
    setting.errors += measurement.errors
    if not measurement.records:
        return
    peaks = (max(record["peak_nbytes"], record["first_peak_nbytes"]) for record in measurement.records)
    setting.peak_nbytes = max(setting.peak_nbytes, *peaks)
    reserved = (record["reserved_nbytes"] for record in measurement.records)
    setting.reserved_nbytes = max(setting.reserved_nbytes, *reserved)
    setting.step_seconds += max((record["step_seconds"] for record in measurement.records), key=median)


def _write(options: argparse.Namespace, grid: Sequence[Setting], budgets: Sequence[Budget]) -> None:
    if options.out is not None:
        values = {"grid": [asdict(one) for one in grid], "budgets": [asdict(one) for one in budgets]}
        options.out.write_text(json.dumps(values, indent=1) + "\n")


def _summary(budgets: Sequence[Budget]) -> str:
    num_under = sum(bool(one.chosen.step_seconds) and one.chosen.peak_nbytes <= one.allocator_nbytes for one in budgets)
    num_close = sum(one.ratio is not None and one.ratio <= _TOLERANCE for one in budgets)
    within = f"{num_close} with steps within {_TOLERANCE - 1:.0%} of the fastest hand setting"
    return f"{num_under} of {len(budgets)} choices under their budgets, {within}"


def _gib(nbytes: int) -> str:
    return f"{nbytes / _GIB:.2f}"


if __name__ == "__main__":
    main()
