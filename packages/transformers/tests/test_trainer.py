"""The Trainer's callback without a Trainer: refusals, and the optimizer as it was before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lamella_engine import fully_shard
from lamella_testing import run_ranks
from lamella_transformers.trainer import ShardedTraining


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"overlap": False, "late_gradients": True}, "Expected `late_gradients` with `overlap`, got overlap=False."),
        ({"keep_budget": -1}, "Expected `keep_budget` of at least 0, got -1."),
        ({"num_profiled_steps": -2}, "Expected `num_profiled_steps` of at least 0, got -2."),
    ],
)
def test_settings_that_contradict_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ShardedTraining(**settings)


def begin(callback: ShardedTraining, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    callback.on_train_begin(None, None, None, model=model, optimizer=optimizer)


def test_a_model_that_is_not_sharded_is_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="Expected a model with units of lamella, got Linear without any. Pass fsdp"):
        begin(ShardedTraining(), model, torch.optim.SGD(model.parameters(), lr=0.1))


def overlapped_and_ended() -> None:
    model = nn.Linear(2, 2)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooks = len(optimizer._optimizer_step_pre_hooks)
    callback = ShardedTraining()
    begin(callback, model, optimizer)
    assert len(optimizer._optimizer_step_pre_hooks) == hooks + 1
    with pytest.raises(ValueError, match=r"got it again.*Or pass ShardedTraining\(overlap=False\)"):
        begin(ShardedTraining(), model, optimizer)
    begin(callback, model, optimizer)  # again, as after a training that ended in an error
    callback.on_train_end(None, None, None)
    assert len(optimizer._optimizer_step_pre_hooks) == hooks


def test_an_optimizer_is_overlapped_once_and_until_the_end_of_training() -> None:
    run_ranks(overlapped_and_ended, 2)
