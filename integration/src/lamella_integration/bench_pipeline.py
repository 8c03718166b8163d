"""Pipelines predicted and measured: a step of a decoder in stages under each order, beside the simulation of the order.

    torchrun --nproc-per-node 2 -m lamella_integration.bench_pipeline --out rows.jsonl

The simulation has two kinds of prices, both measured before the steps: of each slot, on its stage's rank without a
pipeline (`stage_times`), and of a message between the first two ranks. A step is forward and backward of all
microbatches, without an optimizer; a time is the median of the steps, from a barrier to the last kernel of the slowest
rank. *Slots* is the time of the slots inside a step over the price of the slots, a rank each: above 1 kernels of
messages, or a lower clock, slow compute down.
"""

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from lamella_integration.decoder_stages import stages_of_rank
from lamella_integration.launch import leave, process_group
from lamella_integration.llama import LlamaConfig
from lamella_integration.stage_times import EventKey, key_of, message_ms, slot_ms
from lamella_schedule import (
    Event,
    LayerPlan,
    ModelChunk,
    PipelineTimeline,
    Stopwatch,
    pipeline,
    pipeline_events,
    run_pipeline,
    simulate_pipeline,
)

SCHEDULES: Final = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
_WARMUP_STEPS: Final = 2


@dataclass(frozen=True, kw_only=True)
class PipelineRow:
    """One order's times.

    Attributes:
        schedule: Name of the order.
        num_stages: Number of stages.
        predicted_ms: The simulation's total.
        idle: The simulation's share of time without compute, a mean over ranks.
        measured_ms: The median of the steps.
        least_ms: The fastest step.
        most_ms: The slowest step.
        slot_ratios: Time of a rank's slots inside a step over their prices, by rank.
        message_ms: Price of a message.
        host_ms: Time of the host for a slot.
        gib: The largest rank's peak of allocated memory.
        loss: Sum of the last step's losses.
    """

    schedule: str
    num_stages: int
    predicted_ms: float
    idle: float
    measured_ms: float
    least_ms: float
    most_ms: float
    slot_ratios: tuple[float, ...]
    message_ms: float
    host_ms: float
    gib: float
    loss: float

    @property
    def difference(self) -> float:
        """Measured over predicted time, less 1."""
        return self.measured_ms / self.predicted_ms - 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure each order, and print the table."""
    options = options_of(arguments)
    # Kernels of messages spin while they wait; a few streaming multiprocessors are enough for activations.
    os.environ.setdefault("NCCL_MAX_P2P_NCHANNELS", "4")
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    with process_group(options.device) as device:
        rows = measure(options, device)
        if dist.get_rank() == 0:
            print(table(rows), flush=True)
    return 0


def measure(options: argparse.Namespace, device: torch.device) -> list[PipelineRow]:
    """Measure each order.

    Effects: collective over all ranks; the first rank prints the rows, and appends them to `options.out`.
    """
    _print_line(_title(device))
    rows = []
    for schedule in options.schedules:
        bench = _PipelineBench(schedule, options, device)
        rows.append(bench.row())
        line = json.dumps(asdict(rows[-1]))
        _print_line(line)
        if options.out is not None and dist.get_rank() == 0:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        del bench
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def _print_line(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of a command line; None for this process's."""
    parser = argparse.ArgumentParser(prog="lamella_integration.bench_pipeline", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--schedules", nargs="+", choices=SCHEDULES, metavar="NAME", default=SCHEDULES, help=", ".join(SCHEDULES))
    add("--microbatches", type=int, default=8)
    add("--layers", type=int, default=16)
    add("--dim", type=int, default=4096)
    add("--heads", type=int, default=32, help="heads of queries; a quarter as many of keys")
    add("--ffn", type=int, default=14336)
    add("--vocabulary", type=int, default=32768)
    add("--tokens", type=int, default=2048, help="tokens of a sequence; a microbatch is one sequence")
    add("--steps", type=int, default=7, help=f"timed steps, after {_WARMUP_STEPS} others")
    add("--repetitions", type=int, default=7, help="passes of each stage, for its price")
    add("--device", choices=("cpu", "cuda"), default="cuda")
    add("--out", type=Path, metavar="FILE", help="append the rows, as JSON lines")
    return parser.parse_args(arguments)


class _PipelineBench:
    """The stages of a rank under one order, and the prices of all ranks."""

    def __init__(self, schedule: str, options: argparse.Namespace, device: torch.device) -> None:
        self._schedule, self._device, self._num_steps = schedule, device, options.steps
        self._pipeline = pipeline(schedule, dist.get_world_size(), options.microbatches)
        config = LlamaConfig(
            dim=options.dim,
            num_layers=options.layers,
            num_heads=options.heads,
            num_kv_heads=max(1, options.heads // 4),
            ffn_dim=options.ffn,
            vocab_size=options.vocabulary,
        )
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._stages = stages_of_rank(
            self._pipeline, dist.get_rank(), config, length=options.tokens, device=device, dtype=dtype
        )
        rows = torch.randint(
            config.vocab_size, (options.microbatches, options.tokens + 1), generator=torch.Generator().manual_seed(1)
        ).to(device)
        self._batches = [(row[None, :-1], row[None, 1:]) for row in rows]
        self._border = torch.empty(1, options.tokens, config.dim, device=device, dtype=dtype)
        self._prices, self._plans, self._host_ms = self._measure_prices(options.repetitions)
        self._message_ms = message_ms(self._border)

    def row(self) -> PipelineRow:
        """Take the steps. Effects: collective over all ranks."""
        timeline = self._simulate()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        measured, losses = [], [torch.zeros(())]
        for step in range(_WARMUP_STEPS + self._num_steps):
            begin = self._synchronize()
            losses = self._step()
            if self._device.type == "cuda":
                torch.cuda.synchronize()
            if step >= _WARMUP_STEPS:
                measured.append(_largest((time.perf_counter() - begin) * 1e3, self._device))
        peak = torch.cuda.max_memory_allocated() / 2**30 if self._device.type == "cuda" else 0.0
        return PipelineRow(
            schedule=self._schedule,
            num_stages=self._pipeline.num_stages,
            predicted_ms=timeline.total,
            idle=timeline.bubble,
            measured_ms=statistics.median(measured),
            least_ms=min(measured),
            most_ms=max(measured),
            slot_ratios=self._slot_ratios(timeline),
            message_ms=self._message_ms,
            host_ms=self._host_ms,
            gib=_largest(peak, self._device),
            loss=_largest(float(sum(losses)) if losses else 0.0, self._device),
        )

    def _step(self, **options: Any) -> list[torch.Tensor]:
        for stage in self._stages.values():
            stage.zero_grad()
        borders = [self._border.to("meta")]
        return run_pipeline(self._pipeline, self._chunk, borders, device=self._device, **options)

    def _chunk(self, stage: int, microbatch: int) -> ModelChunk:
        return self._stages[stage].chunk(*self._batches[microbatch], 1 / len(self._batches))

    def _synchronize(self) -> float:
        dist.barrier()
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _measure_prices(self, num_repetitions: int) -> tuple[dict[EventKey, float], dict[int, list[LayerPlan]], float]:
        """Prices and layers of all ranks' stages, and the slowest host's time for a slot."""
        self._synchronize()
        prices, hosts = {}, []
        for index, stage in self._stages.items():
            stage_prices, host = slot_ms(
                stage,
                partial(self._chunk, index, 0),
                [self._border] if index else [],
                stage=index,
                num_repetitions=num_repetitions,
            )
            prices.update(stage_prices)
            hosts.append(host)
        plans = {index: self._chunk(index, 0).plans for index in self._stages}
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, (prices, plans, max(hosts)))
        return (
            {key: price for prices, *_ in gathered for key, price in prices.items()},
            {stage: layers for _, plans, _ in gathered for stage, layers in plans.items()},
            max(host for *_, host in gathered),
        )

    def _price(self, event: Event) -> float:
        return self._prices[key_of(event)]

    def _simulate(self) -> PipelineTimeline:
        events = pipeline_events(self._pipeline, self._plans)
        return simulate_pipeline(events, self._price, host=self._host_ms, send=self._message_ms)

    def _slot_ratios(self, timeline: PipelineTimeline) -> tuple[float, ...]:
        """One more step under a stopwatch, by rank."""
        watch = Stopwatch(self._device)
        self._step(around=watch)
        measured = sum(span.stop - span.start for span in watch.timeline.spans)
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, measured)
        predicted = [
            sum(self._price(span.event) for span in rank_timeline.spans if isinstance(span.event, Event))
            for rank_timeline in timeline.ranks
        ]
        return tuple(a / b for a, b in zip(gathered, predicted, strict=True))


def _title(device: torch.device) -> str:
    if device.type == "cpu":
        return f"{dist.get_world_size()} CPU ranks, torch {torch.__version__}"
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return f"{dist.get_world_size()} x {torch.cuda.get_device_name(device)}, torch {torch.__version__}, NCCL {nccl}"


def _largest(number: float, device: torch.device) -> float:
    largest = torch.tensor(number, dtype=torch.float64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.item()


def table(rows: Sequence[PipelineRow]) -> str:
    """The rows as a table for a page."""
    head = ["order", "stages", "idle, predicted", "predicted ms", "measured ms", "difference", "range ms"]
    head += ["slots", "peak GiB", "loss"]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "--:|" * (len(head) - 1)]
    lines += ["| " + " | ".join(_cells(row)) + " |" for row in rows]
    if rows:
        lines += ["", f"A message takes {rows[0].message_ms:.3f} ms, the host {rows[0].host_ms * 1e3:.0f} us a slot."]
    return "\n".join(lines)


def _cells(row: PipelineRow) -> list[str]:
    return [
        row.schedule,
        str(row.num_stages),
        f"{row.idle:.1%}",
        f"{row.predicted_ms:.1f}",
        f"{row.measured_ms:.1f}",
        f"{row.difference:+.1%}",
        f"{row.least_ms:.1f} to {row.most_ms:.1f}",
        " / ".join(f"{ratio:.3f}" for ratio in row.slot_ratios),
        f"{row.gib:.1f}",
        f"{row.loss:.5f}",
    ]


if __name__ == "__main__":
    leave(main())
