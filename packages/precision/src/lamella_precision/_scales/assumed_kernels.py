"""Kernels of GPUs with float8, assumed on tensors without memory, which no kernel reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_are_assumed = False


@contextmanager
def assume_float8_kernels() -> Iterator[None]:
    """Let encodings, and products of `use_float8_matmul`, run as kernels of a GPU with float8, whatever the device.

    For tensors without memory: the calls save and allocate what they do on a GPU, and no values come of them.
    """
    global _are_assumed
    former, _are_assumed = _are_assumed, True
    try:
        yield
    finally:
        _are_assumed = former


def assumes_float8_kernels() -> bool:
    """Whether a block of `assume_float8_kernels` runs."""
    return _are_assumed
