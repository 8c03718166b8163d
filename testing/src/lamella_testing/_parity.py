"""Sharded training against unsharded training, for any model and any sharding."""

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from lamella_testing._ranks import run_ranks

M = TypeVar("M", bound=nn.Module)


def assert_trains_as_unsharded(
    make_model: Callable[[], M],
    shard: Callable[[M], object],
    loss_of: Callable[[M, torch.Tensor], torch.Tensor],
    batch: torch.Tensor,
    *,
    num_ranks: int = 2,
    num_steps: int = 4,
    eps: float = 1e-8,
) -> None:
    """Assert equal training by ranks with a share of the batch each and by a single process with the whole batch.

    Args:
        make_model: Builds the model, in fp32, with the same weights on every call.
        shard: Shards the model in place.
        loss_of: Returns the mean loss of a model on some rows of the batch, 0-D.
        batch: (num_rows, ...), divided over the ranks along dim 0; `num_ranks` must divide num_rows.
        num_ranks: Number of ranks to shard over.
        num_steps: Number of AdamW steps.
        eps: AdamW's. Of gradients below it rounding decides no step: models of many weights have some near zero.

    Raises:
        AssertionError: Losses differ by more than 1e-5 relative; weights by more than a hundredth of a step; or the
            loss fell by less than 0.1, since equal losses without learning prove nothing.

    Effects: forks ranks (gloo), twice.
    """

    def train(prepare: Callable[[M], object]) -> tuple[list[float], dict[str, torch.Tensor]]:
        model = make_model()
        prepare(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=eps)
        mine = batch.chunk(dist.get_world_size())[dist.get_rank()]
        losses = []
        for _ in range(num_steps):
            loss = loss_of(model, mine)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(total := loss.detach() / dist.get_world_size())
            losses.append(total.item())
        return losses, {name: _unsharded(parameter) for name, parameter in model.named_parameters()}

    [(losses, weights)] = run_ranks(lambda: train(lambda _: None), 1)
    assert losses[-1] < losses[0] - 0.1, f"nothing was learned: {losses}"
    for sharded_losses, sharded_weights in run_ranks(lambda: train(shard), num_ranks):
        torch.testing.assert_close(sharded_losses, losses, rtol=1e-5, atol=0)
        # Adam divides by the gradient's size: for gradients near zero, rounding decides the step. atol is 1e-2 steps.
        torch.testing.assert_close(sharded_weights, weights, rtol=1e-5, atol=1e-4)


def _unsharded(parameter: torch.Tensor) -> torch.Tensor:
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()
