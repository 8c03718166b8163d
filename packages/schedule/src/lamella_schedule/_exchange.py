"""Tokens to their experts and back: the functions of a layer whose experts are spread over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Splits:
    """Rows of a microbatch and layer on their way between the ranks.

    Attributes:
        sent: Rows to each rank of the group.
        received: Rows from each rank of the group.
        group: The ranks that share the experts; None for all ranks.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]
    group: dist.ProcessGroup | None


def route(
    tokens: torch.Tensor, experts: torch.Tensor, num_experts: int, group: dist.ProcessGroup | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Splits]:
    """Sort tokens by expert, and tell each rank how many rows come: the end of a layer's `pre`.

    Rank r of the group has the experts from r * num_experts / group size on, as many as each other rank.

    Args:
        tokens: (num_tokens, width).
        experts: (num_tokens, top_k), the experts of each token, as numbers below `num_experts`.
        num_experts: Number of experts on all ranks of the group together.
        group: The ranks that share the experts; None for all ranks.

    Returns:
        Rows (num_tokens * top_k, width) to `exchange`; the local expert of each row that this rank will receive;
            the order, for `unroute`; and the splits.

    Raises:
        ValueError: The experts do not divide among the ranks.

    Effects: an all-to-all of `num_experts` integers on the group, on the current stream; the host waits for the counts.
    """
    num_ranks = dist.get_world_size(group)
    if num_experts % num_ranks:
        raise ValueError(
            f"Expected experts that divide among the {num_ranks} ranks of the group, got num_experts={num_experts}. "
            "Use a group of a size that divides."
        )
    top_k = experts.shape[-1]
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    # Each index comes once: backward adds in a fixed order, on a GPU too.
    rows = tokens.unsqueeze(1).expand(-1, top_k, -1).reshape(-1, tokens.shape[-1]).index_select(0, order)
    sent = torch.bincount(flat, minlength=num_experts)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    counts = torch.stack((sent, received)).view(2, num_ranks, -1)
    to_rank, from_rank = counts.sum(-1).tolist()  # the host waits once
    local = torch.arange(num_experts // num_ranks, device=flat.device).repeat(num_ranks)
    local = local.repeat_interleave(counts[1].flatten(), output_size=sum(from_rank))
    return rows, local, order, Splits(tuple(to_rank), tuple(from_rank), group)


def exchange(rows: torch.Tensor, splits: Splits, *, back: bool = False) -> torch.Tensor:
    """Send rows to the ranks of their experts, or back: a layer's `dispatch`, and the beginning of `combine`.

    Args:
        rows: (sum of `splits.sent`, width); with `back` (sum of `splits.received`, width).
        splits: From `route`.
        back: Return the rows of experts to the ranks of the tokens.

    Returns:
        (sum of `splits.received`, width); with `back` (sum of `splits.sent`, width).

    Effects: an all-to-all on the group, on the current stream, and another in backward.
    """
    sent, received = (splits.received, splits.sent) if back else (splits.sent, splits.received)
    exchanged = _TokenExchange.apply(rows, sent, received, splits.group)  # type: ignore[no-untyped-call]
    return cast(torch.Tensor, exchanged)


def unroute(rows: torch.Tensor, order: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Add the rows of each token, by weight, in the order of the tokens: the end of `combine`.

    Args:
        rows: (num_tokens * top_k, width), from `exchange` with `back`.
        order: From `route`.
        weights: (num_tokens, top_k), of the router.

    Returns:
        (num_tokens, width).
    """
    tokens = torch.empty_like(rows).index_copy(0, order, rows).view(*weights.shape, rows.shape[-1])
    return (tokens * weights.unsqueeze(-1).to(rows.dtype)).sum(1)


class _TokenExchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        sent: tuple[int, ...],
        received: tuple[int, ...],
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        ctx.way = sent, received, group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        sent, received, group = ctx.way
        exchanged = _TokenExchange.apply(gradient, received, sent, group)  # type: ignore[no-untyped-call]
        return exchanged, None, None, None  # by `apply`: a gradient of a gradient comes back too


def _all_to_all(
    rows: torch.Tensor, sent: tuple[int, ...], received: tuple[int, ...], group: dist.ProcessGroup | None
) -> torch.Tensor:
    into = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(into, rows.contiguous(), list(received), list(sent), group=group)
    return into
