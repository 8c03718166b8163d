"""A profile of a few steps of a training loop, with the report on exposed communication."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from lamella_trace import TraceError, write_report

NUM_PROFILER_WARMUP_STEPS = (
    3  # The first steps allocate and learn the order of units; the profiler warms up in the last.
)


def step_profiler(num_steps: int, folder: Path, device: torch.device, print_line: Callable[[str], None]) -> profile:
    """Return a profiler of `num_steps` steps of the rank, after three; call its `step()` after each step.

    Args:
        num_steps: Number of steps to profile.
        folder: Folder of the trace and of the report, created if absent.
        device: The device of the model.
        print_line: Prints a line: the folder and the verdict, or the reason for a missing profile.

    Effects: after the last profiled step, the rank waits for the device and writes `folder`; the peers wait for the
        rank in their next collective.
    """

    def finish(profiler: profile) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            trace = folder / "trace.json.gz"
            profiler.export_chrome_trace(str(trace))
            print_line(f"profile: {folder}. {write_report(trace, folder)}")
        except (OSError, TraceError) as error:  # A failed profile must not end the training run.
            print_line(f"profile: {error}")

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    when = schedule(wait=NUM_PROFILER_WARMUP_STEPS - 1, warmup=1, active=num_steps, repeat=1)
    return profile(activities=activities, schedule=when, on_trace_ready=finish)
