"""Models that are recomputed in backward, by either kind of activation checkpointing."""

from __future__ import annotations

import pytest
import torch
from engine_models import Net, Residual
from torch import nn
from torch.utils.checkpoint import checkpoint

KINDS = [pytest.param(True, id="reentrant"), pytest.param(False, id="not reentrant")]


class RecomputedUnits(Net):
    """Each unit is recomputed as a whole."""

    reentrant: bool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        head: torch.Tensor = self.head(x)
        return head


class RecomputedResidual(Residual):
    reentrant: bool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(super().forward, x, use_reentrant=self.reentrant)
        return out


class RecomputedInsides(Net):
    """Each unit recomputes its own inside."""

    reentrant: bool

    def make_layer(self, dim: int) -> nn.Module:
        layer = RecomputedResidual(dim)
        layer.reentrant = self.reentrant
        return layer


class Several(Net):
    """Two units are recomputed as one."""

    reentrant: bool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(lambda x: self.layers[1](self.layers[0](x)), self.stem(x), use_reentrant=self.reentrant)
        head: torch.Tensor = self.head(self.layers[2](x))
        return head


def recomputing_net(model: type[Net], reentrant: bool) -> type[Net]:
    return type(model.__name__, (model,), {"reentrant": reentrant})
