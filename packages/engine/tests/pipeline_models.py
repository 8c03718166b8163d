"""Stages for torch's pipeline schedules, and the stages' inputs."""

from __future__ import annotations

from typing import Any

import torch
from engine_models import Residual
from torch import nn

from lamella_engine import fully_shard

NUM_ROWS = 8


def stages_of(num: int) -> list[nn.Sequential]:
    torch.manual_seed(0)
    return [nn.Sequential(Residual(), Residual()) for _ in range(num)]


def stage_loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (out - target).square().mean()


def rows_of(seed: int) -> torch.Tensor:
    return torch.randn(NUM_ROWS, 7, generator=torch.Generator().manual_seed(seed))


def shard_stage(stage: nn.Sequential, mesh: Any, reshard_after_forward: bool | None) -> nn.Sequential:
    for block in stage:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward)
    return fully_shard(stage, mesh=mesh, reshard_after_forward=reshard_after_forward)
