"""Measurements of a step: loss, speed, memory."""

import resource
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lamella._record.metrics import StepRecord

# Part of the device's name -> the vendor's dense bf16 peak in FLOP/s.
_PEAKS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12}


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The constants of throughput. `peak_flops` is the sum over all ranks, None when unknown."""

    tokens_per_step: int
    flops_per_token: float
    peak_flops: float | None

    def of(self, num_steps: int, seconds: float) -> tuple[float, float | None]:
        """Return tokens per second over all ranks, and MFU; MFU is None without `peak_flops`."""
        tokens_per_s = num_steps * self.tokens_per_step / seconds
        return tokens_per_s, tokens_per_s * self.flops_per_token / self.peak_flops if self.peak_flops else None


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Return the device's bf16 peak in FLOP/s; None on CPU, in fp32 and for devices outside `_PEAKS`."""
    if device.type != "cuda" or precision != "bf16":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _PEAKS.items() if part in name), None)


class Interval:
    """Steps not reported yet. Losses and norms stay on the device: reading a number would make the step wait."""

    def __init__(self, first_step: int) -> None:
        self._first_step = first_step
        self._started = time.perf_counter()
        self._losses_and_norms: list[torch.Tensor] = []
        self._rates: list[float] = []

    def add(self, loss: torch.Tensor, grad_norm: torch.Tensor, lr: float) -> None:
        """Append one step: this rank's mean loss and the norm of the whole gradient, both 0-D, and the learning rate.

        Effects: no host sync. A norm in the host's memory, of gradients at rest there, is copied to the loss's device.
        """
        grad_norm = grad_norm.to(loss.device, torch.float64, non_blocking=True)
        self._losses_and_norms.append(torch.stack([loss.double(), grad_norm]))
        self._rates.append(lr)

    def records(self, device: torch.device, speed: Speed) -> list[StepRecord]:
        """Return one record per step, the same on every rank.

        Effects: two all-reduces over all ranks; waits for the device.
        """
        losses_and_norms = torch.stack(self._losses_and_norms)
        dist.all_reduce(losses_and_norms)
        rows = (losses_and_norms / dist.get_world_size()).tolist()
        tokens_per_s, mfu = speed.of(len(rows), time.perf_counter() - self._started)
        memory = _peak_memory_nbytes(device)
        return [
            StepRecord(
                step=self._first_step + index + 1,
                loss=loss,
                grad_norm=grad_norm,
                lr=lr,
                tokens_per_s=tokens_per_s,
                memory_nbytes=memory,
                mfu=mfu,
            )
            for index, ((loss, grad_norm), lr) in enumerate(zip(rows, self._rates, strict=True))
        ]


def _peak_memory_nbytes(device: torch.device) -> int:
    """Return the largest peak memory of any rank. Effects: all-reduce over all ranks; waits for the device."""
    on_gpu = device.type == "cuda"
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts it in KiB.
    nbytes = torch.cuda.max_memory_reserved(device) if on_gpu else resident
    most = torch.tensor(float(nbytes), dtype=torch.float64, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most.item())
