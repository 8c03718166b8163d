"""The policy classes of FSDP2's arguments: torch's own, so that imports from torch and from here are equal."""

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
        """The data axes of a whole mesh.

        Attributes:
            shard: Name of the shard axis; several are flattened into one.
            replicate: Name of the replicate axis; several are flattened into one.

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
            """The shard axes."""
            return _names(self.shard)

        @property
        def replicate_names(self) -> tuple[str, ...]:
            """The replicate axes."""
            return _names(self.replicate)

    def _names(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
        if axes is None:
            return ()
        return (axes,) if isinstance(axes, str) else tuple(axes)
