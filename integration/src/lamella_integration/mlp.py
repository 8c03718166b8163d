"""A perceptron whose sizes divide by nothing, and are smaller than the number of ranks in places."""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

from lamella_integration.reference import ReferenceModel


class Layer(nn.Module):
    """One linear layer and its activation, and one unit."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(num_inputs, num_outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.linear(x))


class Mlp(ReferenceModel):
    """Layers of the given sizes and a linear head, which is the root unit's.

    With the default sizes a dim 0 of 13, 7, 3 and 2 is cut among 4 ranks: short last shards and empty ones.
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
