"""What FSDP2 takes as arguments: torch's own classes, so that it does not matter from where they were imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed.fsdp as fsdp2
from torch.distributed.fsdp import CPUOffloadPolicy as CPUOffloadPolicy
from torch.distributed.fsdp import OffloadPolicy as OffloadPolicy

if TYPE_CHECKING or hasattr(fsdp2, "DataParallelMeshDims"):
    from torch.distributed.fsdp import DataParallelMeshDims as DataParallelMeshDims
else:  # torch before 2.12

    @dataclass
    class DataParallelMeshDims:
        """Which axes of a whole mesh are data axes.

        Attributes:
            shard: Name of the axis that parameters are sharded over; several are flattened into one.
            replicate: Name of the axis that they are replicated over; several are flattened into one.

        Raises:
            ValueError: Neither is given.
        """

        shard: str | tuple[str, ...] | None = None
        replicate: str | tuple[str, ...] | None = None

        def __post_init__(self) -> None:
            if self.shard is None and self.replicate is None:
                raise ValueError(
                    "Expected `shard` or `replicate` to name an axis, got neither: At least one of shard or replicate "
                    "must be set in DataParallelMeshDims."
                )

        @property
        def shard_names(self) -> tuple[str, ...]:
            """The axes that parameters are sharded over."""
            return _names(self.shard)

        @property
        def replicate_names(self) -> tuple[str, ...]:
            """The axes that parameters are replicated over."""
            return _names(self.replicate)

    def _names(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
        if axes is None:
            return ()
        return (axes,) if isinstance(axes, str) else tuple(axes)
