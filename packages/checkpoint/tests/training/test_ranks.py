"""A step succeeds on every rank or raises on every rank."""

from collections.abc import Mapping

import pytest
import torch
import torch.distributed as dist

from lamella_checkpoint import CheckpointFailed, CheckpointUntrusted
from lamella_checkpoint._base.ranks import everywhere, exchange, num_ranks, on_device_of, on_rank_zero, rank
from lamella_testing import run_ranks


def test_exchange_gives_each_rank_its_own_reply() -> None:
    def double() -> int:
        doubled: int = exchange("double", rank, lambda ranks: [10 * rank + len(ranks) for rank in ranks])
        return doubled

    assert run_ranks(double, 3) == [3, 13, 23]


def test_without_a_group_a_step_is_a_call() -> None:
    assert exchange("add", lambda: 1, lambda values: [values[0] + 1]) == 2
    assert everywhere("stay", lambda: "local") == "local"
    assert on_rank_zero("name", lambda: "zero") == "zero"
    assert (rank(), num_ranks()) == (0, 1)
    with pytest.raises(KeyError, match="lost"):
        everywhere("fail", lambda: dict[str, int]()["lost"])


class DoesNotPickle(Exception):
    def __init__(self) -> None:
        super().__init__("no pickle")
        self.tensor_hook = lambda: None


def test_errors_that_do_not_pickle_reach_every_rank_as_text() -> None:
    def fail_on_two() -> str | Mapping[int, str]:
        def work() -> int:
            if dist.get_rank() in (1, 2):
                raise DoesNotPickle
            return 1

        try:
            everywhere("work", work)
        except DoesNotPickle:
            return "own"
        except CheckpointFailed as failed:
            return failed.failures
        pytest.fail("worked")

    failures = {1: "DoesNotPickle: no pickle", 2: "DoesNotPickle: no pickle"}
    assert run_ranks(fail_on_two, 4) == [failures, "own", "own", failures]


def test_a_checkpoint_error_is_raised_on_every_rank_that_was_not_interrupted() -> None:
    def work() -> None:
        if dist.get_rank() == 0:
            raise KeyboardInterrupt
        if dist.get_rank() in (2, 3):
            raise CheckpointUntrusted(f"file {dist.get_rank()}", "os.system")

    def fail() -> str:
        try:
            everywhere("work", work)
        except (KeyboardInterrupt, CheckpointUntrusted) as error:
            return f"{type(error).__name__} {error}"
        pytest.fail("worked")

    interrupted, *refusals = run_ranks(fail, 4)
    assert interrupted == "KeyboardInterrupt "
    assert len(set(refusals)) == 1
    assert refusals[0].startswith("CheckpointUntrusted Expected plain data in 'file 2', got os.system")


def test_a_failure_of_rank_zeros_part_reaches_every_rank() -> None:
    def fail_at_zero() -> tuple[type[BaseException], int]:
        with pytest.raises((ZeroDivisionError, CheckpointFailed)) as info:
            on_rank_zero("divide", lambda: 1 // 0)
        return info.type, everywhere("go on", rank)

    assert run_ranks(fail_at_zero, 2) == [(ZeroDivisionError, 0), (CheckpointFailed, 1)]


def test_a_tensor_on_the_host_changes_no_device() -> None:
    with on_device_of([torch.ones(1)]):
        assert torch.ones(1).device.type == "cpu"
