"""A perceptron of sizes that no number of ranks divides, some smaller than the number of ranks."""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

from lamella_integration.reference import ReferenceModel


class Layer(nn.Module):
    """A linear layer and its activation; one unit."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(num_inputs, num_outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.linear(x))


class Mlp(ReferenceModel):
    """Layers of the given sizes, and a linear head in the root unit.

    With the default sizes, 4 ranks shard dims 0 of 13, 7, 3 and 2: some last shards are short, some are empty.
    """

    def __init__(self, sizes: Sequence[int] = (5, 13, 7, 3, 2)) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(*pair) for pair in pairwise(sizes[:-1]))
        self.head = nn.Linear(sizes[-2], sizes[-1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        y: torch.Tensor = self.head(x)
        return y

    def units(self) -> list[nn.Module]:
        return list(self.layers)
