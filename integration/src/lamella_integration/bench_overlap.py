"""Whether all-to-alls hide: steps of models with experts, overlapped and plain, under lamella and megatron-core.

    torchrun --nproc-per-node 2 -m lamella_integration.bench_overlap --sizes 2048x2048 4096x4096 --out rows.jsonl \
        --trace traces
    python -m lamella_integration.bench_overlap --table rows.jsonl

A size is HIDDENxTOKENS: the width, and the tokens of a microbatch on each rank. Experts are spread over all ranks.
All modes of all sizes run one after another in one process a rank, with the same weights and tokens. A step is forward,
backward and the reduction of gradients, without an optimizer: modes compare with the plain mode of the same engine,
because lamella also gathers parameters (ZeRO-3 unless `--stage` asks otherwise) and keeps fp32 weights, and
megatron-core's `DistributedDataParallel` does neither without a `DistributedOptimizer`. *ideal* is lamella without
all-to-alls, with as many rows of a rank's own for its experts: with `--balanced`, where they are.

A row is appended when its mode is done. An error becomes the row's; a rank failing alone inside a step leaves its
peers in a collective until the group times out, and `--modes` takes the remaining modes up. `--trace` profiles one
more step of the overlapped modes at the last size, and saves the traces for `lamella overlap-report`. *hidden* is the
share of the all-to-alls' time with compute beside them, a rank each.
"""

import argparse
import gc
import importlib
import json
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from lamella_integration.bench import BackendFailed, on_every_rank
from lamella_integration.launch import leave, process_group
from lamella_integration.overlap_steps import MODES, STAGES, ModeSteps, Size, largest_distance
from lamella_integration.profile import load_profiler
from lamella_trace import overlap_report, read_trace

_WARMUP_STEPS = 3
_TIMEOUT_MINUTES = 2  # of megatron-core's groups, half an hour by default


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sweep, or print the table of a file's rows."""
    options = _options(arguments)
    if options.table is not None:
        print(table([json.loads(line) for line in options.table.read_text(encoding="utf-8").splitlines()]))
        return 0
    # Streams beyond the default of 8 hardware queues share queues, and wait for each other.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    testing = importlib.import_module("lamella_testing.megatron")
    with process_group(options.device) as device, testing.megatron_on_cpu() if device.type == "cpu" else nullcontext():
        importlib.import_module("megatron.core.parallel_state").initialize_model_parallel(
            expert_model_parallel_size=dist.get_world_size(),
            expert_tensor_parallel_size=1,
            distributed_timeout_minutes=_TIMEOUT_MINUTES,
        )
        if options.trace is not None:
            load_profiler(device)
        rows = [_measure_and_write(mode, size, options) for size in options.sizes for mode in options.modes]
        if dist.get_rank() == 0:
            print(table(rows), flush=True)
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="lamella_integration.bench_overlap", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--sizes", nargs="+", metavar="HIDDENxTOKENS", default=["2048x2048", "2048x4096", "4096x4096"])
    add("--modes", nargs="+", choices=MODES, metavar="MODE", help=f"default: all for the model, of {', '.join(MODES)}")
    add("--rows", type=int, default=1, help="sequences of a microbatch")
    add("--layers", type=int, default=4)
    add("--experts", type=int, default=8, help="experts a layer over all ranks")
    add("--top-k", type=int, default=2, help="experts a token")
    add("--balanced", action="store_true", help="experts take tokens in turn: all have as many")
    add("--ffn", type=int, help="inner width of an expert; default: the hidden width")
    add("--pattern", help="a HybridModel's, units in brackets, such as [*E][*E], in place of a GPTModel")
    add("--microbatches", type=int, default=4)
    add("--steps", type=int, default=8, help=f"timed steps, after {_WARMUP_STEPS} others")
    add("--stage", choices=STAGES, default="3", help="ZeRO's stage of lamella")
    add("--device", choices=("cpu", "cuda"), default="cuda")
    add("--out", type=Path, metavar="FILE", help="append the rows, as JSON lines")
    add("--trace", type=Path, metavar="FOLDER", help="profile a step of lamella's overlapped modes at the last size")
    add("--table", type=Path, metavar="FILE", help="print the rows of a file as a table, and run nothing")
    options = parser.parse_args(arguments)
    try:
        options.sizes = [_size(text, options) for text in options.sizes]
    except ValueError as error:
        parser.error(str(error))
    has_plan = options.pattern is None  # the release plans GPTModels only
    fit = [name for name, mode in MODES.items() if has_plan or not (mode.is_megatron and mode.overlaps)]
    if unfit := set(options.modes or ()) - set(fit):
        parser.error(f"Expected --modes without {sorted(unfit)} for --pattern, which megatron-core has no plan for.")
    options.modes = options.modes or fit
    return options


def _size(text: str, options: argparse.Namespace) -> Size:
    parts = text.split("x")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts) or int(parts[1]) % options.rows:
        raise ValueError(
            f"Expected --sizes of HIDDENxTOKENS, with tokens divisible by --rows {options.rows}, got {text!r}."
        )
    hidden, num_tokens = map(int, parts)
    return Size(
        hidden=hidden,
        rows=options.rows,
        length=num_tokens // options.rows,
        layers=options.layers,
        experts=options.experts,
        top_k=options.top_k,
        ffn=options.ffn or hidden,
        balances=options.balanced,
        num_microbatches=options.microbatches,
        pattern=options.pattern,
        stage=options.stage,
        device=options.device,
    )


# -- a row -------------------------------------------------------------------------------------------------------------


def _measure_and_write(name: str, size: Size, options: argparse.Namespace) -> dict[str, Any]:
    row = {"size": _name(size), "mode": name}
    try:
        row |= _measure(name, size, options)
    except BackendFailed as error:
        row["error"] = str(error)
    gc.collect()  # Hooks and parameters form cycles.
    if size.device == "cuda":
        torch.cuda.empty_cache()
    if dist.get_rank() == 0:
        print(json.dumps(row), flush=True)
        if options.out is not None:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    return row


def _name(size: Size) -> str:
    model = size.pattern or f"{size.layers} layers"
    experts = f"{size.top_k} of {size.experts} experts of {size.ffn}"
    parts = [f"{size.hidden}x{size.rows * size.length}", model, experts]
    parts += [f"{size.num_microbatches} microbatches"] + ([f"of {size.rows} rows"] if size.rows > 1 else [])
    parts += ["routed in turn"] if size.balances else []
    return ", ".join([*parts, f"ZeRO-{size.stage}"])


def _measure(name: str, size: Size, options: argparse.Namespace) -> dict[str, Any]:
    step = on_every_rank(lambda: ModeSteps(MODES[name], size))
    try:
        figures = _times(step, size, options.steps)
        is_traced = step.mode.overlaps and not step.mode.is_megatron and size == options.sizes[-1]
        if options.trace is not None and is_traced:
            stem = f"{name.replace(', ', '-')}-{size.hidden}x{size.rows * size.length}"
            figures |= _traced(step, options.trace, stem)
        return figures
    finally:
        step.release()


def _times(step: ModeSteps, size: Size, num_steps: int) -> dict[str, Any]:
    on_every_rank(lambda: _seconds(step, _WARMUP_STEPS))
    if size.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    losses, seconds = on_every_rank(lambda: _seconds(step, num_steps))
    peak = torch.cuda.max_memory_allocated() if size.device == "cuda" else 0
    figures = {
        "ms": 1e3 * max(_gathered_from_ranks(statistics.median(seconds))),
        "gib": max(_gathered_from_ranks(peak)) / 2**30,
    }
    if step.mode.is_ideal:  # experts see other tokens
        return figures
    return {**figures, "losses": list(chain(*_gathered_from_ranks(losses))), "norm": on_every_rank(step.gradient_norm)}


def _gathered_from_ranks(value: Any) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def _seconds(step: ModeSteps, num_steps: int) -> tuple[list[float], list[float]]:
    """Take steps; return the losses of the last step's microbatches on this rank, and the seconds of each step."""
    seconds, losses = [], list[torch.Tensor]()
    _synchronize()
    for _ in range(num_steps):
        begin = time.perf_counter()
        losses = step()
        _synchronize()
        seconds.append(time.perf_counter() - begin)
    return [loss.item() for loss in losses], seconds


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# -- a trace -----------------------------------------------------------------------------------------------------------


def _traced(step: ModeSteps, folder: Path, stem: str) -> dict[str, Any]:
    """Profile one step; return each rank's hidden share of all-to-alls, and idle share of the step, or the trouble."""
    path = folder / f"{stem}-rank{dist.get_rank()}.json.gz"

    def trace() -> dict[str, float | None]:
        folder.mkdir(parents=True, exist_ok=True)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        with torch_profile(
            activities=activities,
            schedule=torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1),  # the first step starts slowly
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
            acc_events=True,
        ) as profiler:
            for _ in range(2):
                _seconds(step, 1)
                profiler.step()
        return shares(read_trace(path), str(path))

    try:
        ranks = _gathered_from_ranks(on_every_rank(trace))
    except BackendFailed as error:
        return {"trouble": f"no trace: {error}"}
    return {key: [shares_of_rank[key] for shares_of_rank in ranks] for key in ranks[0]}


def shares(trace: dict[str, Any], source: str = "the trace") -> dict[str, float | None]:
    """The share of the time of dispatches' and combines' all-to-alls with compute beside, and the idle share.

    Args:
        trace: Profile of an overlapped step, as `read_trace` returns it.
        source: Name of the trace in errors.

    Returns:
        `hidden`, and `idle` of the whole step; None where the trace has no all-to-alls, or none of a GPU.

    Raises:
        TraceError: The profile is not a trace that `overlap_report` reads.
    """
    report = overlap_report(trace, source)
    traffics = [node.traffic for node in report.total.nodes]
    duration = sum(traffic.duration for traffic in traffics)
    if not report.on_gpu or not duration:
        return {"hidden": None, "idle": None}
    return {
        "hidden": sum(traffic.hidden or 0.0 for traffic in traffics) / duration,
        "idle": report.total.idle / report.total.span,
    }


# -- the table ---------------------------------------------------------------------------------------------------------


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown; of several rows of one size and mode, the last.

    Columns: *gain* is the share of the step's time that the mode saves against the plain mode of its engine;
    *all-to-all* the share that *ideal* saves, and *gone* the part of it that the mode saves; *hidden* the share of
    all-to-alls' time with compute beside, and *idle* of the step's time without a kernel, both of a profiled step, a
    rank each; *apart* the largest distance of losses, and the relative distance of norms of gradients, from the plain
    mode's.
    """
    head = ["size", "mode", "ms a step", "gain", "all-to-all", "gone", "hidden", "idle", "peak GiB", "loss, last"]
    head += ["losses apart", "norms apart"]
    lines = ["| " + " | ".join(head) + " |", "|---|---|" + "--:|" * (len(head) - 2)]
    rows_by_mode = {(row["size"], row["mode"]): row for row in rows}
    for (size, name), row in rows_by_mode.items():
        lines.append("| " + " | ".join([size, name, *_cells(row, rows_by_mode)]) + " |")
    return "\n".join(lines)


def _cells(row: dict[str, Any], rows_by_mode: dict[tuple[str, str], dict[str, Any]]) -> list[str]:
    if "error" in row:
        return [row["error"].splitlines()[0].replace("|", "/"), *[""] * 9]
    mode = MODES[row["mode"]]
    plain = rows_by_mode.get((row["size"], mode.plain), {})
    exchange = _difference(rows_by_mode.get((row["size"], "lamella"), {}), rows_by_mode.get((row["size"], "ideal"), {}))
    saved = _difference(plain, row)
    is_plain = row["mode"] == mode.plain
    return [
        f"{row['ms']:.2f}",
        "" if is_plain or mode.is_ideal else _percent(saved, plain.get("ms")),
        _percent(exchange, plain.get("ms")) if row["mode"] == "lamella" else "",
        _percent(saved, exchange) if mode.overlaps and not mode.is_megatron else "",
        _percents_by_rank(row.get("hidden", ())) or row.get("trouble", ""),
        _percents_by_rank(row.get("idle", ())),
        f"{row['gib']:.2f}",
        f"{row['losses'][-1]:.4f}" if "losses" in row else "",
        *_apart(row, plain),
    ]


def _difference(slow: dict[str, Any], fast: dict[str, Any]) -> float | None:
    return slow["ms"] - fast["ms"] if "ms" in slow and "ms" in fast else None


def _percent(part: float | None, total: float | None) -> str:
    return "" if part is None or not total else f"{100 * part / total:.1f} %"


def _percents_by_rank(parts: Sequence[float | None]) -> str:
    return " / ".join(_percent(part, 1.0) for part in parts if part is not None)


def _apart(row: dict[str, Any], plain: dict[str, Any]) -> list[str]:
    """The largest distance of losses, and the relative distance of gradients' norms, from the plain mode's."""
    if row is plain or "losses" not in row or "losses" not in plain:
        return ["", ""]
    losses = f"{largest_distance(row['losses'], plain['losses']):.2g}"
    if row["norm"] is None:
        return [losses, ""]
    return [losses, f"{abs(row['norm'] / plain['norm'] - 1):.2g}"]


if __name__ == "__main__":
    leave(main())
