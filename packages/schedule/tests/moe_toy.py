"""A mixture of experts in plain torch, its experts spread over the ranks, as a whole and in slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lamella_schedule import LayerSlots, ModelChunk, Slot, Splits, exchange

WIDTH, VOCABULARY, TOKENS = 8, 16, 12


class DelayedLinear(nn.Module):
    """A linear layer whose backward leaves the weight gradient to `backward_dw`, if it is told to."""

    def __init__(self, is_delayed: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)
        self.is_delayed = is_delayed
        self.store: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_delayed:
            return F.linear(x, self.weight)
        output: torch.Tensor = _InputGradient.apply(x, self.weight, self.store)  # type: ignore[no-untyped-call]
        return output

    def backward_dw(self) -> None:
        x, gradient = self.store.pop(0)
        weight_gradient = gradient.t() @ x
        self.weight.grad = weight_gradient if self.weight.grad is None else self.weight.grad + weight_gradient


class _InputGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, store: list[Any]) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.store = store
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        x, weight = ctx.saved_tensors
        ctx.store.append((x, gradient))
        return gradient @ weight, None, None


class MoELayer(nn.Module):
    """Attention's stand-in, a router of one expert a token, one expert a rank, a residual over the whole."""

    def __init__(self, is_delayed: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = DelayedLinear(is_delayed)
        self.router = nn.Linear(WIDTH, dist.get_world_size())
        torch.manual_seed(100 + dist.get_rank())  # an expert of this rank's own
        self.expert = DelayedLinear(is_delayed)
        torch.manual_seed(7)

    def pre(self, x: torch.Tensor) -> tuple[object, ...]:
        residual = x + torch.tanh(self.attention(self.norm(x)))
        weights = torch.softmax(self.router(residual), -1)
        weight, expert = weights.max(-1)
        by_expert = expert.argsort(stable=True)
        sent = torch.bincount(expert, minlength=dist.get_world_size())
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        splits = Splits(tuple(sent.tolist()), tuple(received.tolist()), None)
        return residual[by_expert], weight, residual, by_expert, splits

    def dispatch(self, rows: torch.Tensor, *passed: Any) -> tuple[object, ...]:
        return exchange(rows, passed[-1]), *passed

    def experts(self, rows: torch.Tensor, *passed: Any) -> tuple[object, ...]:
        return torch.tanh(self.expert(rows)), *passed

    def combine(
        self, rows: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, by_expert: torch.Tensor, splits: Splits
    ) -> torch.Tensor:
        back = exchange(rows, splits, back=True)
        tokens = torch.empty_like(back).index_copy(0, by_expert, back)
        return residual + tokens * weight[:, None]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.combine(*self.experts(*self.dispatch(*self.pre(x))))  # type: ignore[arg-type]

    def slots(self) -> LayerSlots:
        delayed: dict[Slot, Callable[[], object]] = {
            Slot.PRE: self.attention.backward_dw,
            Slot.EXPERTS: self.expert.backward_dw,
        }
        return LayerSlots(
            pre=self.pre,
            dispatch=self.dispatch,
            experts=self.experts,
            combine=self.combine,
            delayed=delayed if self.expert.is_delayed else {},
        )


class DenseLayer(nn.Module):
    """A layer without experts: two slots."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Linear(WIDTH, WIDTH)

    def pre(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.attention(x))

    def experts(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.mlp(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(self.pre(x))

    def slots(self) -> LayerSlots:
        return LayerSlots(pre=self.pre, experts=self.experts)


class Model(nn.Module):
    """Embedding, layers by pattern (E: experts, -: dense), output layer and loss."""

    def __init__(self, pattern: str = "EEE", *, is_delayed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(MoELayer(is_delayed) if symbol == "E" else DenseLayer() for symbol in pattern)
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY)

    def loss(self, x: torch.Tensor, tokens: torch.Tensor, scale: float) -> torch.Tensor:
        return F.cross_entropy(self.output(self.norm(x))[:-1], tokens[1:]) * scale

    def forward(self, tokens: torch.Tensor, scale: float) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.loss(x, tokens, scale)

    def chunk(self, tokens: torch.Tensor, scale: float) -> ModelChunk:
        return ModelChunk(
            preprocess=lambda: self.embedding(tokens),
            layers=[layer.slots() for layer in self.layers],  # type: ignore[operator]
            postprocess=lambda x: self.loss(x, tokens, scale),
        )

    def finish_delayed(self) -> None:
        """The weight gradients that a plain backward has left, in the order of the microbatches."""
        for module in self.modules():
            if isinstance(module, DelayedLinear) and module.store:
                module.backward_dw()


def microbatches(step: int, num: int) -> list[torch.Tensor]:
    """Runs of consecutive tokens, which a model can learn to continue."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    starts = torch.randint(VOCABULARY, (num, 1), generator=generator)
    return list((starts + torch.arange(TOKENS)) % VOCABULARY)
