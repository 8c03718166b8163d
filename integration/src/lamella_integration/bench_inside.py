"""Other tools' trainers on FSDP2 and on lamella in one call: tokens/s, GiB and losses.

    python -m lamella_integration.bench_inside --ranks 2 --out inside.json "trainer --bf16" "sft --bf16 --lora"

A method is one of `inside_peer`'s with options of both engines. Each method runs on FSDP2, on lamella, and on lamella
with overlapped steps; with `--late-gradients` in the method, late gradients too, and no clipping on either engine.
`--size tiny` tries the harness on CPUs.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Final

from lamella_integration.bench_recipe import RECIPE_COLUMNS, RecipeRow
from lamella_integration.measured_variants import measured, output_of
from lamella_integration.tool_models import CHAT_TEMPLATE, model_folder

SIZES: Final = {
    "tiny": {},
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 20,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32768,
    },
}
ENGINES: Final = ("--engine fsdp2", "--engine lamella", "--engine lamella --overlap")


def main() -> None:
    """Run each method on each engine, one after another, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("methods", nargs="+")
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--num-skipped", type=int, default=20)
    parser.add_argument("--timeout", type=float, default=240.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    variants = [f"{method} {engine}" for method in options.methods for engine in ENGINES]
    with TemporaryDirectory() as folder:
        model = model_folder(Path(folder, "model"), CHAT_TEMPLATE, **SIZES[options.size])
        measured(variants, lambda variant: _row(variant, options, model), RECIPE_COLUMNS, options.out)


def _row(variant: str, options: argparse.Namespace, model: Path) -> RecipeRow:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks)]
    steps = ["--steps", str(options.steps), "--num-skipped", str(options.num_skipped)]
    peer = ["-m", "lamella_integration.inside_peer", str(model), *shlex.split(variant), *steps]
    output = output_of([*torchrun, *peer], options.timeout)
    [record] = [json.loads(line) for line in output.splitlines() if line.startswith('{"tokens_per_s"')]
    first, *losses = record.pop("losses")
    return RecipeRow(variant=variant, losses=[first, fmean(losses)], **record)


if __name__ == "__main__":
    main()
