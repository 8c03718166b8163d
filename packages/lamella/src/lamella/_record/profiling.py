"""Profiling a few steps of a run: a trace for Perfetto, and the trace's overlap report."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from lamella._record.run_directory import RunDirectory
from lamella_trace import TraceError, as_html, as_json, as_text, overlap_report, read_trace, verdict

NUM_WARMUP_STEPS = 3  # The first steps allocate and learn the order of units; the profiler warms up in the last.


@contextmanager
def profiled(
    num_steps: int | None, directory: RunDirectory, device: torch.device, say: Callable[[str], None]
) -> Iterator[Callable[[], None]]:
    """Profile `num_steps` steps of this rank, after `NUM_WARMUP_STEPS`; None profiles nothing.

    Yields a function to call after each step.

    Effects: after the last profiled step, this rank waits for the device and writes `directory.profile`; other ranks
        wait for this rank in their next collective.
    """
    if num_steps is None:
        yield lambda: None
        return

    def finish(profiler: profile) -> None:
        _write(profiler, directory, say)

    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    when = schedule(wait=NUM_WARMUP_STEPS - 1, warmup=1, active=num_steps, repeat=1)
    with profile(activities=activities, schedule=when, on_trace_ready=finish) as profiler:
        yield profiler.step


def _write(profiler: profile, directory: RunDirectory, say: Callable[[str], None]) -> None:
    try:
        _write_report(profiler, directory.profile, say)
    except (OSError, TraceError) as error:  # A failed profile must not end the training run.
        say(f"profile: {error}")


def _write_report(profiler: profile, folder: Path, say: Callable[[str], None]) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / "trace.json.gz"
    profiler.export_chrome_trace(str(path))
    report = overlap_report(read_trace(path), str(path))
    (folder / "overlap.txt").write_text(as_text(report) + "\n", encoding="utf-8")
    (folder / "overlap.json").write_text(as_json(report) + "\n", encoding="utf-8")
    (folder / "overlap.html").write_text(as_html(report), encoding="utf-8")
    say(f"profile: {folder}. {verdict(report)}")
