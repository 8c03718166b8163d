"""Rows of a head's input, shared out among ranks that work on the same tokens.

Note [Each rank's rows of a head]
    Ranks of tensor parallelism have equal hidden states before the head. Each computes the logits of its part of the
    rows, so the head costs a rank 1 / N of the products, and no row of logits exists twice. The sum of the ranks'
    losses is the loss, and the gradients of the head's weight are parts of a sum, which a mean over all ranks divides
    by N: so a rank's loss has N times the gradient. The gradients of the ranks' rows together, divided by N again,
    are the gradient of the hidden states, equal on each rank as those of all other activations.
"""

from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F

# torch 2.13 has a new name, and the former one warns.
_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor


class SharedRows:
    """The rows of this rank; see Note [Each rank's rows of a head].

    Args:
        group: The ranks with equal rows.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._num_ranks, self._rank = group, dist.get_world_size(group), dist.get_rank(group)

    def of(self, rows: torch.Tensor, padding: float = 0.0) -> torch.Tensor:
        """Return this rank's rows, as many on each rank, with padding behind the last; not differentiable.

        Args:
            rows: (num_rows, *sizes), equal on all ranks.
            padding: Fills rows behind the last.
        """
        share = -(-rows.shape[0] // self._num_ranks)
        start = self._rank * share
        part = rows[start : start + share]
        missing = share - part.shape[0]
        return part if not missing else F.pad(part, [0, 0] * (rows.ndim - 1) + [0, missing], value=padding)

    def share(self, rows: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows, differentiable. Effects: in backward an all-gather over the ranks."""
        return cast(torch.Tensor, _RowsOfRank.apply(rows, self))  # type: ignore[no-untyped-call]

    def sum(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' 0-D losses, with the gradient of the note. Effects: an all-reduce."""
        return cast(torch.Tensor, _Sum.apply(loss, self))  # type: ignore[no-untyped-call]

    def gathered(self, part: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Return the rows of all ranks, (num_rows, *sizes). Effects: an all-gather over the ranks."""
        rows = part.new_empty((self._num_ranks * part.shape[0], *part.shape[1:]))
        _all_gather(rows, part.contiguous(), group=self._group)
        return rows[:num_rows]

    def added(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks. Effects: an all-reduce over the ranks."""
        total = loss.clone()
        dist.all_reduce(total, group=self._group)
        return total

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return self._num_ranks


class _RowsOfRank(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, rows: torch.Tensor, shared: SharedRows) -> torch.Tensor:
        context.shared, context.num_rows = shared, rows.shape[0]
        return shared.of(rows)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        shared: SharedRows = context.shared
        return shared.gathered(gradient, context.num_rows) / shared.num_ranks, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, loss: torch.Tensor, shared: SharedRows) -> torch.Tensor:
        context.num_ranks = shared.num_ranks
        return shared.added(loss)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * context.num_ranks, None
