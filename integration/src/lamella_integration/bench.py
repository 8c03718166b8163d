"""Every backend on one model, one after another in one call: speed, memory and losses side by side.

    torchrun --nproc-per-node 4 -m lamella_integration.bench --size 8b --tokens 4096 \
        --backends ideal lamella fsdp2 megatron_fsdp_experimental --reduce bf16 --out results

All start from the same weights and see the same random tokens (one batch, repeated, so that the loss falls and a
wrong gradient shows). A backend that fails prints its error in its row; results are written after every backend,
because a rank that fails alone inside a step leaves its peers in a collective until the group times out.
"""

import argparse
import gc
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from lamella_integration.backends import BACKENDS, REDUCE_DTYPES, Training, Workload
from lamella_integration.launch import leave, process_group
from lamella_integration.llama import SIZES, num_flops_per_token
from lamella_integration.repeatable import use_repeatable_kernels
from lamella_integration.report import Failure, Measurement, Report

T = TypeVar("T")


class BackendFailed(RuntimeError):
    """Some rank failed; raised on every rank, with that rank's error."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line."""

    size: str
    num_tokens: int
    backends: Sequence[str]
    reduce: str
    num_steps: int
    num_warmup_steps: int
    is_deterministic: bool
    device_type: str
    out: Path | None


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """Options of the command line, checked."""
    parser = argparse.ArgumentParser(prog="lamella_integration.bench", description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="1b", help="of the Llama decoder")
    parser.add_argument("--tokens", type=int, default=4096, help="a rank and step, one sequence")
    parser.add_argument(
        "--backends", nargs="+", choices=BACKENDS, default=["ideal", "lamella", "fsdp2"], metavar="BACKEND",
        help=f"in this order, any of: {', '.join(BACKENDS)}",
    )  # fmt: skip
    parser.add_argument("--reduce", choices=REDUCE_DTYPES, default="bf16", help="dtype gradients are reduced in")
    parser.add_argument("--steps", type=int, default=8, help="measured, after the warm-up")
    parser.add_argument("--warmup", type=int, default=4, help="steps before the measured ones")
    parser.add_argument(
        "--deterministic", action="store_true", help="repeatable kernels: slow, and losses compare exactly"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path, help="folder for the JSON, the table and the plot")
    values = parser.parse_args(arguments)
    for name in ("tokens", "steps", "warmup"):
        if getattr(values, name) < 1:
            parser.error(f"Expected --{name} of at least 1, got {getattr(values, name)}.")
    return Options(
        size=values.size,
        num_tokens=values.tokens,
        backends=values.backends,
        reduce=values.reduce,
        num_steps=values.steps,
        num_warmup_steps=values.warmup,
        is_deterministic=values.deterministic,
        device_type=values.device,
        out=values.out,
    )


def run(options: Options, device: torch.device) -> Report:
    """Measure every backend in the order given. The default process group must exist.

    Effects: collective on the default group; writes the report after each backend on rank 0.
    """
    if options.is_deterministic:
        use_repeatable_kernels()
    report = Report(
        title=f"{options.size}, {options.num_tokens} tokens a GPU, {dist.get_world_size()} ranks, "
        f"{options.reduce} reduce{', deterministic' if options.is_deterministic else ''}",
        environment=_environment(device),
    )
    workload = Workload(config=SIZES[options.size], device=device, reduce_dtype=REDUCE_DTYPES[options.reduce])
    for name in options.backends:
        report.rows[name] = _measure_and_release(name, workload, options)
        if dist.get_rank() == 0 and options.out is not None:
            report.write(options.out)
    return report


def _measure_and_release(name: str, workload: Workload, options: Options) -> Measurement | Failure:
    baseline = _allocated_gib(workload.device)
    try:
        row: Measurement | Failure = _measure(name, workload, options, baseline)
    except BackendFailed as error:
        row = Failure(error=str(error))
    gc.collect()  # Hooks and parameters refer to each other; nothing is free before this.
    if workload.device.type == "cuda":
        torch.cuda.empty_cache()
    return row.with_leak(_over_ranks(_allocated_gib(workload.device) - baseline, dist.ReduceOp.MAX, workload))


def _measure(name: str, workload: Workload, options: Options, baseline_gib: float) -> Measurement:
    training = _on_every_rank(lambda: BACKENDS[name](workload))
    built_gib = _allocated_gib(workload.device) - baseline_gib
    tokens, labels = workload.batch(options.num_tokens)
    losses, _ = _on_every_rank(lambda: _steps(training, tokens, labels, options.num_warmup_steps))
    _reset_peaks(workload.device)
    more_losses, step_s = _on_every_rank(lambda: _steps(training, tokens, labels, options.num_steps))
    losses += more_losses
    slowest_s = _over_ranks(statistics.median(step_s), dist.ReduceOp.MAX, workload)
    allocated_gib, reserved_gib = _peaks_gib(workload.device)
    flops = num_flops_per_token(workload.config, options.num_tokens)
    return Measurement(
        step_s=slowest_s,
        tokens_per_s=options.num_tokens / slowest_s,
        tflops=options.num_tokens * flops / slowest_s / 1e12,
        peak_allocated_gib=_over_ranks(allocated_gib - baseline_gib, dist.ReduceOp.MAX, workload),
        peak_reserved_gib=_over_ranks(reserved_gib, dist.ReduceOp.MAX, workload),
        built_gib=_over_ranks(built_gib, dist.ReduceOp.MAX, workload),
        at_rest_gib=_over_ranks(_allocated_gib(workload.device) - baseline_gib, dist.ReduceOp.MAX, workload),
        first_loss=_over_ranks(losses[0].item(), dist.ReduceOp.SUM, workload) / dist.get_world_size(),
        last_loss=_over_ranks(losses[-1].item(), dist.ReduceOp.SUM, workload) / dist.get_world_size(),
        trained=name != "ideal",
    )


def _on_every_rank(action: Callable[[], T]) -> T:
    """The action's result if all ranks have one, else `BackendFailed` on all of them."""
    result, error = None, None
    try:
        result = action()
    except Exception as caught:  # noqa: BLE001  Whatever a backend raises is its row, and the others go on.
        error = f"rank {dist.get_rank()}: {type(caught).__name__}: {caught}"
        traceback.print_exc()
        traceback.clear_frames(caught.__traceback__)  # They hold the failed model.
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    for error in errors:
        if error is not None:
            raise BackendFailed(error)
    return result  # type: ignore[return-value]  # Without an error there is a result.


def _steps(
    training: Training, tokens: torch.Tensor, labels: torch.Tensor, num_steps: int
) -> tuple[list[torch.Tensor], list[float]]:
    """Losses, and seconds of each step. The host never waits for the device between steps."""
    clock = _Clock(tokens.device)
    losses = []
    clock.mark()
    for _ in range(num_steps):
        losses.append(training.step(tokens, labels))
        clock.mark()
    return losses, clock.seconds()


class _Clock:
    """Times between marks: by events on a GPU, by the host's clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []

    def mark(self) -> None:
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())

    def seconds(self) -> list[float]:
        if self._on_gpu:
            torch.cuda.synchronize()
            marks = [self._events[0].elapsed_time(event) / 1e3 for event in self._events]
        else:
            marks = self._times
        return [after - before for before, after in pairwise(marks)]


def _allocated_gib(device: torch.device) -> float:
    return torch.cuda.memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0


def _reset_peaks(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peaks_gib(device: torch.device) -> tuple[float, float]:
    if device.type != "cuda":
        return 0.0, 0.0
    return torch.cuda.max_memory_allocated(device) / 2**30, torch.cuda.max_memory_reserved(device) / 2**30


def _over_ranks(value: float, op: dist.ReduceOp.RedOpType, workload: Workload) -> float:
    tensor = torch.tensor(value, dtype=torch.float64, device=workload.device)
    dist.all_reduce(tensor, op=op)
    return tensor.item()


def _environment(device: torch.device) -> dict[str, str]:
    environment = {"torch": torch.__version__, "device": "CPU"}
    if device.type == "cuda":
        environment["device"] = torch.cuda.get_device_name(device)
        environment["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return environment


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. 1 if a backend failed or the losses disagree, else 0."""
    options = parse_options(arguments)
    with process_group(options.device_type) as device:
        report = run(options, device)
        if dist.get_rank() == 0:
            print(report.markdown(), flush=True)
        dist.barrier()  # torchrun stops all ranks once one has left with an error.
    return 0 if report.is_sound() else 1


if __name__ == "__main__":
    leave(main())
