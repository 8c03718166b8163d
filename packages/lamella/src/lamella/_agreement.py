"""What the ranks agree on outside of training's own collectives.

Note [All stop after the same step]
    A signal reaches some ranks, or all at different times. So every rank tells the others in each step which signal it
    has got, and one rank's is every rank's. The hosts exchange that beside the clipping and the optimizer's step.
"""

import torch
import torch.distributed as dist


class Agreement:
    """Asks all ranks once a step; see Note [All stop after the same step]."""

    def __init__(self) -> None:
        self._signum = torch.zeros(1, dtype=torch.int32)
        self._work: dist.Work | None = None

    def ask(self, signum: int) -> None:
        """Tell the others which signal this rank has got; 0 for none. Effects: begins a collective of the host's."""
        self._signum.fill_(signum)
        self._work = dist.all_reduce(self._signum, op=dist.ReduceOp.MAX, async_op=True)

    def answer(self) -> int:
        """A signal that some rank has got; 0 for none. The same on every rank. Effects: waits for the other hosts."""
        assert self._work is not None
        self._work.wait()
        return int(self._signum.item())


def agreed_error(error: str | None) -> str | None:
    """The first rank's error, on every rank. Effects: collective of the host's."""
    told = [error]
    dist.broadcast_object_list(told)
    return told[0]
