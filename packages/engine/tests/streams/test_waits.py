"""Each read of memory comes after its writes, and each reuse after the last read: Note [Streams], by happens-before."""

from __future__ import annotations

import pytest
import torch
from engine_models import Net, shard
from races import detected
from stream_scenarios import SCENARIOS

from lamella_testing import run_ranks


@pytest.mark.parametrize("name", SCENARIOS)
def test_waits_order_every_access_to_memory(name: str) -> None:
    assert run_ranks(SCENARIOS[name], 1) == [[]]


def test_a_missing_wait_is_a_race() -> None:
    """Of the detector: a read, a write and an allocation, each on a stream that has not waited."""

    def races_of_three_accesses() -> list[str]:
        with detected(shard(Net())) as races, torch.no_grad():
            written, freed = torch.zeros(4), torch.ones(4)
            side = races.streams.Stream(priority=0)
            races.name(side, "side")
            with races.streams.stream(side):
                total = written + freed
            written.add_(1.0)
            del freed
            torch.zeros(4)
            races.streams.compute.wait_stream(side)
            total.add_(written)
        return races.violations

    assert run_ranks(races_of_three_accesses, 1) == [
        [
            "add.Tensor reads on side, not ordered after zeros.default on compute",
            "add.Tensor reads on side, not ordered after ones.default on compute",
            "add_.Tensor writes on compute, not ordered after add.Tensor on side",
            "an allocation on compute, not ordered after add.Tensor on side",
        ]
    ]
