"""On four GPUs over NCCL: every ZeRO stage trains as the unsharded model does, however late a stream may be."""

import four_gpus
import pytest
import torch
import torch._dynamo  # As in test_nccl: once here instead of once a rank.
from four_gpus import Options, mesh
from late_streams import LLAMA, ODD, assert_no_bit_changes_when_late
from torch import nn

from lamella_buffers import MemPoolAllocator, PoolAllocator
from lamella_engine import MixedPrecisionPolicy, ShardingOptions, fully_shard
from lamella_integration.reference import ReferenceModel
from lamella_integration.tasks import Task, Trace, TrainingSettings, shard, train
from lamella_testing import run_ranks

pytestmark = pytest.mark.gpu4

WAYS: dict[str, Options] = {
    **four_gpus.WAYS,
    "ZERO3 in a pool": lambda: {"mesh": mesh(4), "options": ShardingOptions(allocator=PoolAllocator())},
    "ZERO3 in a MemPool": lambda: {"mesh": mesh(4), "options": ShardingOptions(allocator=MemPoolAllocator())},
}
EVERY_WAY = pytest.mark.parametrize("way", WAYS)


def _model(task: Task) -> ReferenceModel:
    return task.model(device=torch.device("cuda", torch.cuda.current_device()))


@EVERY_WAY
@pytest.mark.parametrize("reduces_each", [True, False], ids=["reduce_each", "reduce_last"])
def test_every_zero_stage_takes_the_steps_of_one_unsharded_gpu(way: str, reduces_each: bool) -> None:
    recipe = TrainingSettings(num_steps=8, num_microbatches=2, reduce_every_microbatch=reduces_each, max_norm=1.0)

    def unsharded() -> list[Trace]:
        return [train(task, _model(task), recipe) for task in (LLAMA, ODD)]

    def sharded() -> list[Trace]:
        return [train(task, shard(_model(task), fully_shard, **WAYS[way]()), recipe) for task in (LLAMA, ODD)]

    [expected] = run_ranks(unsharded, 1, device="cuda")
    for traces in run_ranks(sharded, 4, device="cuda"):
        for got, expected_trace in zip(traces, expected, strict=True):
            torch.testing.assert_close(got.losses, expected_trace.losses, rtol=1e-5, atol=0.0)
            torch.testing.assert_close(got.grad_norms, expected_trace.grad_norms, rtol=1e-4, atol=0.0)
            torch.testing.assert_close(got.weights, expected_trace.weights, rtol=0.0, atol=1e-3)


# -- late streams ----------------------------------------------------------------------------------------------------

NUM_STRESSED_STEPS = 200


@EVERY_WAY
@pytest.mark.filterwarnings(
    "ignore:Full backward hook is firing"
)  # torch warns for tokens as input; the hook fires nevertheless
def test_streams_that_are_late_at_random_change_no_bit(way: str) -> None:
    """A missing wait shows as memory read or freed too early."""
    recipe = TrainingSettings(num_steps=NUM_STRESSED_STEPS, num_microbatches=2, max_norm=1.0)

    def sharded() -> nn.Module:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        return shard(_model(LLAMA), fully_shard, mp_policy=policy, **WAYS[way]())

    assert_no_bit_changes_when_late(LLAMA, sharded, recipe, num_ranks=4)
