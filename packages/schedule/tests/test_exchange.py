"""Tokens go to the ranks of their experts and back, and gradients go the same way."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lamella_schedule import exchange, route, unroute
from lamella_testing import run_ranks

NUM_TOKENS, NUM_EXPERTS, WIDTH = 7, 4, 3


def _through(
    scale_of: torch.Tensor, tokens: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    rows, local, order, splits = route(tokens, experts, NUM_EXPERTS)
    first = dist.get_rank() * NUM_EXPERTS // dist.get_world_size()
    rows = exchange(rows, splits)
    assert rows.shape == (sum(splits.received), WIDTH)
    return unroute(exchange(rows * scale_of[first + local].unsqueeze(-1), splits, back=True), order, weights)


@pytest.mark.parametrize("favours_one", [False, True], ids=["spread", "all to one expert"])
def test_each_expert_has_the_rows_routed_to_it(favours_one: bool) -> None:
    def on_each_rank() -> None:
        torch.manual_seed(dist.get_rank())
        tokens = torch.randn(NUM_TOKENS, WIDTH, requires_grad=True)
        logits = torch.randn(NUM_TOKENS, NUM_EXPERTS)
        if favours_one:
            logits[:, :2] += 100  # the other rank receives nothing
        weights, experts = logits.softmax(-1).topk(2)
        weights.requires_grad_()
        scale_of = torch.tensor([1.0, 2.0, 3.0, 4.0])
        out = _through(scale_of, tokens, experts, weights)
        expected = tokens * (weights * scale_of[experts]).sum(-1, keepdim=True)
        torch.testing.assert_close(out, expected)
        seed = torch.randn_like(out)
        gradients = torch.autograd.grad(out, (tokens, weights), seed)
        torch.testing.assert_close(gradients, torch.autograd.grad(expected, (tokens, weights), seed))

    run_ranks(on_each_rank, 2)


def test_a_rank_without_tokens_exchanges_the_rows_of_other_ranks() -> None:
    def on_each_rank() -> None:
        torch.manual_seed(dist.get_rank())
        num_tokens = 0 if dist.get_rank() == 0 else NUM_TOKENS
        tokens = torch.randn(num_tokens, WIDTH, requires_grad=True)
        weights, experts = torch.randn(num_tokens, NUM_EXPERTS).softmax(-1).topk(2)
        scale_of = torch.tensor([1.0, 2.0, 3.0, 4.0])
        out = _through(scale_of, tokens, experts, weights)
        factors = (weights * scale_of[experts]).sum(-1, keepdim=True)
        torch.testing.assert_close(out, tokens * factors)
        out.sum().backward()  # type: ignore[no-untyped-call]
        torch.testing.assert_close(tokens.grad, factors.expand_as(tokens))

    run_ranks(on_each_rank, 2)


def test_a_second_derivative_goes_through_the_exchanges() -> None:
    def on_each_rank() -> None:
        torch.manual_seed(dist.get_rank())
        tokens = torch.randn(NUM_TOKENS, WIDTH, requires_grad=True)
        weights, experts = torch.randn(NUM_TOKENS, NUM_EXPERTS).softmax(-1).topk(2)
        scale_of = torch.tensor([1.0, 2.0, 3.0, 4.0])
        gradients = []
        for out in (_through(scale_of, tokens, experts, weights), tokens * (weights * scale_of[experts]).sum(-1, True)):
            (first,) = torch.autograd.grad(out.pow(3).sum(), tokens, create_graph=True)
            gradients.append(torch.autograd.grad(first.square().sum(), tokens))
        torch.testing.assert_close(*gradients)

    run_ranks(on_each_rank, 2)


def test_experts_that_do_not_divide_are_refused() -> None:
    def on_each_rank() -> None:
        with pytest.raises(ValueError, match=r"divide among the 2 ranks of the group, got num_experts=3"):
            route(torch.randn(2, WIDTH), torch.zeros(2, 1, dtype=torch.long), 3)

    run_ranks(on_each_rank, 2)
