"""`Team`: ranks that stay."""

import os
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from lamella_testing import RankFailure, RankTimeout, Team


@pytest.fixture
def team() -> Iterator[Team]:
    team = Team(2)
    yield team
    team.close()


def test_the_same_processes_run_one_function_after_another(team: Team) -> None:
    offset = 10
    first = team.run(lambda: (os.getpid(), dist.get_rank() + offset))
    second = team.run(lambda: (os.getpid(), dist.get_world_size()))
    assert [result for _, result in first] == [10, 11]
    assert [result for _, result in second] == [2, 2]
    assert [pid for pid, _ in first] == [pid for pid, _ in second]


def test_after_a_failure_others_take_their_place(team: Team) -> None:
    before = team.run(os.getpid)

    def fail() -> None:
        raise ValueError(f"rank {dist.get_rank()} fails")

    with pytest.raises(RankFailure, match="fails"):
        team.run(fail)
    after = team.run(os.getpid)
    assert not set(before) & set(after)


def test_a_hang_is_a_failure_too(team: Team) -> None:
    def wait_alone() -> None:
        if dist.get_rank() == 0:
            dist.barrier()

    with pytest.raises(RankTimeout, match="ranks \\[0\\]"):
        team.run(wait_alone, timeout_s=2.0)
    assert team.run(dist.get_rank) == [0, 1]
