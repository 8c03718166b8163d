"""`Team`: ranks for several calls."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lamella_testing import RankFailure, RankTimeout, Team, _team
from lamella_testing._ranks import RankProcess, start


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


def test_new_ranks_replace_ranks_that_failed(team: Team) -> None:
    before = team.run(os.getpid)

    def fail() -> None:
        raise ValueError(f"rank {dist.get_rank()} fails")

    with pytest.raises(RankFailure, match="fails"):
        team.run(fail)
    after = team.run(os.getpid)
    assert not set(before) & set(after)


def test_a_team_with_a_rank_that_cannot_start_is_refused(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    def start_but_one(rank: int, *args: Any) -> RankProcess:
        if rank == 1:
            raise OSError("no process left")
        return start(rank, *args)

    monkeypatch.setattr(_team, "start", start_but_one)
    with pytest.raises(OSError, match="no process left"):
        team.run(dist.get_rank)
    monkeypatch.undo()
    assert team.run(dist.get_rank, timeout_s=10.0) == [0, 1]


def test_a_closed_team_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    team = Team(1)
    for _ in range(2):
        team.run(dist.get_rank)
        assert len(list(tmp_path.iterdir())) == 1
        team.close()
        assert not list(tmp_path.iterdir())


def test_a_hang_is_a_failure_too(team: Team) -> None:
    def wait_alone() -> None:
        if dist.get_rank() == 0:
            dist.barrier()

    with pytest.raises(RankTimeout, match="ranks \\[0\\]"):
        team.run(wait_alone, timeout_s=2.0)
    assert team.run(dist.get_rank) == [0, 1]
