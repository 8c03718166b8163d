"""The parity check passes training that equals a single process's, and no other training."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from lamella_testing import RankFailure, assert_trains_as_unsharded

BATCH = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))


def make_model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(5, 3)


def distance_from_ten(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(batch) - 10).square().mean()
    return loss


def leave(model: nn.Module) -> None:
    """Not sharded, and gradients not averaged."""


def test_sharded_training_passes() -> None:
    assert_trains_as_unsharded(make_model, fully_shard, distance_from_ten, BATCH)


def test_ranks_that_do_not_share_gradients_are_found() -> None:
    with pytest.raises(AssertionError):
        assert_trains_as_unsharded(make_model, leave, distance_from_ten, BATCH)


def test_a_task_that_teaches_nothing_is_refused() -> None:
    with pytest.raises((AssertionError, RankFailure), match="nothing was learned"):
        assert_trains_as_unsharded(make_model, leave, lambda model, batch: model(batch).sum() * 0 + 1, BATCH)
