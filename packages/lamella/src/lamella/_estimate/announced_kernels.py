"""Kernels that an estimate's stand-ins replace by allocations: announced with the bytes that they read and write."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch

_listeners: Final[list[Callable[[str, int], None]]] = []


@contextmanager
def announced_kernels(listener: Callable[[str, int], None]) -> Iterator[None]:
    """Call a listener with the name and the bytes of each kernel that is announced in the block."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def announce_kernel(name: str, *tensors: torch.Tensor | None) -> None:
    """Tell the listeners of a kernel that reads or writes each of the tensors once."""
    nbytes = sum(tensor.nbytes for tensor in tensors if tensor is not None)
    for listener in _listeners:
        listener(name, nbytes)
