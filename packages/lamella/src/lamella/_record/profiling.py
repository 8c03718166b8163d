"""Profiling a few steps of a run: a trace for Perfetto, and the trace's overlap report."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from lamella._record.run_directory import RunDirectory
from lamella_transformers import step_profiler


@contextmanager
def profiled(
    num_steps: int | None, directory: RunDirectory, device: torch.device, say: Callable[[str], None]
) -> Iterator[Callable[[], None]]:
    """Profile `num_steps` steps of this rank, after three; None profiles nothing.

    Yields a function to call after each step.

    Effects: those of `lamella_transformers.step_profiler`, which writes `directory.profile`.
    """
    if num_steps is None:
        yield lambda: None
        return
    with step_profiler(num_steps, directory.profile, device, say) as profiler:
        yield profiler.step
