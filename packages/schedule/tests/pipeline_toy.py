"""A model of one layer a stage, and its stages as chunks for a pipeline."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from moe_toy import VOCABULARY, WIDTH, DelayedLinear
from torch import nn

from lamella_schedule import LayerSlots, ModelChunk, Slot

TOKENS = 6


class StageLayer(nn.Module):
    """Two linear layers in two slots, with or without delayed weight gradients, and norms without a delay."""

    def __init__(self, is_delayed: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = DelayedLinear(is_delayed)
        self.mlp = DelayedLinear(is_delayed)

    def pre(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.attention(self.norm(x)))

    def experts(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.mlp(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(self.pre(x))

    def slots(self) -> LayerSlots:
        delayed = {Slot.PRE: self.attention.backward_dw, Slot.EXPERTS: self.mlp.backward_dw}
        return LayerSlots(pre=self.pre, experts=self.experts, delayed=delayed if self.mlp.is_delayed else {})


class StagedModel(nn.Module):
    """Embedding, a layer a stage, output layer and loss; positions go along between the stages, without a gradient."""

    def __init__(self, num_stages: int, *, is_delayed: bool) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(StageLayer(is_delayed) for _ in range(num_stages))
        self.output = nn.Linear(WIDTH, VOCABULARY)

    def loss(self, x: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor, scale: float) -> torch.Tensor:
        return F.cross_entropy(self.output(x)[:-1], tokens[positions[1:]]) * scale

    def forward(self, tokens: torch.Tensor, scale: float) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.loss(x, torch.arange(TOKENS), tokens, scale)

    def stage(self, stage: int, tokens: torch.Tensor, scale: float) -> ModelChunk:
        """A stage on a microbatch: the layer of its index, with the embedding or the loss at the ends."""
        layer = self.layers[stage].slots()  # type: ignore[operator]
        first, last = stage == 0, stage == len(self.layers) - 1
        positions: list[torch.Tensor] = []

        def enter(x: torch.Tensor, along: torch.Tensor) -> torch.Tensor:
            positions.append(along)
            return x

        def start() -> torch.Tensor:
            positions.append(torch.arange(TOKENS))
            out: torch.Tensor = self.embedding(tokens)
            return out

        def leave(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x, positions[0]

        def end(x: torch.Tensor) -> torch.Tensor:
            return self.loss(x, positions[0], tokens, scale)

        return ModelChunk(start if first else enter, [layer], end if last else leave)

    def of_stages(self, stages: tuple[int, ...]) -> list[nn.Parameter]:
        """The parameters that a rank of these stages trains."""
        modules: list[nn.Module] = [self.layers[stage] for stage in stages]
        modules += [self.embedding] if 0 in stages else []
        modules += [self.output] if len(self.layers) - 1 in stages else []
        return [parameter for module in modules for parameter in module.parameters()]

    def finish_delayed(self) -> None:
        """The weight gradients that a plain backward has left."""
        for module in self.modules():
            if isinstance(module, DelayedLinear) and module.store:
                module.backward_dw()


BORDERS = (torch.empty(TOKENS, WIDTH, device="meta"), torch.empty(TOKENS, dtype=torch.long, device="meta"))


def microbatches(step: int, num: int) -> list[torch.Tensor]:
    """Runs of consecutive tokens, which a model can learn to continue."""
    generator = torch.Generator().manual_seed(step)
    return list((torch.randint(VOCABULARY, (num, 1), generator=generator) + torch.arange(TOKENS)) % VOCABULARY)
