"""On GPUs: gathers by copy engines equal gathers by rings, take no multiprocessor, and are the default of units."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo  # As in test_nccl: once here instead of once a rank.
import torch.distributed as dist
from late_streams import LLAMA, assert_no_bit_changes_when_late
from torch import nn
from torch.profiler import ProfilerActivity, profile

from lamella_buffers import CachingAllocator, NcclTransport, Payload, WindowAllocator, copy_engines_of
from lamella_buffers.testing import check_allocator
from lamella_engine import ZERO2, ZERO3, AxisPlacement, MixedPrecisionPolicy, ShardingOptions, fully_shard
from lamella_engine.testing import require_unit
from lamella_integration.tasks import TASKS, TrainingSettings, shard, train
from lamella_testing import run_ranks

MANY_RANKS = pytest.mark.parametrize(
    "num_ranks", [pytest.param(2, marks=pytest.mark.gpu2), pytest.param(4, marks=pytest.mark.gpu4)]
)
SIZES = [(1,), (1000, 3), (1 << 20, 7, 64), (5, 1 << 22)]


def _engines() -> Any:
    engines = copy_engines_of(dist.group.WORLD)  # type: ignore[arg-type]
    assert engines is not None, "Expected GPUs of one host that map one another's memory."
    return engines


def _views(flat: torch.Tensor, numels: Sequence[int]) -> list[torch.Tensor]:
    return list(torch.split(flat, [numel * dist.get_world_size() for numel in numels]))


def _shards(numels: Sequence[int], turn: int) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(100 * turn + dist.get_rank())
    return [torch.randn(numel, device="cuda", generator=generator).bfloat16() for numel in numels]


@MANY_RANKS
@pytest.mark.parametrize("in_place", [True, False])
def test_copy_engines_gather_the_bytes_of_a_ring(num_ranks: int, in_place: bool) -> None:
    """Into transient buffers, beside compute, with a late rank in turn."""

    def check() -> None:
        engines, ring = _engines(), NcclTransport(dist.group.WORLD)  # type: ignore[arg-type]
        stream = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
        buffers = [
            engines.allocator.create(num_ranks * sum(numels), torch.bfloat16, torch.device("cuda"))
            for numels in SIZES * 2
        ]
        for buffer in buffers:
            engines.allocator.free(buffer)
        for turn in range(40):
            numels, buffer = (SIZES * 2)[turn % 8], buffers[turn % 8]
            shards = _shards(numels, turn)
            expected = [torch.empty(num_ranks * numel, device="cuda", dtype=torch.bfloat16) for numel in numels]
            ring.all_gather([Payload(a, b) for a, b in zip(shards, expected, strict=True)])
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                if turn % num_ranks == dist.get_rank():
                    torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]
                engines.allocator.allocate(buffer)
                got = _views(buffer, numels)
                local_views = [gathered.view(num_ranks, -1)[dist.get_rank()] for gathered in got]
                if in_place:
                    torch._foreach_copy_(local_views, shards)
                sent = local_views if in_place else shards
                engines.transport.all_gather([Payload(a, b) for a, b in zip(sent, got, strict=True)])
            torch.cuda.current_stream().wait_stream(stream)
            for a, b in zip(got, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=0.0, atol=0.0)
            stream.wait_stream(torch.cuda.current_stream())
            engines.allocator.free(buffer)

    run_ranks(check, num_ranks, device="cuda")


@pytest.mark.gpu2
def test_a_captured_gather_leaves_no_pending_flags_for_the_next_gather() -> None:
    """An eager gather into the same place comes before the first replay: peers would wait for a word for ever."""
    numel = 1 << 20

    def check() -> None:
        engines, ring = _engines(), NcclTransport(dist.group.WORLD)  # type: ignore[arg-type]
        shard, expected = (torch.zeros(n, device="cuda", dtype=torch.bfloat16) for n in (numel, 2 * numel))
        buffer = engines.allocator.create(2 * numel, torch.bfloat16, torch.device("cuda"))
        engines.allocator.free(buffer)
        engines.allocator.allocate(buffer)

        def gather() -> None:
            engines.transport.all_gather([Payload(shard, buffer)])

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            gather()
        for turn, run in enumerate((gather, graph.replay, gather, graph.replay)):
            (source,) = _shards([numel], turn)
            shard.copy_(source)
            buffer.zero_()
            run()
            ring.all_gather([Payload(shard, expected)])
            torch.testing.assert_close(buffer, expected, rtol=0.0, atol=0.0)

    run_ranks(check, 2, device="cuda")


@MANY_RANKS
def test_the_copy_engines_allocator_conforms(num_ranks: int) -> None:
    def check() -> None:
        check_allocator(_engines().allocator, torch.device("cuda", torch.cuda.current_device()))

    run_ranks(check, num_ranks, device="cuda")


def _backward(model: nn.Module, x: torch.Tensor) -> None:
    model(x).sum().backward()


def _kernels(step: Callable[[], object]) -> list[str]:
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        step()
        torch.cuda.synchronize()
    return [event.name for event in profiler.events()]


@MANY_RANKS
def test_units_gather_so_by_default_and_by_rings_when_told(num_ranks: int) -> None:
    def check() -> list[tuple[int, int]]:
        counts = []
        for allocator in (None, CachingAllocator()):
            model = nn.Sequential(*(nn.Linear(512, 512, bias=False, device="cuda") for _ in range(3)))
            for layer in model:
                policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
                fully_shard(
                    layer, mp_policy=policy, reshard_after_forward=True, options=ShardingOptions(allocator=allocator)
                )
            fully_shard(model)
            x = torch.randn(4, 512, device="cuda")
            names = _kernels(partial(_backward, model, x))
            pushed = sum("PtoP" in name and "Memcpy" in name for name in names)
            counts.append((pushed, sum("AllGather" in name for name in names)))
        return counts

    num_gathers = 3 * 2  # each before forward, and again before backward
    for (pushed, rings), (pushed_too, rings_too) in run_ranks(check, num_ranks, device="cuda"):
        assert rings == 0
        assert pushed >= num_gathers * 3  # pieces, and flags twice: a batch each, or a batch a peer
        assert pushed_too == 0
        assert rings_too >= num_gathers


@MANY_RANKS
def test_training_is_that_of_rings(num_ranks: int) -> None:
    """Bit by bit."""
    recipe = TrainingSettings(num_steps=8)

    def check() -> None:
        from lamella_integration.repeatable import use_repeatable_kernels

        use_repeatable_kernels()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for name, task in TASKS.items():
            device = torch.device("cuda", torch.cuda.current_device())
            pushed, rung = (
                train(task, shard(task.model(device=device), fully_shard, mp_policy=policy, options=options), recipe)
                for options in (ShardingOptions(), ShardingOptions(allocator=CachingAllocator()))
            )
            assert pushed.losses == rung.losses, name
            torch.testing.assert_close(pushed.weights, rung.weights, rtol=0.0, atol=0.0)

    run_ranks(check, num_ranks, device="cuda")


@MANY_RANKS
@pytest.mark.filterwarnings(
    "ignore:Full backward hook is firing"
)  # torch warns for tokens as input; the hook fires nevertheless
@pytest.mark.parametrize("stage", [ZERO2, ZERO3], ids=["ZERO2", "ZERO3"])
def test_streams_that_are_late_at_random_change_no_bit(num_ranks: int, stage: AxisPlacement) -> None:
    """A missing wait shows as memory read, or written by a peer, too early."""
    recipe = TrainingSettings(num_steps=100, num_microbatches=2, max_norm=1.0)

    def sharded() -> nn.Module:
        model = LLAMA.model(device=torch.device("cuda", torch.cuda.current_device()))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        return shard(model, fully_shard, mp_policy=policy, options=ShardingOptions(placements=stage))

    assert_no_bit_changes_when_late(LLAMA, sharded, recipe, num_ranks)


@MANY_RANKS
def test_at_rest_windows_hold_no_allocated_bytes(num_ranks: int) -> None:
    def check() -> None:
        model = fully_shard(nn.Linear(4096, 4096, bias=False, device="cuda"), reshard_after_forward=True)
        x = torch.randn(4, 4096, device="cuda")
        nn.functional.linear(x, x)  # cuBLAS's workspace comes with the first product
        before = torch.cuda.memory_allocated()
        with torch.no_grad():
            model(x)
        assert torch.cuda.memory_allocated() - before < 2**20  # messages between ranks
        windows = require_unit(model).parameters.groups[0].transports.windows
        assert isinstance(windows, WindowAllocator)
        assert windows.reserved_nbytes == 4096 * 4096 * 4

    run_ranks(check, num_ranks, device="cuda")
