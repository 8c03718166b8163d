"""The times of a run's events on their lanes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lamella_schedule._events import Event
from lamella_schedule._timeline import Span, Timeline


class Stopwatch:
    """Measures a run, passed to `run` as `around`.

    Args:
        device: The device of the tensors; None for the current accelerator, or the CPU without one.

    Effects: two timed events of the device for each event of the run; no host sync.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self._device = device_of(device)
        self._marks: list[tuple[Event, torch.Event | float, torch.Event | float]] = []

    @contextmanager
    def __call__(self, event: Event) -> Iterator[None]:
        """Measure the time inside the context."""
        start = self._mark()
        yield
        self._marks.append((event, start, self._mark()))

    @property
    def timeline(self) -> Timeline:
        """All spans measured so far, in milliseconds from the first.

        Effects: waits on the host until the device has run the last event.
        """
        return Timeline(tuple(Span(event, self._at(start), self._at(stop)) for event, start, stop in self._marks))

    def _mark(self) -> torch.Event | float:
        if self._device.type == "cpu":
            return time.perf_counter() * 1e3
        mark = torch.Event(self._device, enable_timing=True)
        mark.record()  # on the current stream, the lane's
        return mark

    def _at(self, mark: torch.Event | float) -> float:
        first = self._marks[0][1]
        if isinstance(mark, torch.Event) and isinstance(first, torch.Event):
            mark.synchronize()
            return float(first.elapsed_time(mark))
        assert isinstance(mark, float) and isinstance(first, float)
        return mark - first


def device_of(device: torch.device | str | None) -> torch.device:
    """Return a device; for None the current accelerator, or the CPU without one."""
    if device is not None:
        return torch.device(device)
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
