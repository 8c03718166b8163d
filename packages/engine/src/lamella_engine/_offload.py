"""Shards that rest on the CPU: the memory that they lie in, and the way to the device and back.

Nothing is computed on the way. Casting a shard to a narrower compute dtype before it is sent, or adding to earlier
gradients where they lie, would spare a bus of 50 GB/s some bytes and cost a core, which does either at 15 GB/s and
launches no kernels meanwhile; torchrun gives a process one. So main weights go up as they are, gradients come down in
the main weights' dtype, and earlier gradients go up to be added to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lamella_engine._policies import CPUOffloadPolicy, OffloadPolicy

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Offload:
    """Main weights and reduced gradients rest in the host's memory; what computes and communicates is on a device.

    Attributes:
        device: Where parameters are gathered, and gradients are made and reduced.
        pins: Whether the host's memory is pinned, so that copies overlap with whatever else host and device do. On a
            CPU mesh nothing is: there is no device to copy to.
    """

    device: torch.device
    pins: bool

    @classmethod
    def of(cls, policy: OffloadPolicy | None, device: torch.device) -> Offload | None:
        """What a policy asks for; None for no offloading.

        Effects: none.
        """
        if not isinstance(policy, CPUOffloadPolicy):
            return None
        return cls(device, policy.pin_memory and device.type != "cpu")

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Host memory whose contents are undefined.

        Effects: none on a stream. Pinned memory that is new to torch's pool is slow to get; the pool keeps it.
        """
        return torch.empty(numel, dtype=dtype, device=CPU, pin_memory=self.pins)

    def bring_home(self, shard: torch.Tensor) -> torch.Tensor:
        """A shard that somebody gave, as FSDP2 takes it: one that is to be pinned comes from any device to the CPU.

        Without pinned memory it stays where it is, and the next gather refuses it if that is not the CPU.

        Effects: copies a shard that is on a device; the host waits for that.
        """
        return shard.cpu() if self.pins and not shard.is_meta else shard

    def pinned(self, shard: torch.Tensor) -> torch.Tensor:
        """A tensor on the CPU, or a copy of it in pinned memory if that is what was asked for."""
        return shard.pin_memory() if self.pins and not shard.is_meta and not shard.is_pinned() else shard

    def to_device(self, shard: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """A copy on the device.

        Args:
            shard: On the CPU. It must not be written before the current stream has passed this call.
            into: Where to copy it; None allocates.

        Effects: one copy on the current stream, which allocates it; no host sync if `shard` is pinned.
        """
        if into is None:
            into = torch.empty_like(shard, device=self.device)
        return into.copy_(shard, non_blocking=True)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the CPU, which must not be read before the host has waited for the current stream.

        Effects: allocates host memory; one copy on the current stream; no host sync if that memory is pinned.
        """
        return self.empty(tensor.numel(), tensor.dtype).copy_(tensor.view(-1), non_blocking=True)

    def add_(self, totals: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> None:
        """Add tensors on the device to some on the CPU, under the same rule as `to_host`.

        Effects: on the current stream, which allocates one tensor after another: a copy there and back each.
        """
        for total, part in zip(totals, parts, strict=True):
            total.copy_(self.to_device(total).add_(part), non_blocking=True)
