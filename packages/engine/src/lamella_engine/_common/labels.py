"""Ranges in profiles, and lines in FSDP2's log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.profiler import record_function

_logger = logging.getLogger("torch.distributed.fsdp.fully_shard")
_is_profiled = torch._C._autograd._profiler_enabled
_NOTHING: AbstractContextManager[None] = nullcontext()

RangeWatcher = Callable[[str, str], AbstractContextManager[object]]
"""Given the phase and the unit of a range, enters and leaves it."""

_watchers: list[RangeWatcher] = []


@contextmanager
def watched_ranges(watcher: RangeWatcher) -> Iterator[None]:
    """Give the ranges of all units to a watcher in place of a profiler, in the block."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def label(phase: str, unit: str = "") -> AbstractContextManager[object]:
    """A range in a profile, and a line in FSDP2's log, named as FSDP2 names them.

    Under `torch.autograd.profiler.emit_nvtx()` the range is an NVTX range, for Nsight.

    Effects: none unless a profiler runs or the log is on: an unseen range would cost several microseconds.
    """
    if _logger.isEnabledFor(logging.DEBUG):
        log(phase, unit)
    if _watchers:
        return _watchers[-1](phase, unit)
    return record_function(_name(phase, unit)) if _is_profiled() else _NOTHING


def log(phase: str, unit: str = "") -> None:
    """A line in FSDP2's log, which `TORCH_LOGS=fsdp` turns on.

    Effects: none unless the log is on.
    """
    if _logger.isEnabledFor(logging.DEBUG):
        _logger.debug("%s", _name(phase, unit))


def _name(phase: str, unit: str) -> str:
    return f"FSDP::{phase} ({unit})" if unit else f"FSDP::{phase}"
