"""On GPUs: every allocator conforms, changes no bit of training, and a pool with a plan allocates nothing more."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch._dynamo  # As in test_nccl: once here instead of once a rank.

from lamella_buffers import Allocator, CachingAllocator, MemPoolAllocator, PoolAllocator
from lamella_buffers.testing import check_allocator
from lamella_engine import FSDPModule, MixedPrecisionPolicy, ShardingOptions, fully_shard
from lamella_engine.testing import require_unit
from lamella_integration.llama import Llama, LlamaConfig, next_token_loss
from lamella_integration.reference import init_weights
from lamella_integration.repeatable import use_repeatable_kernels
from lamella_integration.tasks import TASKS, Trace, TrainingSettings, shard, train
from lamella_testing import run_ranks

MIB = 2**20
SLACK = 32 * MIB  # A few times the granularity of segments.
WIDE = LlamaConfig(dim=2048, num_layers=8, num_heads=16, num_kv_heads=4, ffn_dim=8192, vocab_size=4096)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)

Make = Callable[[], Allocator]
ALLOCATORS: dict[str, Make] = {
    "caching": CachingAllocator,
    "pool": PoolAllocator,
    "MemPool": MemPoolAllocator,
    "pool in a MemPool": lambda: PoolAllocator(MemPoolAllocator()),
}
OTHERS = pytest.mark.parametrize("other", list(ALLOCATORS)[1:])


def _cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.gpu1
@pytest.mark.parametrize("name", ALLOCATORS)
def test_every_allocator_conforms_on_gpus(name: str) -> None:
    def check() -> None:
        check_allocator(ALLOCATORS[name](), _cuda())

    run_ranks(check, 1, device="cuda")


def _wide(allocator: Allocator) -> FSDPModule:
    with torch.device("meta"):
        model = Llama(WIDE)
    shard(model, fully_shard, mp_policy=BF16, options=ShardingOptions(allocator=allocator))
    model.to_empty(device="cuda")
    init_weights(model, 0, round_to=torch.bfloat16)
    assert isinstance(model, FSDPModule)
    return model


def _held_by(allocator: MemPoolAllocator) -> int:
    return sum(segment["allocated_size"] for segment in allocator.pool.snapshot())  # type: ignore[no-untyped-call]


@pytest.mark.gpu1
def test_every_unsharded_byte_lies_in_the_memory_pool() -> None:
    def check() -> None:
        allocator = MemPoolAllocator()
        model = _wide(allocator)
        assert _held_by(allocator) == 0
        model.unshard()
        unsharded = sum(group.unsharded_weight.flat.nbytes for group in require_unit(model).parameters.groups)
        assert unsharded > 32 * MIB
        assert unsharded <= _held_by(allocator) <= unsharded + MIB
        model.reshard()
        assert _held_by(allocator) == 0

    run_ranks(check, 1, device="cuda")


@pytest.mark.gpu2
@OTHERS
def test_training_is_bit_for_bit_that_of_the_caching_allocator(other: str) -> None:
    task, recipe = TASKS["llama"], TrainingSettings(num_steps=20, num_microbatches=2, max_norm=1.0)

    def traces() -> list[Trace]:
        use_repeatable_kernels()
        options_by_allocator = [ShardingOptions(allocator=ALLOCATORS[name]()) for name in ("caching", other)]
        return [
            train(task, shard(task.model(device=_cuda()), fully_shard, mp_policy=BF16, options=options), recipe)
            for options in options_by_allocator
        ]

    for expected, got in run_ranks(traces, 2, device="cuda"):
        assert got.losses == expected.losses
        assert got.grad_norms == expected.grad_norms
        torch.testing.assert_close(got.weights, expected.weights, rtol=0.0, atol=0.0)


# -- allocations of a step -------------------------------------------------------------------------------------------


class _CountingAllocator(CachingAllocator):
    """The caching allocator, with a count of the allocations."""

    count = 0

    def allocate(self, buffer: torch.Tensor) -> None:
        self.count += 1
        super().allocate(buffer)


@dataclass(frozen=True)
class _StepMemory:
    num_allocations: int  # allocations of any kind in a step
    num_buffer_allocations: int  # allocations of unsharded buffers
    reserved_nbytes: int
    planned_nbytes: int


def _measure(make: Callable[[_CountingAllocator], Allocator]) -> _StepMemory:
    """The memory of a step after warm-up, and the peak of reserved memory."""
    source = _CountingAllocator()
    allocator = make(source)
    model = _wide(allocator)
    tokens = torch.randint(WIDE.vocab_size, (1, 33), generator=torch.Generator().manual_seed(0)).cuda()

    def step() -> None:
        next_token_loss(model(tokens[:, :-1]), tokens[:, 1:].contiguous()).backward()  # type: ignore[no-untyped-call, operator]
        model.zero_grad()

    for _ in range(5):
        step()
    torch.cuda.synchronize()
    before, asked = torch.cuda.memory_stats()["allocation.all.allocated"], source.count
    step()
    torch.cuda.synchronize()
    return _StepMemory(
        num_allocations=torch.cuda.memory_stats()["allocation.all.allocated"] - before,
        num_buffer_allocations=source.count - asked,
        reserved_nbytes=torch.cuda.max_memory_reserved(),
        planned_nbytes=allocator.report().planned_nbytes if isinstance(allocator, PoolAllocator) else 0,
    )


@pytest.mark.gpu2
def test_a_step_with_a_plan_takes_nothing_for_unsharded_buffers_and_needs_no_more_memory() -> None:
    num_gathers = 2 * WIDE.num_layers + 1
    settled = run_ranks(lambda: _measure(lambda source: source), 2, device="cuda")
    pooled = run_ranks(lambda: _measure(PoolAllocator), 2, device="cuda")
    with torch.device("meta"):
        model = Llama(WIDE)
    block = 2 * sum(parameter.numel() for parameter in model.blocks[0].parameters())
    root = 2 * sum(parameter.numel() for parameter in model.parameters()) - WIDE.num_layers * block
    for caching, pool in zip(settled, pooled, strict=True):
        assert (caching.num_buffer_allocations, pool.num_buffer_allocations) == (num_gathers, 0)
        assert pool.num_allocations == caching.num_allocations - num_gathers
        assert pool.reserved_nbytes <= caching.reserved_nbytes + SLACK
        assert root + 2 * block <= pool.planned_nbytes <= root + 2 * block + MIB
