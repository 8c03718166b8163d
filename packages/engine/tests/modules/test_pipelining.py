"""torch's pipeline schedules drive units as they drive FSDP2's: stages train as the unsharded model does."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_models import assert_shard_equals
from pipeline_models import rows_of, shard_stage, stage_loss, stages_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor import DTensor

from lamella_engine import share_comm_ctx
from lamella_engine.testing import assert_at_rest
from lamella_testing import run_ranks

NUM_MICROBATCHES = 4
# Of torch 2.15. Any: the release for type checks lacks the argument.
DEFERRAL: dict[str, Any] = {"defer_reduce_grad_wait": True}
NEEDS_DEFERRAL = pytest.mark.skipif(
    "finalize_gradients" not in inspect.signature(Schedule1F1B.step).parameters,
    reason="torch before 2.15 ends a step's backward with the step",
)


def _check(
    make_schedule: Callable[..., Any],
    num_local: int,
    reshard_after_forward: bool | None = None,
    *,
    shares_streams: bool = True,
    num_calls: int = 1,
) -> None:
    """Two steps; of several calls of the schedule each, all but the last leave gradients for later."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pipeline", "data"))
    place, num_stages = mesh["pipeline"].get_local_rank(), 2 * num_local
    references, stages = stages_of(num_stages), stages_of(num_stages)
    mine = range(place, num_stages, 2)
    for i in mine:
        shard_stage(stages[i], mesh["data"], reshard_after_forward)
    if shares_streams:
        share_comm_ctx([stages[i] for i in mine])  # type: ignore[misc]
    group = mesh["pipeline"].get_group()
    pipeline = [PipelineStage(stages[i], i, num_stages, torch.device("cpu"), group=group) for i in mine]
    schedule = make_schedule(pipeline if num_local > 1 else pipeline[0], NUM_MICROBATCHES, loss_fn=stage_loss)

    for step in range(2):
        for model in (*references, *(stages[i] for i in mine)):
            model.zero_grad()
        for call in range(num_calls):
            x, target = rows_of(4 * step + 2 * call), rows_of(4 * step + 2 * call + 1)
            ends = {} if num_calls == 1 else {"finalize_gradients": call == num_calls - 1}
            schedule.step(*([x] if place == 0 else []), target=target, **ends)
            loss: Any = stage_loss(nn.Sequential(*references)(x), target)
            loss.backward()
        for i in mine:
            assert_at_rest(stages[i])
            pairs = zip(references[i].named_parameters(), stages[i].parameters(), strict=True)
            for (name, expected), got in pairs:
                assert got.grad is not None
                assert expected.grad is not None
                _assert_shard_equals(mesh["data"], got.grad, expected.grad, f"{step}: {i}.{name}")


def _assert_shard_equals(mesh: Any, got: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    chunks = expected.chunk(mesh.size())
    rank = mesh.get_local_rank()
    mine = chunks[rank] if rank < len(chunks) else expected[:0]
    assert isinstance(got, DTensor)
    assert_shard_equals(got.to_local(), mine, name, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_stage_a_rank(schedule: Callable[..., Any], num_ranks: int) -> None:
    run_ranks(_check, num_ranks, schedule, 1, None)


def test_two_stages_a_rank() -> None:
    run_ranks(_check, 4, ScheduleInterleaved1F1B, 2, None)


def test_backward_in_two_halves_for_parameters_that_stay_unsharded() -> None:
    """Between forward and backward the schedule takes the parameters it differentiates from the module."""
    run_ranks(_check, 4, ScheduleInterleavedZeroBubble, 2, False)


@NEEDS_DEFERRAL
@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B])
def test_several_calls_may_be_one_step(schedule: Callable[..., Any]) -> None:
    run_ranks(partial(_check, num_calls=2), 4, schedule, 1)


@NEEDS_DEFERRAL
def test_several_calls_with_two_stages_a_rank_may_be_one_step() -> None:
    run_ranks(partial(_check, num_calls=2), 4, ScheduleInterleaved1F1B, 2)


@NEEDS_DEFERRAL
def test_a_stage_is_reduced_while_another_computes() -> None:
    schedule = partial(ScheduleInterleaved1F1B, **DEFERRAL)
    run_ranks(partial(_check, shares_streams=False), 4, schedule, 2)


@NEEDS_DEFERRAL
def test_stages_that_share_streams_are_not_reduced_while_another_computes() -> None:
    """torch asks whether stages share streams, and refuses a schedule that its own FSDP2 cannot run."""

    def check() -> None:
        with pytest.raises(ValueError, match="share a communication context"):
            _check(partial(ScheduleInterleaved1F1B, **DEFERRAL), 2)

    run_ranks(check, 4)
