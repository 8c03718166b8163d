"""The meters of `estimate_peer`: bytes, moments and seconds of real steps."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Final, Protocol
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lamella.testing import LiveBytes, adopt_model, moments_of_units

_MOST_SECONDS: Final = 4.0


class Meter(Protocol):
    """Counts the bytes of tensors."""

    def reset(self) -> None:
        """Begin a new peak, at the bytes of now."""

    def peak(self) -> int:
        """Return the most bytes since `reset`."""
        ...

    def reserved(self) -> int:
        """Return the most bytes of the caching allocator since `reset`."""
        ...

    def now(self) -> int:
        """Return the bytes of now."""
        ...

    def watch(self) -> AbstractContextManager[object]:
        """Count in the block."""
        ...

    def adopt(self, model: nn.Module) -> None:
        """Count a model that is made."""


class CudaMeter:
    """The caching allocator's own count: blocks of 512 bytes."""

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()

    def reserved(self) -> int:
        return torch.cuda.max_memory_reserved()

    def now(self) -> int:
        return torch.cuda.memory_allocated()

    @contextmanager
    def watch(self) -> Iterator[None]:
        yield

    def adopt(self, model: nn.Module) -> None:
        """Nothing: all tensors count."""


class CpuMeter:
    """The bytes of the storages of CPU tensors that operators make."""

    def __init__(self) -> None:
        self._live = LiveBytes()
        self._first = 0

    def reset(self) -> None:
        self._first = len(self._live.log.changes)

    def peak(self) -> int:
        now = sum(change.nbytes for change in self._live.log.changes[: self._first])
        most = now
        for change in self._live.log.changes[self._first :]:
            now += change.nbytes
            most = max(most, now)
        return most

    def reserved(self) -> int:
        return self.peak()

    def now(self) -> int:
        return sum(change.nbytes for change in self._live.log.changes)

    def watch(self) -> AbstractContextManager[object]:
        self._live = LiveBytes()
        self._first = 0
        return self._live

    def adopt(self, model: nn.Module) -> None:
        adopt_model(self._live, model)


class StepClock:
    """The seconds of steps, by events of the GPU's current stream: the host waits for no step.

    Args:
        device: The device of the steps.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = time.perf_counter()
        self._marks: list[torch.cuda.Event | float] = []

    def num_steps(self, asked: int) -> int:
        """Return a number of steps, the same on all ranks: fewer than asked where a step takes long.

        Effects: waits for the first step; collective.
        """
        self._wait()
        seconds = torch.tensor(time.perf_counter() - self._start)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return min(asked, 3 + int(_MOST_SECONDS / max(1e-6, float(seconds))))

    def mark(self) -> None:
        """Note the end of a step."""
        if self._device.type != "cuda":
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._marks.append(event)

    def seconds(self) -> list[float]:
        """Return the seconds between each two marks. Effects: waits for the last."""
        self._wait()
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return [_between(before, after) for before, after in pairs]

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def _between(before: torch.cuda.Event | float, after: torch.cuda.Event | float) -> float:
    if isinstance(before, float):
        assert isinstance(after, float)
        return after - before
    assert not isinstance(after, float)
    return float(before.elapsed_time(after)) / 1e3


class PeaksOfMoments:
    """The peak of each moment of a step, by the meter.

    Attributes:
        in_backward: A forward that runs now is recomputed.
        nbytes: Moment -> its most bytes.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter, self._moment = meter, ""
        self.in_backward = False
        self.nbytes: dict[str, int] = {}

    def begin(self, moment: str) -> None:
        """End the moment before, and begin another."""
        if self._moment:
            self.nbytes[self._moment] = max(self._meter.peak(), self.nbytes.get(self._moment, 0))
        self._moment = moment
        self._meter.reset()

    @contextmanager
    def recorded_step(self, model: nn.Module, units: Sequence[nn.Module]) -> Iterator[None]:
        """Note the moments of the step in the block, under the names of an estimate's."""
        names = {module: name for name, module in model.named_modules()}
        with ExitStack() as hooks:
            hooks.enter_context(moments_of_units({unit: names[unit] for unit in units}, self))
            hooks.callback(model.register_forward_pre_hook(lambda *_: self.begin("forward begins")).remove)
            hooks.callback(register_optimizer_step_pre_hook(lambda *_: self.begin("optimizer step")).remove)
            hooks.callback(register_optimizer_step_post_hook(lambda *_: self.begin("at rest")).remove)
            hooks.enter_context(patch.object(torch.Tensor, "backward", self._backward(torch.Tensor.backward)))
            yield
        self.begin("")

    def _backward(self, backward: Callable[..., None]) -> Callable[..., None]:
        def noted(tensor: torch.Tensor, *args: Any, **options: Any) -> None:
            self.begin("backward head and loss")
            self.in_backward = True
            backward(tensor, *args, **options)
            self.in_backward = False
            self.begin("clipping")

        return noted
