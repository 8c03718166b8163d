"""Custom collectives in the manner of FSDP2's users, with counts of calls and allocations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

# torch 2.13's names, and those of before.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass
class CountedCollective:
    """The calls and allocations of a custom collective."""

    returns_work: bool = False
    allocated: list[int] = field(default_factory=list)
    dtypes: list[torch.dtype] = field(default_factory=list)
    groups: list[dist.ProcessGroup] = field(default_factory=list)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.allocated.append(torch.Size(size).numel())
        return torch.full(tuple(size), 77, dtype=dtype, device=device)

    def _note(self, tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool) -> None:
        assert not async_op
        self.dtypes.append(tensor.dtype)
        self.groups.append(group)

    @property
    def num_calls(self) -> int:
        return len(self.groups)


class Gather(CountedCollective):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> dist.Work | None:
        self._note(output_tensor, group, async_op)
        part = output_tensor.view(group.size(), -1)[group.rank()]
        assert part.data_ptr() == input_tensor.data_ptr()  # in place, as FSDP2 calls it
        work: dist.Work | None = all_gather_single(output_tensor, input_tensor, group=group, async_op=self.returns_work)
        return work


class Reduce(CountedCollective):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        self._note(output_tensor, group, async_op)
        work: dist.Work | None = reduce_scatter_single(
            output_tensor, input_tensor, op=op, group=group, async_op=self.returns_work
        )
        return work
