"""Agreement among ranks on stop requests and errors, outside of training's own collectives.

Note [All stop after the same step]
    A signal reaches some ranks, or all ranks at different times; ranks stopping after different steps would hang in
    collectives. In each step the ranks therefore all-reduce the signals received, and a signal to one rank stops every
    rank. The hosts exchange signals while gradient clipping and the optimizer step run.
"""

from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


class Agreement:
    """Exchanges stop signals once per step; see Note [All stop after the same step]."""

    def __init__(self) -> None:
        self._signum = torch.zeros(1, dtype=torch.int32)
        self._work: dist.Work | None = None

    def ask(self, signum: int) -> None:
        """Announce this rank's signal; 0 for none.

        Effects: starts an asynchronous all-reduce of one int32 on the CPU; `answer` completes the all-reduce.
        """
        self._signum.fill_(signum)
        self._work = dist.all_reduce(self._signum, op=dist.ReduceOp.MAX, async_op=True)

    def answer(self) -> int:
        """Return the largest signal announced by any rank, the same on every rank; 0 for none.

        Effects: waits for the all-reduce of `ask`, and so for the hosts of all ranks.
        """
        assert self._work is not None
        self._work.wait()
        return int(self._signum.item())


def agreed_error(error: str | None) -> str | None:
    """Return rank 0's error on every rank. Effects: collective broadcast of an object between hosts."""
    return from_first_rank(error)


def from_first_rank(value: T) -> T:
    """Return rank 0's value on every rank. Effects: collective broadcast of an object between hosts."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def agreed_failure(failure: str | None) -> str | None:
    """Return the failure of the first rank that has one, the same on every rank; None if no rank has one.

    Effects: collective all-gather of an object between hosts.
    """
    failures: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    return next((text for text in failures if text is not None), None)
