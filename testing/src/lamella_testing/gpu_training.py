"""A sharded model on a GPU, two steps of it, and a comparison of states."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lamella_testing.tiny import Kit


def build(kit: Kit, *, seed: int = 0, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The tiny model, sharded on this rank's GPU, and an optimizer with some options."""
    model, _ = kit.build(sharded=False, seed=seed)
    kit.shard(model.cuda())
    return model, torch.optim.AdamW(model.parameters(), lr=0.05, **options)


def assert_equal(expected: Mapping[str, torch.Tensor], got: Mapping[str, torch.Tensor]) -> None:
    """Two states are of the same names and values."""
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name], got[name]) for name in expected)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Two steps."""
    inputs = torch.linspace(-1, 1, 20, device="cuda").reshape(4, 5)
    for _ in range(2):
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
