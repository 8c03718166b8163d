"""On GPUs over NCCL: bf16 gradients exchanged in bf16, and added up in fp32 on arrival."""

from typing import Any

import pytest
import torch
import torch._dynamo  # As in test_nccl: once here instead of once a rank.
import torch.distributed as dist
from four_gpus import Options, mesh
from late_streams import LLAMA, delay_streams
from torch import nn

from lamella_buffers import NcclTransport, ShardedBuffer, reduce_scatter
from lamella_buffers.testing import check_transport
from lamella_engine import HFSDP, HSDP, ZERO1, ZERO2, ZERO3, MixedPrecisionPolicy, Rows, ShardingOptions, fully_shard
from lamella_engine.testing import reductions_in, tree_of
from lamella_integration.backends import BACKENDS, Workload
from lamella_integration.collectives import CollectiveCounter
from lamella_integration.llama import Llama, LlamaConfig, next_token_loss
from lamella_integration.profile import PROOF, parameter_sizes, profile_steps
from lamella_integration.repeatable import use_repeatable_kernels
from lamella_integration.tasks import TASKS, Trace, TrainingSettings, shard, train
from lamella_integration.trace import check_zero_copy
from lamella_layout import EvenLayout
from lamella_testing import run_ranks
from lamella_trace import KernelKind, streams_of

MANY_RANKS = pytest.mark.parametrize(
    "num_ranks", [pytest.param(2, marks=pytest.mark.gpu2), pytest.param(4, marks=pytest.mark.gpu4)]
)
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
MIB = 2**20


def _cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


WAYS: dict[str, Options] = {
    "ZERO1": lambda: {"mesh": mesh(4), "options": ShardingOptions(placements=ZERO1)},
    "ZERO2": lambda: {"mesh": mesh(4), "options": ShardingOptions(placements=ZERO2)},
    "ZERO3": lambda: {"mesh": mesh(4)},
    "HSDP": lambda: {"mesh": mesh(2, 2), "options": ShardingOptions(placements=(HSDP, ZERO3))},
    "HFSDP": lambda: {"mesh": mesh(2, 2), "options": ShardingOptions(placements=(HFSDP, ZERO3))},
    "flat": lambda: {"mesh": mesh(4), "options": ShardingOptions(keep_together=Rows(1))},
}


# -- numbers ---------------------------------------------------------------------------------------------------------


@MANY_RANKS
def test_nccl_conforms(num_ranks: int) -> None:
    def check() -> None:
        group = dist.group.WORLD
        assert group is not None
        check_transport(NcclTransport(group), _cuda())

    run_ranks(check, num_ranks, device="cuda")


class _InputAsGradient(nn.Module):
    """The weight's gradient is the input: numbers of the test's choice."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_rows, 256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


@MANY_RANKS
@pytest.mark.parametrize("num_rows", [4096, 4097])
def test_a_gradient_is_the_mean_of_all_ranks_bf16_gradients_to_the_precision_of_fp32(
    num_ranks: int, num_rows: int
) -> None:
    def drawn(rank: int) -> torch.Tensor:
        generator = torch.Generator("cuda").manual_seed(rank)
        values: torch.Tensor = torch.randn(num_rows, 256, generator=generator, device=_cuda()).bfloat16() * 10**rank
        return values

    def check() -> None:
        with _cuda():
            model: Any = fully_shard(_InputAsGradient(num_rows), mp_policy=POLICY)
        model(drawn(dist.get_rank())).backward()
        gradient = model.weight.grad.full_tensor().double()
        gradients = torch.stack([drawn(rank) for rank in range(num_ranks)]).double()
        assert bool(((gradient - gradients.mean(0)).abs() <= 2**-22 * gradients.abs().sum(0)).all())

    run_ranks(check, num_ranks, device="cuda")


@MANY_RANKS
@pytest.mark.parametrize("has_own_communicator", [False, True])  # an exchange is then the communicator's first use
@pytest.mark.parametrize("reduces_each", [True, False])
def test_training_takes_the_steps_of_a_wire_that_is_as_wide_as_the_sum(
    num_ranks: int, reduces_each: bool, has_own_communicator: bool
) -> None:
    """Bit by bit on two ranks, since a sum has a single order; see test_nccl."""
    recipe = TrainingSettings(
        num_steps=10, num_microbatches=2 if num_ranks == 2 else 1, reduce_every_microbatch=reduces_each
    )
    loss_tolerance, weight_tolerance = (0.0, 0.0) if num_ranks == 2 else (2**-8, 2 * recipe.learning_rate)

    def traces() -> list[tuple[Trace, Trace]]:
        use_repeatable_kernels()

        def trained(name: str) -> Trace:
            task = TASKS[name]
            model: Any = shard(task.model(device=_cuda()), fully_shard, mp_policy=POLICY)
            if has_own_communicator:
                model.set_separate_reduce_scatter_group()
            return train(task, model, recipe)

        narrow = [trained(name) for name in TASKS]
        with reductions_in(torch.float32):
            wide = [trained(name) for name in TASKS]
        return list(zip(narrow, wide, strict=True))

    for results in run_ranks(traces, num_ranks, device="cuda"):
        for narrow, wide in results:
            torch.testing.assert_close(narrow.losses, wide.losses, rtol=loss_tolerance, atol=0.0)
            torch.testing.assert_close(narrow.weights, wide.weights, rtol=0.0, atol=weight_tolerance)


@pytest.mark.gpu4
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings(
    "ignore:Full backward hook is firing"
)  # torch warns for tokens as input; the hook fires nevertheless
def test_streams_that_are_late_at_random_change_no_bit(way: str) -> None:
    """A missing wait shows as memory read or freed too early. Two runs also show that sums are repeatable."""
    recipe = TrainingSettings(num_steps=100, max_norm=1.0)

    def traces() -> tuple[Trace, Trace]:
        use_repeatable_kernels()
        measured = []
        for is_late in (False, True):
            model = shard(LLAMA.model(device=_cuda()), fully_shard, mp_policy=POLICY, **WAYS[way]())
            if is_late:
                delay_streams(model, tree_of(model).streams)
            measured.append(train(LLAMA, model, recipe))
        return measured[0], measured[1]

    for punctual, late in run_ranks(traces, 4, device="cuda"):
        assert late.losses == punctual.losses
        assert late.grad_norms == punctual.grad_norms
        torch.testing.assert_close(late.weights, punctual.weights, rtol=0.0, atol=0.0)


# -- bytes and kernels -----------------------------------------------------------------------------------------------

# As in test_nccl: a unit more or less cannot hide.
WIDE = LlamaConfig(dim=2048, num_layers=8, num_heads=16, num_kv_heads=4, ffn_dim=8192, vocab_size=4096)
FEW_TOKENS = 32
SLACK = 16 * MIB  # temporaries; a block is 116 MiB in bf16


@MANY_RANKS
def test_a_reduction_holds_arriving_gradients_and_in_fp32_only_shards(num_ranks: int) -> None:
    numel = 32 * MIB

    def largest_nbytes() -> int:
        group = dist.group.WORLD
        assert group is not None
        layout = EvenLayout.build([(numel // 1024, 1024)], num_ranks)
        into = ShardedBuffer.empty(layout, dist.get_rank(), torch.float32, _cuda())
        gradient = torch.ones(layout.shapes[0], dtype=torch.bfloat16, device=_cuda())
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        moves = [({0: gradient}, torch.bfloat16, into)]
        reduce_scatter(moves, NcclTransport(group), dist.ReduceOp.AVG).wait()
        torch.cuda.synchronize()
        assert bool((into.flat == 1).all())
        return torch.cuda.max_memory_allocated() - before

    for nbytes in run_ranks(largest_nbytes, num_ranks, device="cuda"):
        assert nbytes <= 2 * numel + MIB, f"{nbytes / MIB:.0f} MiB"  # an fp32 wire would be staged in 4 * numel


@MANY_RANKS
def test_a_step_peaks_no_higher_than_with_bf16_sums(num_ranks: int) -> None:
    def peak(reduce_dtype: torch.dtype) -> int:
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        before = torch.cuda.memory_allocated()
        workload = Workload(config=WIDE, device=_cuda(), reduce_dtype=reduce_dtype)
        training = BACKENDS["lamella"](workload)
        batch = workload.batch(FEW_TOKENS)
        for _ in range(2):
            training.step(*batch)
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.reset_peak_memory_stats()
        training.step(*batch)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def peaks() -> tuple[int, int]:
        return peak(torch.float32), peak(torch.bfloat16)

    for in_fp32, in_bf16 in run_ranks(peaks, num_ranks, device="cuda"):
        assert in_fp32 <= in_bf16 + SLACK, f"{in_fp32 / MIB:.0f} MiB, with bf16 sums {in_bf16 / MIB:.0f} MiB"


@MANY_RANKS
def test_every_gradient_is_sent_once_in_two_bytes_an_element(num_ranks: int) -> None:
    def counted() -> tuple[int, int, set[torch.dtype]]:
        workload = Workload(config=PROOF, device=_cuda(), reduce_dtype=torch.float32)
        training = BACKENDS["lamella"](workload)
        batch = workload.batch(FEW_TOKENS)
        training.step(*batch)
        with CollectiveCounter() as counter:
            next_token_loss(training.model(batch[0]), batch[1]).backward()  # type: ignore[no-untyped-call]
        exchanged = counter.nbytes("all_to_all")
        return exchanged, counter.nbytes("reduce_scatter"), {call.dtype for call in counter.reductions}

    with torch.device("meta"):
        num_everything = sum(parameter.numel() for parameter in Llama(PROOF).parameters())
    assert run_ranks(counted, num_ranks, device="cuda") == [(2 * num_everything, 0, {torch.bfloat16})] * num_ranks


@MANY_RANKS
def test_exchanges_have_the_stream_of_reductions_and_copy_nothing(num_ranks: int) -> None:
    num_tokens = 1021

    def check() -> None:
        workload = Workload(config=PROOF, device=_cuda(), reduce_dtype=torch.float32)
        kernels = profile_steps(BACKENDS["lamella"](workload), *workload.batch(num_tokens))
        check_zero_copy(kernels, parameter_sizes(workload, num_tokens))
        pushes = streams_of(kernels, KernelKind.COLLECTIVE)  # gathers' and exchanges' copies to peers
        sums = [kernel for kernel in kernels if kernel.name == "_add_up"]
        assert len(pushes) == 2
        assert len({kernel.stream for kernel in sums} & pushes) == 1
        assert not pushes & streams_of(kernels, KernelKind.MATMUL, KernelKind.ATTENTION, KernelKind.OPTIMIZER)
        assert not streams_of(kernels, KernelKind.ALL_GATHER, KernelKind.REDUCE_SCATTER, KernelKind.ALL_TO_ALL)
        assert len(sums) == 2 * (PROOF.num_layers + 1), "one kernel for a unit, in each of two steps"

    run_ranks(check, num_ranks, device="cuda")
