"""What a unit costs the host, on any CPU: time, operators and calls of lamella and FSDP2 above the plain model's.

    python -m lamella_integration.host_time
    python -m lamella_integration.host_time --backends plain lamella --reduce fp32 --steps 200

One core, a process group of four ranks that moves nothing, of which this process is one, and blocks of nine parameters
so small that an operator takes as long as it takes to be called. What is left is what a GPU's host does too, with two
differences: a copy of many tensors is a loop here and one kernel there, and streams do nothing here.

*lamella_copy_engines* is what GPUs of one host run by default: the real transport and its windows, whose calls of the
driver go to a function that returns at once. Its sum in fp32 is computed: some 60 us that a GPU's host is spared.
Backends take turns, so figures of one call compare; those of another host do not, and those of another call, or of a
busy machine, differ by a fifth and more. The counts are the same in every call.
"""

import argparse
import ctypes
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import lamella_engine
from lamella_buffers import CopyEngines, CopyEngineTransport, NcclTransport, PeerWindow, WindowAllocator, swap_memory
from lamella_integration.backends import REDUCE_DTYPES
from lamella_integration.llama import Llama, LlamaConfig, next_token_loss

NUM_RANKS = 4
NUM_WARMUP_STEPS = 4  # In the first step units learn their order.
PHASES = ("forward", "backward", "optimizer")


@dataclass
class Training:
    """A backend's model and optimizer, and what their steps took: seconds a phase, one row a step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    seconds: list[tuple[float, ...]]
    host: Callable[[], AbstractContextManager[None]]  # what it runs on

    def phases(self) -> Iterator[str]:
        """Make a step; gives the name of each phase before it."""
        tokens = labels = torch.arange(4).view(1, 4)
        yield "forward"
        loss = next_token_loss(self.model(tokens), labels)
        yield "backward"
        loss.backward()  # type: ignore[no-untyped-call]
        yield "optimizer"
        self.optimizer.step()
        yield ""
        self.optimizer.zero_grad()


class Costs(NamedTuple):
    """Of a unit: microseconds of each phase, then operators and Python's calls in forward and backward."""

    forward_us: float
    backward_us: float
    optimizer_us: float
    num_operators: float
    num_calls: float


# -- backends ---------------------------------------------------------------------------------------------------------


def plain(config: LlamaConfig, mesh: DeviceMesh, reduce_dtype: torch.dtype) -> nn.Module:
    """The model alone, in bf16."""
    return Llama(config).bfloat16()


def sharded(package: Any, config: LlamaConfig, mesh: DeviceMesh, reduce_dtype: torch.dtype) -> nn.Module:
    """The model whose blocks are units of a package that has FSDP2's functions."""
    model = Llama(config)
    policy = package.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    for unit in (*model.units(), model):
        package.fully_shard(unit, mesh=mesh, mp_policy=policy)
    return model


BACKENDS: dict[str, Callable[[LlamaConfig, DeviceMesh, torch.dtype], nn.Module]] = {
    "plain": plain,
    "fsdp2": partial(sharded, torch_fsdp),
    "lamella": partial(sharded, lamella_engine),
    "lamella_copy_engines": partial(sharded, lamella_engine),
}


@contextmanager
def _host_with_copy_engines() -> Iterator[None]:
    """Have the engine take this host for one with copy engines. Nothing waits, and nothing is copied."""
    stream = SimpleNamespace(cuda_stream=2, wait_stream=lambda _: None)
    with (
        patch("lamella_engine._parameter_group._engines", _engines_of),
        patch("lamella_buffers._driver._function", _idle_function),
        patch.object(torch.cuda, "current_stream", lambda *_: stream),
        patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
    ):
        yield


class _Window(PeerWindow):
    """Memory that torch's allocator lends."""

    def lending(self) -> AbstractContextManager[None]:
        return nullcontext()


class _Windows(WindowAllocator):
    """The real one, and a buffer that is lent the same window has the same address again, as on a GPU."""

    def __init__(self, new_window: Callable[[int], _Window]) -> None:
        super().__init__(new_window)
        self._memories: dict[tuple[int, int], torch.UntypedStorage] = {}

    def allocate(self, buffer: torch.Tensor) -> None:
        super().allocate(buffer)
        self._swap(buffer)

    def free(self, buffer: torch.Tensor) -> None:
        self._swap(buffer)
        super().free(buffer)

    def _swap(self, buffer: torch.Tensor) -> None:
        if (window := self.window_of(buffer)) is not None:
            key = id(window), buffer.nbytes
            if key not in self._memories:
                self._memories[key] = torch.UntypedStorage(buffer.nbytes)  # type: ignore[no-untyped-call]
            swap_memory(buffer.untyped_storage(), self._memories[key])


class _CopyEngineTransport(CopyEngineTransport):
    """The real one, but for where in its window something lies."""

    def _offset_of(self, mine: torch.Tensor, window: PeerWindow) -> int:
        return mine.data_ptr()


def _engines_of(axes: Any) -> CopyEngines | None:
    if axes.shard_group is None:
        return None

    def new_window(nbytes: int) -> _Window:
        return _Window(nbytes, SimpleNamespace(), (0,) * NUM_RANKS, 1)  # type: ignore[arg-type]

    windows, arrivals = (_Windows(new_window) for _ in range(2))
    transport = _CopyEngineTransport(axes.shard_group, windows, arrivals, new_window(0), torch.device("cpu"))
    return CopyEngines(windows, transport)


@cache
def _idle_function(name: str) -> Any:
    """A function of C's that takes the same arguments, and returns 0 for any two first ones that differ."""
    function = ctypes.CDLL(None)["pthread_equal"]
    driver: Any = import_module("lamella_buffers._driver")
    function.argtypes, function.restype = driver._ARGUMENTS[name], ctypes.c_int
    return function


# -- measuring --------------------------------------------------------------------------------------------------------


def measure(
    backends: Sequence[str], *, reduce_dtype: torch.dtype, num_layers: int, num_steps: int
) -> dict[str, tuple[Costs, Costs]]:
    """The fastest tenth's limit and the median of each backend's steps, a unit. A process group must be there.

    Time is the thread's own, so that a busy machine counts little. One step after the others is counted and not timed.
    """
    config = LlamaConfig(dim=64, num_layers=num_layers, num_heads=4, num_kv_heads=2, ffn_dim=64, vocab_size=64)
    trainings = {name: _training(name, config, reduce_dtype) for name in backends}
    for i in range(NUM_WARMUP_STEPS + num_steps):
        for training in trainings.values():
            seconds = _timed(training)
            if i >= NUM_WARMUP_STEPS:
                training.seconds.append(seconds)
        if i % 10 == 0:
            gc.collect()
    return {name: _costs(training, num_layers) for name, training in trainings.items()}


def _training(name: str, config: LlamaConfig, reduce_dtype: torch.dtype) -> Training:
    torch.manual_seed(0)
    host = _host_with_copy_engines if name == "lamella_copy_engines" else nullcontext
    # By name, groups that move nothing are not NCCL's.
    with host(), patch("lamella_engine._parameter_group.transport_for", lambda group, _: NcclTransport(group)):
        model = BACKENDS[name](config, init_device_mesh("cpu", (NUM_RANKS,)), reduce_dtype)
    return Training(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), [], host)


def _timed(training: Training) -> tuple[float, ...]:
    with training.host():
        at = [time.thread_time() for _ in training.phases()]
    return tuple(after - before for before, after in pairwise(at))


class _OperatorCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators, whoever calls them."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += 1
        return func(*args, **(kwargs or {}))


def _num_operators(training: Training) -> int:
    counter = _OperatorCounter()  # type: ignore[no-untyped-call]
    with training.host():
        for phase in training.phases():
            if phase == "forward":
                counter.__enter__()  # type: ignore[no-untyped-call]
            elif phase == "optimizer":
                counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    return counter.num


def _num_calls(training: Training) -> int:
    num = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal num
        num += event in ("call", "c_call")

    with training.host():
        for phase in training.phases():
            sys.setprofile(count if phase in ("forward", "backward") else None)
    return num


def _costs(training: Training, num_layers: int) -> tuple[Costs, Costs]:
    counts = [_num_operators(training) / num_layers, _num_calls(training) / num_layers]
    phases = [sorted(1e6 * seconds / num_layers for seconds in phase) for phase in zip(*training.seconds, strict=True)]
    fast = [phase[len(phase) // 10] for phase in phases]
    return Costs(*fast, *counts), Costs(*map(statistics.median, phases), *counts)


# -- the table --------------------------------------------------------------------------------------------------------


def table(found: dict[str, tuple[Costs, Costs]]) -> str:
    """A row a backend; all but the optimizer above the plain model, if that was measured."""
    none = Costs(*[0.0] * len(Costs._fields))
    base = found.get("plain", (none, none))
    lines = [
        "| us a unit, fastest tenth (median) | forward | backward | both | optimizer | operators | Python calls |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name, costs in found.items():
        from_plain = (none, none) if name == "plain" else base
        (fast, fast_plain), (median, median_plain) = zip(costs, from_plain, strict=True)
        cells = [f"{fast[i] - fast_plain[i]:,.0f} ({median[i] - median_plain[i]:,.0f})" for i in range(2)]
        both, both_median = (sum(a[:2]) - sum(b[:2]) for a, b in ((fast, fast_plain), (median, median_plain)))
        cells += [f"{both:,.0f} ({both_median:,.0f})", f"{fast.optimizer_us:,.0f} ({median.optimizer_us:,.0f})"]
        cells += [f"{fast[i] - fast_plain[i]:,.0f}" for i in (3, 4)]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), choices=list(BACKENDS))
    parser.add_argument("--reduce", default="bf16", choices=list(REDUCE_DTYPES))
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    gc.disable()  # it would come in whose turn it is
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)
    reduce_dtype = REDUCE_DTYPES[options.reduce]
    found = measure(options.backends, reduce_dtype=reduce_dtype, num_layers=options.layers, num_steps=options.steps)
    print(table(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
