"""A sharded model on a GPU, and two steps of it."""

from typing import Any

import torch
from torch import nn

from lamella_testing.tiny import Kit


def build(kit: Kit, *, seed: int = 0, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The tiny model, sharded on this rank's GPU, and an optimizer with some options."""
    model, _ = kit.build(sharded=False, seed=seed)
    kit.shard(model.cuda())
    return model, torch.optim.AdamW(model.parameters(), lr=0.05, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Two steps."""
    inputs = torch.linspace(-1, 1, 20, device="cuda").reshape(4, 5)
    for _ in range(2):
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
