"""A rank of `bench_plan`: times real steps of one row after another, and profiles the row to calibrate on.

The rank ends at the first failure, as `estimate_peer` does.
"""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from lamella.testing import Rank
from lamella_integration.estimate_peer import release, row_steps, take_rank
from lamella_integration.launch import leave

_NUM_WARMUP_STEPS: Final = 5
_NUM_PROFILED_STEPS: Final = 3


def main() -> None:
    """Time the steps of the row of each line of standard input."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--steps", type=int, default=36)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--profiled", default="", help="the row to profile")
    parser.add_argument("--traces", type=Path, help="folder of the profile")
    options = parser.parse_args()
    rank = take_rank(options.device)
    with TemporaryDirectory() as folder:
        for line in sys.stdin:
            row = json.loads(line)["row"]
            record = _record(row, Path(folder), options, rank)
            records: list[Any] = [None] * rank.num_ranks
            dist.all_gather_object(records, record)
            if rank.rank == 0:
                print(json.dumps({"row": row, "ranks": records}), flush=True)
    dist.barrier()


def _record(row: str, folder: Path, options: argparse.Namespace, rank: Rank) -> Mapping[str, Any]:
    """Time the steps of a row.

    Returns:
        `seconds` of the median step, `all_seconds` in their order, `trace`: the path of the profile, or "".
    """
    release(is_compiled="--compile" in row.split())
    with row_steps(row, folder, options, rank) as (_, _, step):
        for number in range(_NUM_WARMUP_STEPS):
            step(number)
        seconds = _timed(step, options.steps, rank.device)
        trace = _profiled(step, options.traces, rank) if row == options.profiled else ""
        del step
    return {"seconds": median(seconds), "all_seconds": seconds, "trace": trace}


def _timed(step: Callable[[int], torch.Tensor], num_steps: int, device: torch.device) -> list[float]:
    """Return the times between the ends of steps, on the device. Steps follow each other without a wait of the host."""
    dist.barrier()
    if device.type == "cpu":
        times = [time.perf_counter()]
        for number in range(num_steps):
            step(_NUM_WARMUP_STEPS + number)
            times.append(time.perf_counter())
        return [end - begin for begin, end in pairwise(times)]
    events = [
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(num_steps + 2)
    ]
    step(_NUM_WARMUP_STEPS)
    events[0].record()
    for number in range(num_steps + 1):
        step(_NUM_WARMUP_STEPS + 1 + number)
        events[number + 1].record()
    torch.cuda.synchronize()
    # The first step follows an empty queue.
    return [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(events[1:])]


def _profiled(step: Callable[[int], torch.Tensor], folder: Path | None, rank: Rank) -> str:
    """Profile steps of rank 0, which its peers take too; return the path of the trace on rank 0."""
    count = 1 + _NUM_PROFILED_STEPS
    if rank.rank or folder is None:
        for number in range(count):
            step(100 + number)
        dist.barrier()
        return ""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if rank.device.type == "cuda" else [])]
    when = schedule(wait=0, warmup=1, active=_NUM_PROFILED_STEPS, repeat=1)
    path = folder / "trace.json.gz"
    with profile(
        activities=activities, schedule=when, on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path))
    ) as profiler:
        for number in range(count):
            step(100 + number)
            profiler.step()
    dist.barrier()
    return str(path)


if __name__ == "__main__":
    try:
        main()
    except Exception:  # noqa: BLE001  The parent reads the error, and peers wait in no collective for its end.
        traceback.print_exc()
        leave(1)
    leave(0)
