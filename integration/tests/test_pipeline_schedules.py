"""torch's pipeline schedules over stages that shard themselves: the losses and weights that they have with FSDP2."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor._random
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)

from lamella_integration.in_place import Device, run_in_both, units, unsharded_copy

NUM_MICROBATCHES = 4
SCHEDULES: dict[str, tuple[Any, int]] = {
    "GPipe": (ScheduleGPipe, 1),
    "1F1B": (Schedule1F1B, 1),
    "Interleaved 1F1B": (ScheduleInterleaved1F1B, 2),
    "looped BFS": (ScheduleLoopedBFS, 2),
}


class StageBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 9)
        self.down = nn.Linear(9, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        update: torch.Tensor = self.down(torch.tanh(self.up(x)))
        return x + update


def sharded(stage: nn.Sequential, mesh: Any) -> nn.Sequential:
    for block in stage:
        torch.distributed.fsdp.fully_shard(block, mesh=mesh)
    torch.distributed.fsdp.fully_shard(stage, mesh=mesh)
    return stage


def loss_of(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (out - target).square().mean()


def trained(folder: Path, *, schedule: str, num_places: int) -> object:
    """Steps of a pipeline of `num_places` ranks, each of them as often as ranks share its shards."""
    make, num_local = SCHEDULES[schedule]
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    shape = (num_places, dist.get_world_size() // num_places)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pipeline", "data"))
    place, num_stages = mesh["pipeline"].get_local_rank(), num_places * num_local
    stages = [nn.Sequential(StageBlock(), StageBlock()).to(device) for _ in range(num_stages)]
    mine = {i: sharded(stages[i], mesh["data"]) for i in range(place, num_stages, num_places)}
    group = mesh["pipeline"].get_group()
    parts = [PipelineStage(stage, i, num_stages, device, group=group) for i, stage in mine.items()]
    steps = make(parts if num_local > 1 else parts[0], NUM_MICROBATCHES, loss_fn=loss_of)
    optimizers = [torch.optim.AdamW(stage.parameters(), lr=0.05) for stage in mine.values()]

    losses: list[torch.Tensor] = []
    for step in range(3):
        draw = torch.Generator().manual_seed(10 * step + mesh["data"].get_local_rank())
        x, target = (torch.randn(8, 6, generator=draw).to(device) for _ in range(2))
        steps.step(*([x] if place == 0 else []), target=target, losses=losses)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    names = [units(stage) for stage in mine.values()]
    return [names, unsharded_copy(losses), unsharded_copy([stage.state_dict() for stage in mine.values()])]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_pipeline_trains_as_with_fsdp2(schedule: str) -> None:
    run_in_both(partial(trained, schedule=schedule, num_places=2), num_ranks=4)


@pytest.mark.gpu2
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("device", ["cuda"])
def test_stages_of_one_shard_train_as_with_fsdp2(schedule: str, device: Device) -> None:
    """Two GPUs are a pipeline of two places, so each stage's shards lie on one rank."""
    run_in_both(partial(trained, schedule=schedule, num_places=2), device=device)
