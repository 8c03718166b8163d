"""The comparison under the clients' tests: `run_in_both` shards with both implementations, and reports differences."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor._random
from torch import nn

import lamella_engine
from lamella_integration.in_place import assert_same, run_in_both, units
from lamella_testing import RankFailure


def shard(folder: Path) -> list[str]:
    model: Any = torch.distributed.fsdp.fully_shard(nn.Linear(3, 2))
    return units(model)


def tell_which(folder: Path) -> bool:
    model = torch.distributed.fsdp.fully_shard(nn.Linear(3, 2))
    return isinstance(model, lamella_engine.FSDPModule)


def shard_nothing(folder: Path) -> list[str]:
    return units(nn.Linear(3, 2))


def test_a_program_shards_with_either() -> None:
    assert run_in_both(shard) == [[""], [""]]
    with pytest.raises(AssertionError, match="rank 0: expected False, got True"):
        run_in_both(tell_which)


def test_a_program_that_shards_nothing_is_not_taken_for_one_that_agrees() -> None:
    with pytest.raises(RankFailure, match="not lamella's, or not torch's"):
        run_in_both(shard_nothing)


@pytest.mark.parametrize(
    ("expected", "got"),
    [
        ([torch.ones(2)], [torch.tensor([1.0, 1.0 + 2**-23])]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ([1, 2], [1, 2, 3]),
        (1, 1.0),
        ("x", "y"),
        (torch.ones(1), torch.ones(1, dtype=torch.float64)),
    ],
)
def test_small_differences_are_seen(expected: object, got: object) -> None:
    assert_same(expected, expected, "here")
    with pytest.raises(AssertionError, match="here"):
        assert_same(expected, got, "here")


def test_ranks_know_their_place_as_under_torchrun() -> None:
    def place(folder: Path) -> list[object]:
        assert os.environ["RANK"] == str(dist.get_rank())
        return [os.environ["RANK"], os.environ["WORLD_SIZE"]]

    assert run_in_both(place) == [["0", "2"], ["1", "2"]]
