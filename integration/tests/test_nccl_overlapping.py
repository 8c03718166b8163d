"""On GPUs over NCCL: optimizers overlapped with the ends of a step take equal steps, bit by bit."""

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
import torch._dynamo  # As in test_nccl: once here instead of once a rank.
import torch.distributed as dist
from four_gpus import WAYS, mesh
from late_streams import LLAMA, LONGEST_SLEEP, delay_streams
from torch import nn

from lamella_engine import MixedPrecisionPolicy, fully_shard
from lamella_engine.testing import streams_of
from lamella_integration.backends import BACKENDS, Workload
from lamella_integration.profile import NUM_STEPS, NUM_TOKENS, PROOF, profile_steps
from lamella_integration.repeatable import use_repeatable_kernels
from lamella_integration.tasks import Trace, TrainingSettings, shard, train
from lamella_optim import overlap_optimizer
from lamella_testing import run_ranks
from lamella_trace import Kernel, KernelKind

HERE = [way for way in WAYS if way not in ("HSDP, ZERO2", "HSDP, ZERO3")]
NUM_STRESSED_STEPS = 200
# The last of several microbatches alone is reduced: weights may not move before.
RECIPE = TrainingSettings(num_steps=NUM_STRESSED_STEPS, num_microbatches=2, reduce_every_microbatch=False)


def _sharded(way: str) -> nn.Module:
    model = LLAMA.model(device=torch.device("cuda", torch.cuda.current_device()))
    return shard(model, fully_shard, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16), **WAYS[way]())


@pytest.mark.gpu4
@pytest.mark.parametrize("way", HERE)
@pytest.mark.parametrize("late_gradients", [False, True], ids=["gathers", "gathers_and_reductions"])
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_steps_that_hide_the_ends_change_no_bit_however_late_a_stream_may_be(way: str, late_gradients: bool) -> None:
    """A missing wait shows as shards gathered too early, or gradients used too early."""

    def traces() -> tuple[Trace, Trace]:
        use_repeatable_kernels()
        expected = train(LLAMA, _sharded(way), RECIPE)
        model = _sharded(way)
        delay_streams(model, streams_of(model))
        return expected, train(LLAMA, model, RECIPE, partial(_overlap_late, model, late_gradients))

    for expected, got in run_ranks(traces, 4, device="cuda"):
        assert got.losses == expected.losses
        torch.testing.assert_close(got.weights, expected.weights, rtol=0.0, atol=0.0)


def _overlap_late(model: nn.Module, late_gradients: bool, optimizer: torch.optim.Optimizer) -> None:
    """Hide the ends behind an optimizer before whose step a stream may sleep."""
    choose, streams = Random(torch.cuda.current_device()), streams_of(model)
    engines = [streams.all_gather_stream, streams.reduce_scatter_stream, streams.all_reduce_stream]

    def delay(*_: object) -> None:
        if choose.random() < 0.5:
            with streams.on(choose.choice([streams.compute_stream, *engines])):
                torch.cuda._sleep(choose.randrange(LONGEST_SLEEP))  # type: ignore[no-untyped-call]

    if not late_gradients:  # Another hook may read gradients, so no gradient may be late.
        optimizer.register_step_pre_hook(delay)
    optimizer.register_step_post_hook(delay)
    overlap_optimizer(optimizer, late_gradients=late_gradients)


@pytest.mark.gpu2
@pytest.mark.parametrize("flavour", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=repr)
def test_fused_foreach_and_loop_adamw_have_equal_states_overlapped_or_not(flavour: dict[str, Any]) -> None:
    def states() -> list[Any]:
        use_repeatable_kernels()
        states_of_ways = []
        for prepare in (lambda optimizer: None, partial(overlap_optimizer, late_gradients=True)):
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(256, 256, device="cuda") for _ in range(6)))
            for layer in (*model, model):
                fully_shard(layer, mesh=mesh(2), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **flavour)
            prepare(optimizer)
            x = torch.randn(64, 256, device="cuda")
            for _ in range(20):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            local = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
            tensors = [*model.parameters(), *local]
            states_of_ways.append((sorted(tensor.to_local().double().sum().item() for tensor in tensors), len(tensors)))
        return states_of_ways

    for without, overlapped in run_ranks(states, 2, device="cuda"):
        assert overlapped == without


def _num_hidden(kernels: list[Kernel], kinds: Collection[KernelKind]) -> int:
    """How many kernels of some kinds run while the optimizer does."""
    updates = [kernel for kernel in kernels if kernel.kind is KernelKind.OPTIMIZER]
    communication = [kernel for kernel in kernels if kernel.kind in kinds]
    return sum(any(a.start_us < b.end_us and b.start_us < a.end_us for b in updates) for a in communication)


def _profile_of_steps_that_start_together(**options: Any) -> list[Kernel]:
    """Kernels of steps queued as a whole on each rank, and begun on all ranks at once."""
    workload = Workload(config=PROOF, device=torch.device("cuda", torch.cuda.current_device()))
    training = BACKENDS["lamella"](workload, **options)
    meet = torch.zeros(1, device=workload.device)

    def step() -> None:
        torch.cuda._sleep(50 * LONGEST_SLEEP)  # type: ignore[no-untyped-call]  # 10 ms: more than the host needs to launch what follows
        dist.all_reduce(meet)
        training.optimizer_step()

    return profile_steps(replace(training, optimizer_step=step), *workload.batch(NUM_TOKENS))


@pytest.mark.alone
@pytest.mark.gpu2
def test_the_first_gather_of_forward_runs_beside_the_optimizer() -> None:
    def profiles() -> tuple[list[Kernel], ...]:
        return tuple(_profile_of_steps_that_start_together(overlap_optimizer=overlap) for overlap in ("false", "true"))

    gathers = {KernelKind.COLLECTIVE, KernelKind.ALL_GATHER}  # copies to peers are collectives without a name
    for without, hidden in run_ranks(profiles, 2, device="cuda"):
        assert _num_hidden(without, gathers) == 0
        assert _num_hidden(hidden, gathers) > 0


def _profile_of_steps_whose_last_reduction_is_late(**options: Any) -> list[Kernel]:
    workload = Workload(config=PROOF, device=torch.device("cuda", torch.cuda.current_device()))
    training = BACKENDS["lamella"](workload, **options)
    streams = streams_of(training.model)

    def step() -> None:
        with streams.on(streams.reduce_scatter_stream):  # behind the last reduction of a finished backward
            torch.cuda._sleep(50 * LONGEST_SLEEP)  # type: ignore[no-untyped-call]
        training.optimizer_step()

    return profile_steps(replace(training, optimizer_step=step), *workload.batch(NUM_TOKENS))


@pytest.mark.alone
@pytest.mark.gpu2
def test_a_step_updates_parameters_while_the_last_gradients_are_being_reduced() -> None:
    """A step without its own waits starts with all gradients; a waiting step starts without the last gradients."""

    def profiles() -> tuple[list[Kernel], ...]:
        return tuple(
            _profile_of_steps_whose_last_reduction_is_late(overlap_optimizer=overlap) for overlap in ("true", "late")
        )

    for punctual, late in run_ranks(profiles, 2, device="cuda"):
        for kernels, waits in ((punctual, False), (late, True)):
            updates = [kernel for kernel in kernels if kernel.kind is KernelKind.OPTIMIZER]
            sleeps = [kernel for kernel in kernels if "spin_kernel" in kernel.name]
            assert len(sleeps) == NUM_STEPS
            # From the backward's last product on: the reduction before the sleep takes as long as the slower rank.
            products = [kernel.end_us for kernel in kernels if kernel.kind is KernelKind.MATMUL]
            starts = [max(end for end in products if end <= kernel.start_us) for kernel in sleeps]
            ends = [kernel.end_us for kernel in sleeps]
            during = [u for u in updates if any(a <= u.start_us < b for a, b in zip(starts, ends, strict=True))]
            assert during
            assert (len(during) < len(updates)) == waits
