"""Shards at rest on the CPU: their memory, and the copies to the device and back.

The CPU computes nothing. Casting a shard to a narrower compute dtype before the copy, or adding to earlier gradients in
host memory, would spare a bus of 50 GB/s some bytes and cost a core, which does either at 15 GB/s and launches no
kernels meanwhile; torchrun gives a process one core. So main weights go up uncast, gradients come down in the main
weights' dtype, and earlier gradients go up for the addition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lamella_engine._options.policies import CPUOffloadPolicy, OffloadPolicy

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Offload:
    """Main weights and reduced gradients rest in the host's memory; compute and collectives run on a device.

    Attributes:
        device: Gathers parameters, makes and reduces gradients.
        pins: Whether the host's memory is pinned: pinned copies overlap with other work of host and device. Never on a
            CPU mesh, which has no device to copy to.
    """

    device: torch.device
    pins: bool

    @classmethod
    def of(cls, policy: OffloadPolicy | None, device: torch.device) -> Offload | None:
        """The offloading of a policy; None for no offloading."""
        if not isinstance(policy, CPUOffloadPolicy):
            return None
        return cls(device, policy.pin_memory and device.type != "cpu")

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Host memory whose contents are undefined.

        Effects: none on a stream. Pinned memory that is new to torch's pool is slow to get; the pool keeps it.
        """
        return torch.empty(numel, dtype=dtype, device=CPU, pin_memory=self.pins)

    def bring_home(self, shard: torch.Tensor) -> torch.Tensor:
        """A user's shard on the CPU, as FSDP2 takes a shard from any device if memory is pinned.

        Without pinned memory the shard stays on its device, and the next gather refuses any device but the CPU.

        Effects: copies a shard from a device; the host waits for the copy.
        """
        # `cpu()` and no pinned copy: `form.take` copies the shard into the group's pinned buffer next.
        return shard.cpu() if self.pins and not shard.is_meta else shard

    def pinned(self, shard: torch.Tensor) -> torch.Tensor:
        """A tensor on the CPU itself, or a pinned copy if memory is pinned and the tensor is not."""
        return shard.pin_memory() if self.pins and not shard.is_meta and not shard.is_pinned() else shard

    def to_device(self, shard: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """A copy on the device.

        Args:
            shard: On the CPU. The host must not write the shard before the current stream has passed this call.
            into: The copy's memory; None allocates.

        Effects: one copy on the current stream, which allocates the memory; no host sync if `shard` is pinned.
        """
        if into is None:
            into = torch.empty_like(shard, device=self.device)
        return into.copy_(shard, non_blocking=True)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the CPU, which must not be read before the host has waited for the current stream.

        Effects: allocates host memory; one copy on the current stream; no host sync if the memory is pinned.
        """
        # New memory each time: an optimizer on the host may still hold the last step's gradients.
        return self.empty(tensor.numel(), tensor.dtype).copy_(tensor.view(-1), non_blocking=True)

    def add_(self, totals: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> None:
        """Add tensors on the device to some on the CPU, under the same rule as `to_host`.

        Effects: on the current stream, which allocates one tensor after another: a copy there and back each.
        """
        for total, part in zip(totals, parts, strict=True):
            # The device tensor may go at once: its memory is reused behind the copy, on the same stream.
            total.copy_(self.to_device(total).add_(part), non_blocking=True)
