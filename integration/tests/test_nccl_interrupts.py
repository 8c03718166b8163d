"""On GPUs: Ctrl-C at lines of the engine, with gathers and reductions in flight; after a reset the model trains on."""

import pytest
import torch
import torch._dynamo  # As in test_nccl: once here instead of once a rank.
from torch import nn

import lamella_buffers
import lamella_engine
from lamella_buffers import CachingAllocator, PoolAllocator
from lamella_engine import ZERO1, FSDPModule, MixedPrecisionPolicy, ShardingOptions, fully_shard
from lamella_integration.tasks import TASKS, shard
from lamella_testing import run_ranks
from lamella_testing.interrupts import Interrupt

PACKAGES = (lamella_engine, lamella_buffers)
NUM_LEARNING_STEPS = 3  # the prefetch order is learned in the first
NUM_INTERRUPTS = 40

OPTIONS = {
    "even": lambda: ShardingOptions(),
    "rings": lambda: ShardingOptions(allocator=CachingAllocator()),
    "ZERO1": lambda: ShardingOptions(placements=ZERO1),
    "pool": lambda: ShardingOptions(allocator=PoolAllocator()),
}


class _Training:
    """A sharded Llama and its optimizer on this rank's GPU."""

    def __init__(self, options: ShardingOptions) -> None:
        self._task = TASKS["llama"]
        device = torch.device("cuda", torch.cuda.current_device())
        torch.manual_seed(0)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        self.model: nn.Module = shard(self._task.model(device=device), fully_shard, mp_policy=policy, options=options)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self._batch = [tensor.to(device) for tensor in self._task.batch(0)]

    def backward(self) -> None:
        tokens, labels = self._batch
        self._task.loss(self.model(tokens), labels).backward()  # type: ignore[no-untyped-call]

    def update(self) -> None:
        self.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def reset(self) -> None:
        assert isinstance(self.model, FSDPModule)
        self.model.reset_iter_state()
        self._optimizer.zero_grad()

    def assert_equal(self, other: "_Training", place: str) -> None:
        for (name, expected), actual in zip(self.model.named_parameters(), other.model.parameters(), strict=True):
            pair = (expected.to_local(), actual.to_local())  # type: ignore[attr-defined]
            assert torch.equal(*pair), f"after an interrupt at {place}: {name} differs"


@pytest.mark.gpu2
@pytest.mark.parametrize("kind", OPTIONS)
def test_after_an_interrupt_with_collectives_in_flight_and_a_reset_training_goes_on(kind: str) -> None:
    """Both ranks are interrupted before the same line; a twin without interrupts has the same bits after a step."""

    def trains_on() -> None:
        expected, interrupted = (_Training(OPTIONS[kind]()) for _ in range(2))
        for training in (expected, interrupted):
            for _ in range(NUM_LEARNING_STEPS):
                training.update()
        counter = Interrupt(PACKAGES)
        counter.during(interrupted.backward)
        interrupted.reset()
        interval = counter.num_lines // NUM_INTERRUPTS
        for at in range(list(OPTIONS).index(kind) * interval // len(OPTIONS), counter.num_lines, interval):
            interrupt = Interrupt(PACKAGES, at)
            interrupt.during(interrupted.backward)
            interrupted.reset()
            for training in (expected, interrupted):
                training.update()
            expected.assert_equal(interrupted, interrupt.place)

    run_ranks(trains_on, 2, device="cuda", timeout_s=240.0)
