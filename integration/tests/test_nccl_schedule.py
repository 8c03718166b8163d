"""On two GPUs over NCCL: units driven by verbs alone, over several streams, with weight gradients on a side stream.

The parent never touches a GPU, so that ranks can be forked: all GPU work runs in `run_ranks`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, cast

import pytest
import torch
import torch._dynamo  # As in test_nccl: once here instead of once a rank.
import torch.distributed as dist
from torch import nn

from lamella_engine import (
    ZERO1,
    ZERO3,
    AxisPlacement,
    FSDPModule,
    MixedPrecisionPolicy,
    ShardingOptions,
    delay_gradient,
    fully_shard,
    set_main_grads,
)
from lamella_engine.testing import Streams, require_unit, streams_of
from lamella_integration.tasks import unsharded
from lamella_testing import run_ranks

pytestmark = [
    pytest.mark.gpu2,
    # torch's warning if a thread of autograd multiplies first; torch then sets the context up and goes on.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context"),
]

DIM, HIDDEN, NUM_LAYERS, NUM_ROWS = 256, 512, 3, 64
NUM_STEPS = 20
LONGEST_SLEEP = 2_000_000  # cycles: 1 ms, longer than any of the model's kernels
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class LateLinear(nn.Linear):
    """Backward makes the input's gradient; `backward_dw` makes the weight's, on the stream current at the call."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__(num_in, num_out, bias=False)
        self.queue: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.on_gradient: Callable[[], None] | None = None
        self.is_fused = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        late: torch.Tensor = _LateProduct.apply(x, self.weight, self.queue)  # type: ignore[no-untyped-call]
        return late

    def backward_dw(self) -> None:
        x, gradient = self.queue.pop(0)
        for tensor in (x, gradient):  # made and freed on the compute stream
            tensor.record_stream(torch.cuda.current_stream())
        weight = cast(Any, self.weight)
        weight_gradient = gradient.T @ x
        if self.is_fused:
            weight.get_main_grad().add_(weight_gradient)
            weight.grad_added_to_main_grad = True
        else:
            weight.grad = weight_gradient if weight.grad is None else weight.grad + weight_gradient
        if self.on_gradient is not None:
            self.on_gradient()


class _LateProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, queue: list[Any]) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.queue = queue
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        ctx.queue.append((x.detach(), gradient))
        return gradient @ weight, None, None


class ScheduledBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(DIM))
        self.up = nn.Linear(DIM, HIDDEN)
        self.down = LateLinear(HIDDEN, DIM)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain

    def experts(self, x: torch.Tensor) -> torch.Tensor:
        update: torch.Tensor = self.down(torch.tanh(self.up(x)))
        return x + update


class _Slot:
    def __init__(self, run: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._input = x.detach().requires_grad_()
        self._output = self._run(self._input)
        return self._output.detach()

    def backward(self, gradient: torch.Tensor) -> torch.Tensor:
        torch.autograd.backward((self._output,), (gradient,))
        input_gradient = self._input.grad
        del self._input, self._output
        assert input_gradient is not None
        return input_gradient


class Schedule:
    """Two microbatches: a forward between the slots of the previous backward; weight gradients on `side`."""

    def __init__(self, model: nn.Sequential, side: torch.cuda.Stream) -> None:
        self.model = model
        self.side = side

    def step(self, batches: list[torch.Tensor]) -> None:
        first, second = ([[_Slot(b.attend), _Slot(b.experts)] for b in self._blocks] for _ in batches)
        self._run(self._forward(first, batches[0]))
        self._set_last_backward(False)
        self._run(self._backward(first), self._forward(second, batches[1]))
        self._set_last_backward(True)
        self._run(self._backward(second))
        if isinstance(self.model, FSDPModule):
            self.model.wait_for_gradients()
        else:
            torch.cuda.current_stream().wait_stream(self.side)

    @property
    def _blocks(self) -> list[ScheduledBlock]:
        return [cast(ScheduledBlock, block) for block in self.model]

    def _set_last_backward(self, is_last: bool) -> None:
        if isinstance(self.model, FSDPModule):
            self.model.set_is_last_backward(is_last)

    def _run(self, *ways: Iterator[None]) -> None:
        going = list(ways)
        while going:
            going = [way for way in going if next(way, self) is None]

    def _forward(self, slots: list[list[_Slot]], x: torch.Tensor) -> Iterator[None]:
        for block, pieces in zip(self._blocks, slots, strict=True):
            with _Held(block):
                for piece in pieces:
                    x = piece.forward(x)
                    yield
        self._last = x

    def _backward(self, slots: list[list[_Slot]]) -> Iterator[None]:
        gradient = self._last / self._last.numel()
        for block, pieces in reversed(list(zip(self._blocks, slots, strict=True))):
            with _Held(block):
                for piece in reversed(pieces):
                    gradient = piece.backward(gradient)
                    yield
                if isinstance(block, FSDPModule):
                    block.reduce_gradients()
            self.side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.side):
                block.down.backward_dw()
        yield


class _Held:
    """A unit's hold, or nothing for a plain block."""

    def __init__(self, block: nn.Module) -> None:
        self._hold = block.hold() if isinstance(block, FSDPModule) else None

    def __enter__(self) -> None:
        if self._hold is not None:
            self._hold.wait()

    def __exit__(self, *_: object) -> None:
        if self._hold is not None:
            self._hold.release()


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(ScheduledBlock() for _ in range(NUM_LAYERS))).cuda()


def _shard(model: nn.Sequential, *, is_fused: bool, **options: Any) -> None:
    for block in (cast(ScheduledBlock, block) for block in model):
        fully_shard(block, **options)
        block.down.on_gradient = delay_gradient(block, block.down.get_parameter("weight"))
        block.down.is_fused = is_fused
        if is_fused:
            set_main_grads(block, [block.down.get_parameter("weight")])
    fully_shard(model, **options)


def _train(model: nn.Sequential, delay: Callable[[], None] = lambda: None) -> tuple[dict[str, torch.Tensor], set[int]]:
    """The weights after some steps, and the numbers of bytes allocated between steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = Schedule(model, torch.cuda.Stream())  # type: ignore[no-untyped-call]
    generator = torch.Generator().manual_seed(1)
    dtype = (
        torch.bfloat16
        if isinstance(model, FSDPModule) and require_unit(model[0]).parameters.groups[0].policy.param_dtype
        else None
    )
    between: set[int] = set()
    for step in range(NUM_STEPS):
        batches = [torch.randn(NUM_ROWS, DIM, generator=generator).cuda().to(dtype or torch.float32) for _ in range(2)]
        delay()
        schedule.step(batches)
        optimizer.step()
        optimizer.zero_grad()
        del batches
        schedule._last = torch.empty(0)
        torch.cuda.synchronize()
        if step > 2:
            between.add(torch.cuda.memory_allocated())
    return {name: unsharded(weight.detach()).cpu() for name, weight in model.named_parameters()}, between


@pytest.mark.parametrize("placements", [ZERO3, ZERO1], ids=["ZERO3", "ZERO1"])
@pytest.mark.parametrize("is_fused", [True, False], ids=["main_grad", "grad"])
def test_verbs_over_several_streams_train_as_one_unsharded_gpu(placements: AxisPlacement, is_fused: bool) -> None:
    def trained_twice() -> tuple[object, object, int]:
        expected, _ = _train(_model())
        gc.collect()  # now, not between two readings of allocated memory
        model = _model()
        _shard(model, is_fused=is_fused, options=ShardingOptions(placements=placements))
        got, between = _train(model)
        return got, expected, len(between)

    for got, expected, num_sizes in run_ranks(trained_twice, 2, device="cuda"):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        assert num_sizes == 1, "no step leaves anything behind"


def _sleep_at_random(streams: Streams, model: nn.Sequential) -> Callable[[], None]:
    """Let random streams sleep before slots, differently on each rank."""
    choose = Random(dist.get_rank())
    side_streams = [streams.all_gather_stream, streams.reduce_scatter_stream]

    def delay(*_: object) -> None:
        if choose.random() < 0.4:
            with streams.on(choose.choice([streams.compute_stream, *side_streams])):
                torch.cuda._sleep(choose.randrange(LONGEST_SLEEP))  # type: ignore[no-untyped-call]

    for block in (cast(ScheduledBlock, block) for block in model):
        for late, name in ((block, "attend"), (block, "experts"), (block.down, "backward_dw")):
            run = getattr(late, name)

            def slow(*args: object, run: Callable[..., object] = run) -> object:
                delay()
                return run(*args)

            setattr(late, name, slow)
    return delay


@pytest.mark.parametrize("is_fused", [True, False], ids=["main_grad", "grad"])
def test_streams_that_are_late_at_random_change_no_bit(is_fused: bool) -> None:
    """A missing wait shows as memory read or freed too early."""

    def trained_twice() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        weights_by_way = []
        for is_late in (False, True):
            model = _model()
            _shard(model, is_fused=is_fused, mp_policy=BF16)
            delay = _sleep_at_random(streams_of(model), model) if is_late else lambda: None
            weights_by_way.append(_train(model, delay)[0])
        return weights_by_way[0], weights_by_way[1]

    for punctual, late in run_ranks(trained_twice, 2, device="cuda"):
        torch.testing.assert_close(late, punctual, rtol=0.0, atol=0.0)
