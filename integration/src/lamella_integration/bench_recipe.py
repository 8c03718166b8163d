"""`lamella train` beside `transformers.Trainer` on the same weights, batches and learning rates, in one call.

    python -m lamella_integration.bench_recipe --ranks 2 --steps 40 --out recipe.json \
        "lamella" "lamella --kernels liger" "trainer" "trainer --kernels liger" "trainer --engine lamella" "loop"

A variant is `lamella` with further options of `lamella train`, `trainer` with options of `recipe_peer`, or `loop` with
options of `recipe_loop`. The first variant must be of lamella: every other variant reads the tokens of the first. Speed
is the speed of the steps after `--num-skipped`, memory the largest reserved by any rank (lamella) or by rank 0.
"""

import argparse
import json
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import fmean, harmonic_mean
from tempfile import TemporaryDirectory
from typing import Final

from lamella.testing import RunDirectory, StepRecord, read_metrics
from lamella_integration.measured_variants import VariantRow, measured, output_of

RECIPE_COLUMNS: Final = ("variant", "tokens/s", "reserved GiB", "first loss", "mean loss")


_PEERS: Final = {"trainer": "lamella_integration.recipe_peer", "loop": "lamella_integration.recipe_loop"}


@dataclass(frozen=True, kw_only=True)
class RecipeRow(VariantRow):
    """A variant's measurements; losses: of the first step, and means over the skipped and over the measured steps."""

    tokens_per_s: float
    peak_gib: float
    losses: list[float]

    def line(self) -> str:
        """Return a row of the table."""
        first, mean = (f"{self.losses[index]:.4f}" for index in (0, -1))
        return f"| {self.variant} | {self.tokens_per_s:,.0f} | {self.peak_gib:.1f} | {first} | {mean} |"


def main() -> None:
    """Run the variants one after another, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("variants", nargs="+")
    parser.add_argument("--model", default="llama-1b")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--num-skipped", type=int, default=20)
    parser.add_argument("--timeout", type=float, default=180.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        roots = (Path(folder, f"run-{index}") for index in count())

        def measure(variant: str) -> RecipeRow:
            root = next(roots)
            program, *arguments = shlex.split(variant)
            if program == "lamella":
                return _lamella(variant, arguments, options, root, Path(folder, "run-0"))
            return _peer(variant, _PEERS[program], arguments, options, Path(folder, "run-0"))

        measured(options.variants, measure, RECIPE_COLUMNS, options.out)


def short_run(root: Path, options: argparse.Namespace, ranks: int) -> list[str]:
    """Return options of `lamella train` for a run of `options.steps` into a folder, without saves on the way."""
    intervals = {"log": options.num_skipped, "validation": 10**6, "checkpoint": 10**6}
    steps = ["--ranks", str(ranks), "--steps", str(options.steps), "--warmup-steps", "5"]
    steps += [part for name, steps in intervals.items() for part in (f"--{name}-interval", str(steps))]
    return [*steps, "--validation-sequences", str(ranks), "--run-dir", str(root), "--no-resume"]


def trained(arguments: Sequence[str], root: Path, timeout: float) -> tuple[list[StepRecord], str]:
    """Run `lamella train`, and return the records of its steps and its output.

    Raises:
        RuntimeError: The run fails, or takes more than `timeout` seconds.

    Effects: removes the run's checkpoints, 12 bytes a parameter for each variant.
    """
    output = output_of([sys.executable, "-m", "lamella", "train", *arguments], timeout)
    shutil.rmtree(RunDirectory(root).checkpoints)
    return [record for record in read_metrics(RunDirectory(root).metrics) if isinstance(record, StepRecord)], output


def _lamella(
    variant: str, arguments: Sequence[str], options: argparse.Namespace, root: Path, first_root: Path
) -> RecipeRow:
    if root != first_root:  # The first run's tokenizer and tokens: the fingerprints of the text are equal.
        root.mkdir()
        for name in ("tokens", "model"):
            (root / name).symlink_to(first_root / name)
    arguments = ["--model", options.model, "--batch-size", str(options.batch_size), *arguments]
    records, output = trained([*short_run(root, options, options.ranks), *arguments], root, options.timeout)
    return RecipeRow(
        variant=variant,
        tokens_per_s=measured_speed(records, options.num_skipped),
        peak_gib=max(record.memory_nbytes for record in records) / 2**30,
        losses=[records[0].loss, _mean(records[1 : options.num_skipped]), _mean(records[options.num_skipped :])],
        lines=tuple(line for line in output.splitlines() if line.startswith(("loss:", "float8:"))),
    )


def measured_speed(records: Sequence[StepRecord], num_skipped: int) -> float:
    """Return the tokens a second of the steps after the first `num_skipped`."""
    return harmonic_mean(record.tokens_per_s for record in records[num_skipped:])


def _mean(records: Sequence[StepRecord]) -> float:
    return fmean(record.loss for record in records)


def _peer(variant: str, module: str, arguments: Sequence[str], options: argparse.Namespace, root: Path) -> RecipeRow:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks)]
    peer = ["-m", module, str(root), "--num-skipped", str(options.num_skipped)]
    output = output_of([*torchrun, *peer, *arguments], options.timeout)
    [record] = [json.loads(line) for line in output.splitlines() if line.startswith('{"tokens_per_s"')]
    first, skipped, *measured = record.pop("losses")  # means of `num_skipped` steps each, from the second on
    return RecipeRow(variant=variant, losses=[first, skipped, fmean(measured)], **record)


if __name__ == "__main__":
    main()
