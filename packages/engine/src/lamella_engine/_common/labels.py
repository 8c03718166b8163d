"""Ranges in profiles, and lines in FSDP2's log."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.profiler import record_function

_logger = logging.getLogger("torch.distributed.fsdp.fully_shard")
_is_profiled = torch._C._autograd._profiler_enabled
_NOTHING: AbstractContextManager[None] = nullcontext()


def label(phase: str, unit: str = "") -> AbstractContextManager[object]:
    """A range in a profile, and a line in FSDP2's log, named as FSDP2 names them.

    Under `torch.autograd.profiler.emit_nvtx()` the range is an NVTX range, for Nsight.

    Effects: none unless a profiler runs or the log is on: an unseen range would cost several microseconds.
    """
    if _logger.isEnabledFor(logging.DEBUG):
        log(phase, unit)
    return record_function(_name(phase, unit)) if _is_profiled() else _NOTHING


def log(phase: str, unit: str = "") -> None:
    """A line in FSDP2's log, which `TORCH_LOGS=fsdp` turns on.

    Effects: none unless the log is on.
    """
    if _logger.isEnabledFor(logging.DEBUG):
        _logger.debug("%s", _name(phase, unit))


def _name(phase: str, unit: str) -> str:
    return f"FSDP::{phase} ({unit})" if unit else f"FSDP::{phase}"
