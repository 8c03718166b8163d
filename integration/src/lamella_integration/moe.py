"""A mixture of experts in plain torch, its experts spread over ranks: as a whole, and in slots for a schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lamella_schedule import LayerSlots, ModelChunk, Slot, Splits, exchange, route, unroute

WIDTH, VOCABULARY = 8, 16
Values = tuple[Any, ...]


class DelayedLinear(nn.Module):
    """A linear layer without a bias, for one expert or for several; `backward_dw` computes the weight gradient.

    Args:
        shape: Shape of the weight: (out, in), or (experts, out, in).
        is_delayed: Whether backward leaves the weight gradient to `backward_dw`.
    """

    def __init__(self, *shape: int, is_delayed: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape) * 0.4)
        self.is_delayed = is_delayed
        self.on_gradient: Callable[[], None] = lambda: None
        self.queue: list[tuple[torch.Tensor, ...]] = []

    def forward(self, x: torch.Tensor, one_hot: torch.Tensor | None = None) -> torch.Tensor:
        """Map rows (..., in) to (..., out); `one_hot` (experts, num_rows, 1) chooses the expert of a row."""
        if not self.is_delayed:
            return _linear(x, self.weight, one_hot)
        output: torch.Tensor = _DelayedProduct.apply(x, self.weight, one_hot, self)  # type: ignore[no-untyped-call]
        return output

    def backward_dw(self) -> None:
        """Compute the weight gradient of the oldest backward."""
        x, gradient, *one_hot = self.queue.pop(0)
        weight_gradient = (
            gradient.flatten(0, -2).T @ x.flatten(0, -2) if not one_hot else (gradient * one_hot[0]).mT @ x
        )
        self.weight.grad = weight_gradient if self.weight.grad is None else self.weight.grad + weight_gradient
        self.on_gradient()


def _linear(x: torch.Tensor, weight: torch.Tensor, one_hot: torch.Tensor | None) -> torch.Tensor:
    return x @ weight.T if one_hot is None else ((x @ weight.mT) * one_hot).sum(0)


class _DelayedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, one_hot: torch.Tensor | None, layer: DelayedLinear
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, *(() if one_hot is None else (one_hot,)))
        ctx.layer = layer
        return _linear(x, weight, one_hot)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, *one_hot = ctx.saved_tensors
        ctx.layer.queue.append((x.detach(), gradient, *one_hot))
        into = gradient @ weight if not one_hot else ((gradient * one_hot[0]) @ weight).sum(0)
        return into, None, None, None


class MoELayer(nn.Module):
    """A norm, a linear layer as attention, a router of two experts a token, and maybe a shared expert."""

    def __init__(
        self, num_experts: int, group: dist.ProcessGroup | None, *, has_shared: bool, is_delayed: bool, width: int
    ) -> None:
        super().__init__()
        self.num_experts, self.group = num_experts, group
        self.norm = nn.LayerNorm(width)
        self.attention = DelayedLinear(width, width, is_delayed=is_delayed)
        self.router = nn.Linear(width, num_experts)
        self.shared = DelayedLinear(width, width, is_delayed=is_delayed) if has_shared else None
        self.experts = DelayedLinear(num_experts, width, width, is_delayed=is_delayed)
        num_local = num_experts // dist.get_world_size(group)
        first = dist.get_rank(group) * num_local
        self.experts.weight = nn.Parameter(self.experts.weight.detach()[first : first + num_local].clone())

    def pre(self, x: torch.Tensor) -> Values:
        residual = x + torch.tanh(self.attention(self.norm(x)))
        weights, experts = torch.softmax(self.router(residual), -1).topk(2)
        rows, local, order, splits = route(residual, experts, self.num_experts, self.group)
        if self.shared is not None:
            residual = residual + torch.tanh(self.shared(residual))
        return rows, local, order, weights, residual, splits

    def dispatch(self, rows: torch.Tensor, *passed: Any) -> Values:
        return exchange(rows, passed[-1]), *passed

    def compute(self, rows: torch.Tensor, local: torch.Tensor, *passed: Any) -> Values:
        one_hot = F.one_hot(local, len(self.experts.weight)).T.unsqueeze(-1).to(rows.dtype)
        return torch.tanh(self.experts(rows, one_hot)), *passed

    def combine(
        self, rows: torch.Tensor, order: torch.Tensor, weights: torch.Tensor, residual: torch.Tensor, splits: Splits
    ) -> torch.Tensor:
        return residual + unroute(exchange(rows, splits, back=True), order, weights)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.combine(*self.compute(*self.dispatch(*self.pre(x))))

    def slots(self) -> LayerSlots:
        return LayerSlots(
            pre=self.pre,
            dispatch=self.dispatch,
            experts=self.compute,
            combine=self.combine,
            delayed={Slot.PRE: self._pre_dw, Slot.EXPERTS: self.experts.backward_dw} if self.experts.is_delayed else {},
        )

    def _pre_dw(self) -> None:
        self.attention.backward_dw()
        if self.shared is not None:
            self.shared.backward_dw()


class MoE(nn.Module):
    """Embedding, layers, a final norm in the last layer's combine, output layer and loss."""

    def __init__(
        self,
        num_layers: int = 3,
        num_experts: int = 4,
        group: dist.ProcessGroup | None = None,
        *,
        has_shared: bool = False,
        is_delayed: bool = False,
        width: int = WIDTH,
    ) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(
            MoELayer(num_experts, group, has_shared=has_shared, is_delayed=is_delayed, width=width)
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, VOCABULARY)

    def loss(self, x: torch.Tensor, tokens: torch.Tensor, scale: float) -> torch.Tensor:
        return F.cross_entropy(self.output(x)[:-1], tokens[1:]) * scale

    def forward(self, tokens: torch.Tensor, scale: float) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.loss(self.norm(x), tokens, scale)

    def chunk(self, tokens: torch.Tensor, scale: float) -> ModelChunk:
        layers = [layer.slots() for layer in self.layers]  # type: ignore[operator]
        last = layers[-1]
        # The outermost unit's norm is read, and its gradient made, on the communication stream.
        layers[-1] = LayerSlots(
            pre=last.pre,
            dispatch=last.dispatch,
            experts=last.experts,
            combine=lambda *values: self.norm(last.combine(*values)),
            delayed=last.delayed,
        )
        return ModelChunk(
            preprocess=lambda: self.embedding(tokens),
            layers=layers,
            postprocess=lambda x: self.loss(x, tokens, scale),
        )

    def finish_delayed(self) -> None:
        """Compute the weight gradients that a plain backward has left."""
        for module in self.modules():
            if isinstance(module, DelayedLinear) and module.queue:
                module.backward_dw()
