"""`lamella train` on short documents: packed rows beside padded ones, in tokens a second that the loss is on.

    python -m lamella_integration.bench_packing --model llama-1b --ranks 2 --steps 40 [options of lamella train]

The set `pairs-350` is drawn from a seed: prompts with completions, of log-normal lengths with a median of 350 tokens
together, in made-up words of a token each. A padded batch is as long as the longest document. `--packings documents`
measures one way alone, for options that go with that way: `--attention documents`.
"""

import argparse
import json
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import torch

from lamella.testing import RunDirectory, load_tokens
from lamella_integration.bench_recipe import short_run, trained
from lamella_integration.measured_variants import VariantRow, measured

MEDIAN_LENGTH, SEQUENCE_LENGTH, NUM_WORDS = 350, 2048, 1500
PACKINGS = ("none", "stream", "documents")
COLUMNS = ("packing", "target tokens/s", "tokens/s", "targets")


@dataclass(frozen=True, kw_only=True)
class PackingRow(VariantRow):
    """The speed of a way to pack, and the share of tokens in the loss."""

    targets_per_s: float
    tokens_per_s: float
    target_share: float

    def line(self) -> str:
        """Return a row of the table."""
        return f"| {self.variant} | {self.targets_per_s:,.0f} | {self.tokens_per_s:,.0f} | {self.target_share:.1%} |"


def pairs(num_documents: int, median_length: int = MEDIAN_LENGTH) -> Iterator[tuple[str, str]]:
    """Draw the prompts and completions of the set `pairs-350`."""
    draw = random.Random(0)
    words = sorted({"".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=5)) for _ in range(NUM_WORDS)})
    for _ in range(num_documents):
        # Two log-normal lengths of median 1 have a sum with a median near 2.45.
        lengths = (draw.lognormvariate(0, 1) * median_length / 2.5 for _ in range(2))
        prompt, completion = (" ".join(draw.choices(words, k=max(1, round(length)))) for length in lengths)
        yield f"{prompt}\n", f" {completion}"


def write_rows(file: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Write JSON lines."""
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Train with each way to pack, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--packings", nargs="+", choices=PACKINGS, default=PACKINGS)
    parser.add_argument("--model", default="llama-1b")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--num-skipped", type=int, default=20)
    parser.add_argument("--num-documents", type=int, default=20_000)
    parser.add_argument("--sequence-length", type=int, default=SEQUENCE_LENGTH)
    parser.add_argument("--timeout", type=float, default=300.0)
    options, arguments = parser.parse_known_args()
    with TemporaryDirectory() as folder:
        data = Path(folder, "pairs-350.jsonl")
        drawn = pairs(options.num_documents, MEDIAN_LENGTH * options.sequence_length // SEQUENCE_LENGTH)
        write_rows(data, ({"prompt": prompt, "completion": completion} for prompt, completion in drawn))
        measured(options.packings, lambda packing: _row(packing, data, options, arguments), COLUMNS)


def _row(packing: str, data: Path, options: argparse.Namespace, arguments: list[str]) -> PackingRow:
    root = data.with_name(packing)
    command = [*short_run(root, options, options.ranks), "--model", options.model, "--packing", packing]
    command += ["--data", str(data), "--sequence-length", str(options.sequence_length)]
    command += ["--batch-size", str(options.batch_size), *arguments]
    records, _ = trained(command, root, options.timeout)
    sequences = load_tokens(RunDirectory(root).tokens).sequences("train", options.sequence_length)
    num_targets = sequences.num_targets(torch.arange(len(sequences)))
    share = num_targets / (len(sequences) * sequences.tokens_a_sequence)
    tokens_per_s = fmean(record.tokens_per_s for record in records[options.num_skipped :])
    return PackingRow(
        variant=packing, targets_per_s=share * tokens_per_s, tokens_per_s=tokens_per_s, target_share=share
    )


if __name__ == "__main__":
    main()
