"""What a step is measured by: loss, speed, memory."""

import resource
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lamella._report import StepRecord

# Dense bf16 peaks in FLOP/s by a part of the device's name, as the vendor states them.
_PEAKS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12}


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What throughput is measured by."""

    tokens_per_step: int
    flops_per_token: float
    peak_flops: float | None

    def of(self, num_steps: int, seconds: float) -> tuple[float, float | None]:
        """Tokens a second over all ranks, and MFU if the peak of all ranks is known."""
        tokens_per_s = num_steps * self.tokens_per_step / seconds
        return tokens_per_s, tokens_per_s * self.flops_per_token / self.peak_flops if self.peak_flops else None


def peak_flops(device: torch.device, precision: str) -> float | None:
    """The device's peak in bf16; None on CPU, in fp32 and on devices not in the table."""
    if device.type != "cuda" or precision != "bf16":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _PEAKS.items() if part in name), None)


class Interval:
    """Steps not reported yet. Their numbers stay on the device, so that a step does not wait for it."""

    def __init__(self, first_step: int) -> None:
        self._first_step = first_step
        self._started = time.perf_counter()
        self._values: list[torch.Tensor] = []
        self._rates: list[float] = []

    def add(self, loss: torch.Tensor, grad_norm: torch.Tensor, lr: float) -> None:
        """Take the numbers of the next step: this rank's mean loss and the norm of the whole gradient."""
        self._values.append(torch.stack([loss.double(), grad_norm.double()]))
        self._rates.append(lr)

    def records(self, device: torch.device, speed: Speed) -> list[StepRecord]:
        """One record a step, the same on every rank. Effects: two collectives; waits for the device."""
        values = torch.stack(self._values)
        dist.all_reduce(values)
        rows = (values / dist.get_world_size()).tolist()
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
    """Of the rank that has most. Effects: collective; waits for the device."""
    on_gpu = device.type == "cuda"
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts it in KiB.
    here = torch.cuda.max_memory_reserved(device) if on_gpu else resident
    most = torch.tensor(float(here), dtype=torch.float64, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most.item())
