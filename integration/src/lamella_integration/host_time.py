"""The host's cost per unit, on any CPU: time, operators and calls of lamella and FSDP2 above the plain model's.

    python -m lamella_integration.host_time
    python -m lamella_integration.host_time --backends plain lamella --reduce fp32 --steps 200

The benchmark runs one rank of four on one core. The process group moves no data, and the blocks have nine parameters
so small that an operator takes only the time of its call. The rest is the work of a GPU's host, with two differences:
a copy of many tensors is a loop on the CPU and one kernel on a GPU, and streams do nothing on the CPU.

*lamella_copy_engines* is the default for GPUs of one host: the real transport and its windows, with the driver's
functions replaced by a function that returns at once. The reduction's sum in fp32 is computed on the CPU: about 60 us
absent from a GPU's host. Backends take turns, so figures of one run are comparable. Figures of other hosts are not;
figures of other runs, or of a busy machine, differ by a fifth and more. The counts are the same in every run.
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
import lamella_optim
from lamella_buffers import CopyEngines, CopyEngineTransport, NcclTransport, PeerWindow, WindowAllocator, swap_memory
from lamella_integration.backends import REDUCE_DTYPES
from lamella_integration.llama import Llama, LlamaConfig, next_token_loss

NUM_RANKS = 4
NUM_WARMUP_STEPS = 4  # Step 1 records the order of units.
PHASES = ("forward", "backward", "optimizer")


@dataclass
class HostTraining:
    """A backend's model and optimizer, and the seconds of each phase, one row per step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    seconds: list[tuple[float, ...]]
    host: Callable[[], AbstractContextManager[None]]  # context with the patches of the simulated host

    def phases(self) -> Iterator[str]:
        """Run a step, yielding each phase's name before the phase."""
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
    """Costs per unit: microseconds of each phase, then operators and Python calls in forward and backward."""

    forward_us: float
    backward_us: float
    optimizer_us: float
    num_operators: float
    num_calls: float


# -- backends ---------------------------------------------------------------------------------------------------------


def plain(config: LlamaConfig, mesh: DeviceMesh, reduce_dtype: torch.dtype) -> nn.Module:
    """Make the unsharded model, in bf16."""
    return Llama(config).bfloat16()


def sharded(package: Any, config: LlamaConfig, mesh: DeviceMesh, reduce_dtype: torch.dtype) -> nn.Module:
    """Make the model, with blocks and root sharded by a package with FSDP2's functions."""
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
    """Make the engine treat this host as one with copy engines, whose driver calls neither wait nor copy."""
    stream = SimpleNamespace(cuda_stream=2, wait_stream=lambda _: None)
    with (
        patch("lamella_engine._parameters.group_transports._engines", _engines_of),
        patch("lamella_buffers._driver._function", _idle_function),
        patch.object(torch.cuda, "current_stream", lambda *_: stream),
        patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
    ):
        yield


class _SimulatedWindow(PeerWindow):
    """A window in memory from torch's allocator."""

    def lending(self) -> AbstractContextManager[None]:
        return nullcontext()


class _SimulatedWindows(WindowAllocator):
    """The real allocator, except that a window keeps its memory, so buffers get the window's address, as on a GPU."""

    def __init__(self, new_window: Callable[[int], _SimulatedWindow]) -> None:
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


class _SimulatedTransport(CopyEngineTransport):
    """The real transport, except for offsets in windows: a simulated window has no base address."""

    def _offset_of(self, mine: torch.Tensor, window: PeerWindow) -> int:
        return mine.data_ptr()


def _engines_of(axes: Any) -> CopyEngines | None:
    if axes.shard_group is None:
        return None

    def new_window(nbytes: int) -> _SimulatedWindow:
        return _SimulatedWindow(nbytes, SimpleNamespace(), (0,) * NUM_RANKS, 1)  # type: ignore[arg-type]

    windows, arrivals = (_SimulatedWindows(new_window) for _ in range(2))
    transport = _SimulatedTransport(axes.shard_group, windows, arrivals, new_window(0), torch.device("cpu"))
    return CopyEngines(windows, transport)


@cache
def _idle_function(name: str) -> Any:
    """Return a C function for the arguments of a driver function; it returns 0 (success) if the first two differ."""
    function = ctypes.CDLL(None)["pthread_equal"]
    driver: Any = import_module("lamella_buffers._driver")
    function.argtypes, function.restype = driver._ARGUMENTS[name], ctypes.c_int
    return function


# -- measuring --------------------------------------------------------------------------------------------------------


def measure(
    backends: Sequence[str], *, reduce_dtype: torch.dtype, num_layers: int, num_steps: int
) -> dict[str, tuple[Costs, Costs]]:
    """Return the first decile and the median of each backend's costs per unit. The default process group must exist.

    Times are the thread's CPU time, so a busy machine distorts little. Operators and calls are counted in further
    steps, after the timed steps.
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


def _training(name: str, config: LlamaConfig, reduce_dtype: torch.dtype) -> HostTraining:
    torch.manual_seed(0)
    host = _host_with_copy_engines if name == "lamella_copy_engines" else nullcontext
    # The engine chooses a transport by the group's backend, and the fake group's is not NCCL.
    chooser = "lamella_engine._parameters.group_transports.transport_for"
    with host(), patch(chooser, lambda group, _: NcclTransport(group)):
        model = BACKENDS[name](config, init_device_mesh("cpu", (NUM_RANKS,)), reduce_dtype)
    return HostTraining(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), [], host)


def _timed(training: HostTraining) -> tuple[float, ...]:
    with training.host():
        at = [time.thread_time() for _ in training.phases()]
    return tuple(after - before for before, after in pairwise(at))


class _OperatorCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators in the dispatcher."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += 1
        return func(*args, **(kwargs or {}))


def _num_operators(training: HostTraining) -> int:
    counter = _OperatorCounter()  # type: ignore[no-untyped-call]
    with training.host():
        for phase in training.phases():
            if phase == "forward":
                counter.__enter__()  # type: ignore[no-untyped-call]
            elif phase == "optimizer":
                counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    return counter.num


def _num_calls(training: HostTraining) -> int:
    num = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal num
        num += event in ("call", "c_call")

    with training.host():
        for phase in training.phases():
            sys.setprofile(count if phase in ("forward", "backward") else None)
    return num


def _costs(training: HostTraining, num_layers: int) -> tuple[Costs, Costs]:
    counts = [_num_operators(training) / num_layers, _num_calls(training) / num_layers]
    phases = [sorted(1e6 * seconds / num_layers for seconds in phase) for phase in zip(*training.seconds, strict=True)]
    fast = [phase[len(phase) // 10] for phase in phases]
    return Costs(*fast, *counts), Costs(*map(statistics.median, phases), *counts)


# -- the table --------------------------------------------------------------------------------------------------------


def table(costs_by_backend: dict[str, tuple[Costs, Costs]]) -> str:
    """Format a row per backend. If the plain model was measured, all columns but the optimizer's are the excess."""
    none = Costs(*[0.0] * len(Costs._fields))
    base = costs_by_backend.get("plain", (none, none))
    lines = [
        "| us a unit, fastest tenth (median) | forward | backward | both | optimizer | operators | Python calls |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name, costs in costs_by_backend.items():
        from_plain = (none, none) if name == "plain" else base
        (fast, fast_plain), (median, median_plain) = zip(costs, from_plain, strict=True)
        cells = [f"{fast[i] - fast_plain[i]:,.0f} ({median[i] - median_plain[i]:,.0f})" for i in range(2)]
        passes, passes_median = (sum(a[:2]) - sum(b[:2]) for a, b in ((fast, fast_plain), (median, median_plain)))
        cells += [f"{passes:,.0f} ({passes_median:,.0f})", f"{fast.optimizer_us:,.0f} ({median.optimizer_us:,.0f})"]
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
    lamella_optim.install()  # the optimizer's column is of the steps that its users have
    gc.disable()  # A collection would count for the backend whose turn it is; `measure` collects between turns.
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)
    reduce_dtype = REDUCE_DTYPES[options.reduce]
    costs_by_backend = measure(
        options.backends, reduce_dtype=reduce_dtype, num_layers=options.layers, num_steps=options.steps
    )
    print(table(costs_by_backend))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
