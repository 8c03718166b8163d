"""Megatron's own `pretrain` on its wrappers and on lamella, by one command line, in one call.

    python -m lamella_integration.bench_pretrain --ranks 2 --out pretrain.json \
        ddp megatron_fsdp lamella "lamella --data-parallel-sharding-strategy optim"

A variant is an engine with further flags of Megatron-LM. `ddp` is DistributedDataParallel with the distributed
optimizer and both overlaps (ZeRO-1), `megatron_fsdp` Megatron-FSDP with ZeRO-3, `lamella` the same flags after
`lamella_megatron.install()`. The programs are those of examples/megatron, on mock data; the time is the median of the
logged iterations after `--num-skipped`.
"""

import argparse
import json
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

from lamella_integration.measured_variants import VariantRow, measured, output_of
from lamella_integration.pretrain_peer import MEMORY

PROGRAMS: Final = Path(__file__).parents[3] / "examples" / "megatron"
SHARDED: Final = (
    "--use-megatron-fsdp --ckpt-format fsdp_dtensor --data-parallel-sharding-strategy optim_grads_params "
    "--use-distributed-optimizer"
)
ENGINES: Final = {
    "ddp": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "megatron_fsdp": f"{SHARDED} --overlap-grad-reduce --overlap-param-gather",
    "lamella": SHARDED,
}
COMMON: Final = (
    "--mock-data --tokenizer-type NullTokenizer --bf16 --lr 1e-4 --lr-decay-iters 1000 --eval-iters 0 "
    "--eval-interval 1000 --log-interval 1 --num-workers 1 --manual-gc --manual-gc-interval 1000 "
    "--attention-dropout 0 --hidden-dropout 0 --disable-bias-linear --swiglu --normalization RMSNorm "
    "--untie-embeddings-and-output-weights --no-gradient-accumulation-fusion"
)
SIZES: Final = {
    "tiny": "--hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --vocab-size 1023 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 1",
    "1b": "--hidden-size 2048 --ffn-hidden-size 5632 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --vocab-size 32767 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 4",
}
LAYERS: Final = {
    ("gpt", "tiny"): "--num-layers 2 --position-embedding-type rope",
    ("gpt", "1b"): "--num-layers 20 --position-embedding-type rope",
    ("hybrid", "tiny"): '--hybrid-layer-pattern "M*-M*-" --mamba-head-dim 16 --mamba-num-groups 2',
    ("hybrid", "1b"): f'--hybrid-layer-pattern "{"M-M-M*-" * 6}"',
}
COLUMNS: Final = ("variant", "ms a step", "allocated GiB", "reserved GiB", "first loss", "last loss")
_LOGGED: Final = re.compile(
    r"iteration\s+(\d+)/.*?elapsed time per iteration \(ms\): ([\d.]+).*?lm loss: ([\d.E+-]+)", re.DOTALL
)


@dataclass(frozen=True, kw_only=True)
class PretrainRow(VariantRow):
    """A variant's median time of a step, peaks of memory of the largest rank, and losses of all steps."""

    ms: float
    allocated_gib: float
    reserved_gib: float
    losses: tuple[float, ...]

    def line(self) -> str:
        """Return a row of the table."""
        losses = f"{self.losses[0]:.4f} | {self.losses[-1]:.4f}"
        return f"| {self.variant} | {self.ms:.1f} | {self.allocated_gib:.2f} | {self.reserved_gib:.2f} | {losses} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the variants one after another, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("variants", nargs="+")
    parser.add_argument("--program", choices=("gpt", "hybrid"), default="gpt")
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--num-skipped", type=int, default=10)
    parser.add_argument("--timeout", type=float, default=180.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)

    def measure(variant: str) -> PretrainRow:
        return parsed(variant, output_of(command(variant, options), options.timeout), options.num_skipped)

    measured(options.variants, measure, COLUMNS, options.out)


def command(variant: str, options: argparse.Namespace) -> list[str]:
    """Return the command line of a variant."""
    engine, *flags = shlex.split(variant)
    size = SIZES[options.size]
    rows = int(size.split()[-1]) * options.ranks * options.microbatches
    batches = f"--train-iters {options.steps} --global-batch-size {rows}"
    fixed = shlex.split(f"{COMMON} {size} {LAYERS[options.program, options.size]} {batches} {ENGINES[engine]}")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
    program = str(PROGRAMS / f"pretrain_{options.program}.py")
    return [*torchrun, "-m", "lamella_integration.pretrain_peer", program, engine, *fixed, *flags]


def parsed(variant: str, output: str, num_skipped: int) -> PretrainRow:
    """Return the row of a program's output. Raises RuntimeError if it logged too few steps."""
    steps = [(float(ms), float(loss)) for _, ms, loss in _LOGGED.findall(output)]
    memory = re.search(re.escape(MEMORY) + r"(\[[^]]*\])", output)
    if len(steps) <= num_skipped or memory is None:
        last_lines = "\n    ".join(output.splitlines()[-25:])
        raise RuntimeError(f"Expected more than {num_skipped} logged steps and a peak, got {len(steps)}: {last_lines}")
    allocated, reserved = json.loads(memory[1])
    return PretrainRow(
        variant=variant,
        ms=median(ms for ms, _ in steps[num_skipped:]),
        allocated_gib=allocated,
        reserved_gib=reserved,
        losses=tuple(loss for _, loss in steps),
    )


if __name__ == "__main__":
    main()
