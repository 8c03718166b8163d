"""`lamella train` beside `transformers.Trainer` on the same weights, batches and learning rates, in one call.

    python -m lamella_integration.bench_recipe --ranks 2 --steps 40 --out recipe.json \
        "lamella" "lamella --kernels liger" "trainer" "trainer --kernels liger" "trainer --engine lamella"

A variant is `lamella` with further options of `lamella train`, or `trainer` with options of `recipe_peer`. The first
variant must be of lamella: every other variant reads the tokens of the first. Speed is the speed of the steps after
`--num-skipped`, memory the largest reserved by any rank (lamella) or by rank 0 (trainer).
"""

import argparse
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

from lamella.testing import RunDirectory, StepRecord, read_metrics


@dataclass(frozen=True, kw_only=True)
class RecipeRow:
    """A variant's measurements; losses: of the first step, and means over the skipped and over the measured steps."""

    variant: str
    tokens_per_s: float
    peak_gib: float
    losses: list[float]
    lines: tuple[str, ...] = ()

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
    rows: list[RecipeRow] = []
    with TemporaryDirectory() as folder:
        for index, variant in enumerate(options.variants):
            program, *arguments = shlex.split(variant)
            try:
                if program == "lamella":
                    row = _lamella(variant, arguments, options, Path(folder, f"run-{index}"), Path(folder, "run-0"))
                else:
                    row = _trainer(variant, arguments, options, Path(folder, "run-0"))
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                print(f"{variant}: {error}", flush=True)
                continue
            rows.append(row)
            print(row.line(), *row.lines, sep="\n    ", flush=True)
            if options.out is not None:
                options.out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    print("\n| variant | tokens/s | reserved GiB | first loss | mean loss |\n|---|--:|--:|--:|--:|")
    print(*(row.line() for row in rows), sep="\n")


def _lamella(
    variant: str, arguments: Sequence[str], options: argparse.Namespace, root: Path, first_root: Path
) -> RecipeRow:
    if root != first_root:  # The first run's tokenizer and tokens: the fingerprints of the text are equal.
        root.mkdir()
        for name in ("tokens", "model"):
            (root / name).symlink_to(first_root / name)
    intervals = {"log": options.num_skipped, "validation": 10**6, "checkpoint": 10**6}
    command = [sys.executable, "-m", "lamella", "train", "--model", options.model, "--ranks", str(options.ranks)]
    command += ["--batch-size", str(options.batch_size), "--steps", str(options.steps), "--warmup-steps", "5"]
    command += [part for name, steps in intervals.items() for part in (f"--{name}-interval", str(steps))]
    command += ["--validation-sequences", str(options.ranks), "--run-dir", str(root), "--no-resume", *arguments]
    output = output_of(command, options.timeout)
    shutil.rmtree(RunDirectory(root).checkpoints)  # 12 bytes a parameter, for each variant.
    records = [record for record in read_metrics(RunDirectory(root).metrics) if isinstance(record, StepRecord)]
    return RecipeRow(
        variant=variant,
        tokens_per_s=records[-1].tokens_per_s,
        peak_gib=max(record.memory_nbytes for record in records) / 2**30,
        losses=[records[0].loss, _mean(records[1 : options.num_skipped]), _mean(records[options.num_skipped :])],
        lines=tuple(line for line in output.splitlines() if line.startswith(("loss:", "float8:"))),
    )


def _mean(records: Sequence[StepRecord]) -> float:
    return fmean(record.loss for record in records)


def _trainer(variant: str, arguments: Sequence[str], options: argparse.Namespace, root: Path) -> RecipeRow:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks)]
    peer = ["-m", "lamella_integration.recipe_peer", str(root), "--num-skipped", str(options.num_skipped)]
    output = output_of([*torchrun, *peer, *arguments], options.timeout)
    [record] = [json.loads(line) for line in output.splitlines() if line.startswith('{"tokens_per_s"')]
    first, skipped, *measured = record.pop("losses")  # means of `num_skipped` steps each, from the second on
    return RecipeRow(variant=variant, losses=[first, skipped, fmean(measured)], **record)


def output_of(command: Sequence[str], timeout: float) -> str:
    """Run a command and return its standard output. Raises RuntimeError with its last lines if it fails."""
    process = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    if process.returncode:
        # Before the lines of torchrun's own traceback, which say nothing of the rank's.
        output, *_ = (process.stdout + process.stderr).partition("ChildFailedError")
        raise RuntimeError(f"exit {process.returncode}: " + "\n    ".join(output.strip().splitlines()[-40:]))
    return process.stdout


if __name__ == "__main__":
    main()
