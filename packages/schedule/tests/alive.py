"""Storages, told whether their bytes are still there."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing import reductions

_StorageWeakRef: Any = reductions.StorageWeakRef


class Alive:
    """Counts the storages of noted tensors that something still refers to, autograd's saved tensors included."""

    def __init__(self) -> None:
        self._storages: list[Any] = []

    def note(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage from now on."""
        self._storages.append(_StorageWeakRef(tensor.untyped_storage()))

    @property
    def num(self) -> int:
        """How many noted storages are alive."""
        return sum(not storage.expired() for storage in self._storages)

    @property
    def places(self) -> list[int]:
        """The living storages among the noted ones, in noted order."""
        return [i for i, storage in enumerate(self._storages) if not storage.expired()]
