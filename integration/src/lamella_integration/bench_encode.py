"""Time to measure and encode a block's weights in float8: one kernel for all, multi-tensor calls, and a copy.

    python -m lamella_integration.bench_encode --size 8b --ranks 4

The weights are the rows of rank 0 of the matrices of one decoder block, in fp32. A measurement reads 4 bytes an
element; an encoding reads 4 and writes 1, and measures too with delayed scaling. *copy* copies the weights in fp32:
the bytes a second that are to be had.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from unittest.mock import patch

import torch

from lamella_integration.backends import RECIPES
from lamella_integration.llama import SIZES, Block
from lamella_precision import Float8Recipe, WeightRows

_NUM_WARMUPS, _NUM_TIMES = 10, 50


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table. Effects: waits for the device."""
    parser = argparse.ArgumentParser(prog="lamella_integration.bench_encode", description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="8b", help="of the decoder")
    parser.add_argument("--ranks", type=int, default=4, help="over which the weights are sharded")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args(arguments)
    with torch.device("meta"):
        shapes = [weight.shape for weight in Block(SIZES[options.size]).parameters() if weight.ndim == 2]
    weights = [torch.randn(shape[0] // options.ranks, shape[1], device=options.device) for shape in shapes]
    numel = sum(weight.numel() for weight in weights)
    copies = [torch.empty_like(weight) for weight in weights]
    print(f"{options.size}, a block on one of {options.ranks} ranks: {len(weights)} matrices, {numel:,} elements\n")
    print("| | measure us | GB/s | encode us | GB/s |\n|---|--:|--:|--:|--:|")
    copied = _seconds(lambda: torch._foreach_copy_(copies, weights), options.device)
    print(f"| copy | - | - | {copied * 1e6:.0f} | {8 * numel / copied / 1e9:,.0f} |")
    for name, recipe in RECIPES.items():
        measure, encode = _calls(recipe, weights, shapes)
        with patch("lamella_precision._scales.encoding._kernels_for", lambda cuts: None):
            rows = {"multi-tensor calls": [_seconds(call, options.device) for call in (measure, encode)]}
        rows["one kernel"] = [_seconds(call, options.device) for call in (measure, encode)]
        for kind, seconds in rows.items():
            cells = [
                f"{s * 1e6:.0f} | {nbytes * numel / s / 1e9:,.0f}" for s, nbytes in zip(seconds, (4, 5), strict=True)
            ]
            print(f"| {name}, {kind} | {' | '.join(cells)} |")
    return 0


def _calls(
    recipe: Float8Recipe, weights: list[torch.Tensor], shapes: Sequence[torch.Size]
) -> tuple[Callable[[], object], Callable[[], object]]:
    """A measurement and an encoding of all weights."""
    scales = [torch.ones(recipe.scale_shape(shape), device=weights[0].device) for shape in shapes]
    amaxes = [torch.zeros_like(scale) if recipe.num_past else None for scale in scales]
    parts = [WeightRows(tuple(shape), 0, *scale) for shape, *scale in zip(shapes, scales, amaxes, strict=True)]
    data = [torch.empty(weight.shape, dtype=recipe.dtype, device=weight.device) for weight in weights]
    measured, encoded = recipe.measure_columns(weights, parts), recipe.columns(weights, [data], parts)
    return lambda: recipe.measure(*measured), lambda: recipe.encode(*encoded)


def _seconds(call: Callable[[], object], device: str) -> float:
    """The median time of a call, by events of the device; 0 on a CPU, where the call is only tried."""
    if device == "cpu":
        call()
        return float("inf")
    for _ in range(_NUM_WARMUPS):
        call()
    times: list[float] = []
    for _ in range(_NUM_TIMES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]  # the host launches meanwhile
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


if __name__ == "__main__":
    raise SystemExit(main())
