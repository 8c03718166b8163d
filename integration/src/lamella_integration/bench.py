"""Every backend on one model, one after another in one run: speed, memory and losses side by side.

    torchrun --nproc-per-node 4 -m lamella_integration.bench --size 8b --tokens 4096 --reduce bf16 --out results \
        --backends ideal lamella lamella:keep=4GiB fsdp2 megatron_fsdp_experimental

Options follow a backend after a colon, NAME:OPTION=VALUE,OPTION=VALUE; each set of options is a separate row. All
backends start from the same weights and see the same random tokens (one batch, repeated: the loss falls, and a wrong
gradient shows). A failed backend has its error in its row. Results are written after every backend, because a rank
failing alone inside a step leaves its peers in a collective until the group times out.
"""

import argparse
import gc
import platform
import shlex
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from lamella_integration.backends import BACKENDS, REDUCE_DTYPES, Backend, Training, Workload
from lamella_integration.launch import leave, process_group
from lamella_integration.llama import SIZES, LlamaConfig, num_flops_per_token
from lamella_integration.phases import host_seconds, phases_of
from lamella_integration.profile import load_profiler
from lamella_integration.repeatable import use_repeatable_kernels
from lamella_integration.report import BenchmarkReport, Failure, HostTime, Measurement
from lamella_integration.variants import backend_of, options_of

T = TypeVar("T")


class BackendFailed(RuntimeError):
    """A rank failed. Raised on every rank, with the failed rank's error."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line's options. `workload` still lacks its argument `device`; `backends` are by row name."""

    title: str
    command: str
    workload: Callable[..., Workload]
    num_tokens: int
    backends: Mapping[str, Backend]
    num_steps: int
    num_warmup_steps: int
    is_deterministic: bool
    has_phases: bool
    device_type: str
    out: Path | None


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """Parse and check the command line."""
    parser = _parser()
    arguments = sys.argv[1:] if arguments is None else arguments
    values = parser.parse_args(arguments)
    for name in ("tokens", "steps", "warmup", "microbatches", "layers"):
        if (value := getattr(values, name)) is not None and value < 1:
            parser.error(f"Expected --{name} of at least 1, got {value}.")
    try:
        backends = dict(zip(_rows(values.backends), map(backend_of, values.backends), strict=True))
    except ValueError as error:
        parser.error(str(error))
    return Options(
        title=_title(values),
        command=shlex.join(arguments),
        workload=partial(
            Workload,
            config=_config(values),
            reduce_dtype=REDUCE_DTYPES[values.reduce],
            units=values.units,
            num_microbatches=values.microbatches,
            recomputes=values.checkpoint,
            compiler=values.compile,
        ),
        num_tokens=values.tokens,
        backends=backends,
        num_steps=values.steps,
        num_warmup_steps=values.warmup,
        is_deterministic=values.deterministic,
        has_phases=values.phases,
        device_type=values.device,
        out=values.out,
    )


def _parser() -> argparse.ArgumentParser:
    options = "; ".join(f"{name} has {', '.join(names)}" for name in BACKENDS if (names := options_of(name)))
    parser = argparse.ArgumentParser(prog="lamella_integration.bench", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--size", choices=SIZES, default="1b", help="size of the Llama decoder")
    add("--layers", type=int, help="blocks, instead of the size's own number: wide ones on few GPUs")
    add("--tokens", type=int, default=4096, help="tokens per rank and microbatch, one sequence")
    add("--microbatches", type=int, default=1, help="microbatches per step, with accumulated gradients")
    add(
        "--backends", nargs="+", default=["ideal", "lamella", "fsdp2"], metavar="BACKEND[:OPTION=VALUE,...]",
        help=f"in this order, any of: {', '.join(BACKENDS)}; a repeated name is measured again. "
        f"Options: {options}",
    )  # fmt: skip
    add("--reduce", choices=REDUCE_DTYPES, default="bf16", help="dtype of the gradients' reduction")
    add("--units", choices=["blocks", "ends"], default="blocks", help="ends: the embedding and the head are units too")
    add("--checkpoint", action="store_true", help="recompute each block's activations in backward")
    add("--compile", nargs="?", const="inductor", metavar="COMPILER", help="compile each block before sharding")
    add("--steps", type=int, default=8, help="measured steps, after the warm-up")
    add("--warmup", type=int, default=4, help="steps before the measured ones")
    add("--phases", action="store_true", help="also measure the phases of a step, on the device and on the host")
    add("--deterministic", action="store_true", help="repeatable kernels: slow, and losses compare exactly")
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--out", type=Path, help="folder for the JSON, the table and the plot")
    return parser


def _config(values: argparse.Namespace) -> LlamaConfig:
    config = SIZES[values.size]
    return config if values.layers is None else replace(config, num_layers=values.layers)


def _rows(backends: Sequence[str]) -> list[str]:
    """Return the names of rows: repetitions of a backend get a number."""
    counts = [backends[: i + 1].count(name) for i, name in enumerate(backends)]
    return [name if count == 1 else f"{name} ({count})" for name, count in zip(backends, counts, strict=True)]


def _title(values: argparse.Namespace) -> str:
    parts = {
        f"{values.size}, {values.tokens} tokens a GPU": True,
        f"{values.layers} layers": values.layers,
        f"{values.microbatches} microbatches": values.microbatches > 1,
        f"{values.reduce} reduce": True,
        "embedding and head as units": values.units == "ends",
        "activations recomputed": values.checkpoint,
        f"blocks compiled by {values.compile}": values.compile,
        "deterministic": values.deterministic,
    }
    return ", ".join(part for part, is_so in parts.items() if is_so)


def run(options: Options, device: torch.device) -> BenchmarkReport:
    """Measure every backend in the given order. The default process group must exist.

    Effects: collective on the default group; rank 0 writes the report after each backend.
    """
    if options.is_deterministic:
        use_repeatable_kernels()
    if options.has_phases:
        load_profiler(device)
    num_ranks = dist.get_world_size()
    report = BenchmarkReport(
        title=f"{options.title}, {num_ranks} ranks",
        command=f'./dev "bench({num_ranks})" {options.command}',
        environment=_environment(device),
    )
    workload = options.workload(device=device)
    for name, backend in options.backends.items():
        row = _measure_and_release(backend, workload, options)
        if options.has_phases and isinstance(row, Measurement):
            row = _with_host_time(row, backend, workload)
        report.rows[name] = row
        if dist.get_rank() == 0 and options.out is not None:
            report.write(options.out)
    return report


def _measure_and_release(backend: Backend, workload: Workload, options: Options) -> Measurement | Failure:
    baseline = _allocated_gib(workload.device)
    try:
        row: Measurement | Failure = _measure(backend, workload, options, baseline)
    except BackendFailed as error:
        row = Failure(error=str(error))
    _release(workload)
    return row.with_leak(_over_ranks(_allocated_gib(workload.device) - baseline, dist.ReduceOp.MAX, workload))


def _release(workload: Workload) -> None:
    if workload.compiler is not None:
        torch.compiler.reset()  # The next backend compiles the same code again, and torch limits recompilations.
    gc.collect()  # Hooks and parameters form reference cycles: their memory is freed only by a collection.
    if workload.device.type == "cuda":
        torch.cuda.empty_cache()


def _measure(backend: Backend, workload: Workload, options: Options, baseline_gib: float) -> Measurement:
    _reset_peaks(workload.device)
    training = on_every_rank(lambda: backend(workload))
    built_gib = _allocated_gib(workload.device) - baseline_gib
    tokens, labels = workload.batch(options.num_tokens)
    losses, _ = on_every_rank(lambda: _steps(training, tokens, labels, options.num_warmup_steps))
    if not training.is_captured:
        _reset_peaks(workload.device)
    more_losses, step_s = on_every_rank(lambda: _steps(training, tokens, labels, options.num_steps))
    losses += more_losses
    slowest_s = _over_ranks(statistics.median(step_s), dist.ReduceOp.MAX, workload)
    allocated_gib, reserved_gib = _peaks_gib(workload.device)
    num_tokens = tokens.numel()
    flops = num_flops_per_token(workload.config, options.num_tokens)
    measured = Measurement(
        step_s=slowest_s,
        tokens_per_s=num_tokens / slowest_s,
        tflops=num_tokens * flops / slowest_s / 1e12,
        peak_allocated_gib=_over_ranks(allocated_gib - baseline_gib, dist.ReduceOp.MAX, workload),
        peak_reserved_gib=_over_ranks(reserved_gib, dist.ReduceOp.MAX, workload),
        built_gib=_over_ranks(built_gib, dist.ReduceOp.MAX, workload),
        at_rest_gib=_over_ranks(_allocated_gib(workload.device) - baseline_gib, dist.ReduceOp.MAX, workload),
        losses=_means_over_ranks(losses),
        trained=training.learns,
        steps_s=tuple(_over_ranks(seconds, dist.ReduceOp.MAX, workload) for seconds in step_s),
    )
    if not options.has_phases:
        return measured
    try:
        return replace(measured, phases=on_every_rank(lambda: phases_of(training, tokens, labels)))
    except BackendFailed as error:
        return replace(measured, trouble=f"no phases: {error}")


def _with_host_time(row: Measurement, backend: Backend, workload: Workload) -> Measurement:
    """Add the host time, except for compiled blocks: two thin models would each compile all blocks again."""
    if workload.compiler is not None:
        return row
    try:
        ours, ideal = _host_us(backend, workload), _host_us(BACKENDS["ideal"], workload)
    except BackendFailed as error:
        return replace(row, trouble="; ".join(filter(None, [row.trouble, f"no host time: {error}"])))
    return replace(row, host=HostTime(total_us=ours, above_ideal_us=ours - ideal))


def _host_us(backend: Backend, workload: Workload) -> float:
    """Measure the slowest rank's host time per unit, in microseconds. Effects: collective over all ranks."""
    seconds = on_every_rank(lambda: host_seconds(backend, workload))
    _release(workload)
    return _over_ranks(seconds, dist.ReduceOp.MAX, workload) / workload.num_units * 1e6


def on_every_rank(action: Callable[[], T]) -> T:
    """Return the action's result if the action succeeded on all ranks; else raise `BackendFailed` on all ranks."""
    result, error = None, None
    try:
        result = action()
    except Exception as caught:  # noqa: BLE001  Any error becomes the backend's row, and the remaining backends run.
        error = f"rank {dist.get_rank()}: {type(caught).__name__}: {caught}"
        traceback.print_exc()
        traceback.clear_frames(caught.__traceback__)  # The frames hold the failed model.
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    for error in errors:
        if error is not None:
            raise BackendFailed(error)
    return result  # type: ignore[return-value]  # Set when no error was raised.


def _steps(
    training: Training, tokens: torch.Tensor, labels: torch.Tensor, num_steps: int
) -> tuple[list[torch.Tensor], list[float]]:
    """Run steps; return their losses and seconds. The host never waits for the device between steps."""
    clock = _IntervalClock(tokens.device)
    losses = []
    clock.mark()
    for _ in range(num_steps):
        losses.append(training.step(tokens, labels))
        clock.mark()
    return losses, clock.seconds()


class _IntervalClock:
    """Times between marks: CUDA events on a GPU, the host's clock on a CPU."""

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


def _means_over_ranks(losses: Sequence[torch.Tensor]) -> tuple[float, ...]:
    means = torch.stack(list(losses)).double()
    dist.all_reduce(means)
    return tuple((means / dist.get_world_size()).tolist())


def _environment(device: torch.device) -> dict[str, str]:
    environment = {"python": platform.python_version(), "torch": torch.__version__, "device": "CPU"}
    if device.type == "cuda":
        environment["device"] = torch.cuda.get_device_name(device)
        environment["cuda"] = str(torch.version.cuda)
        environment["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    for package in ("lamella-engine", "megatron-fsdp", "deepspeed"):
        with suppress(PackageNotFoundError):
            environment[package] = version(package)
    environment |= _commit()
    return environment


def _commit() -> dict[str, str]:
    """Return the measured commit when run from a checkout, marked if files differ from the commit."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    with suppress(OSError, subprocess.CalledProcessError):
        return {"commit": subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()}
    return {}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns 1 if a backend failed or the losses disagree, else 0."""
    options = parse_options(arguments)
    with process_group(options.device_type) as device:
        report = run(options, device)
        if dist.get_rank() == 0:
            print(report.markdown(), flush=True)
        dist.barrier()  # torchrun stops all ranks once a rank has exited with an error: let every rank get here first.
    return 0 if report.is_sound() else 1


if __name__ == "__main__":
    leave(main())
