"""Models with modules that read parameters below without a call, and the models' sharding after declarations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from engine_models import Net, inputs, mean_square
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from lamella_engine import declare_reads, fully_shard
from lamella_engine.testing import named_units, record

X = inputs()
LOSS = mean_square(lambda model: model(X))


class _Kernel(torch.autograd.Function):
    """A fused kernel: takes weights as arguments, and reads the weights again in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        assert not isinstance(weight, DTensor)
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, weight = ctx.saved_tensors
        assert weight.untyped_storage().nbytes() > 0, "the weight is not there in backward"
        return gradient @ weight, gradient.T @ x, gradient.sum(0)


class Mixer(nn.Module):
    """Reads the weights of a convolution (of width one) without a call."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv1d = nn.Linear(dim, dim)
        self.gate = nn.Parameter(torch.full((dim,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = _Kernel.apply(x, self.conv1d.weight, self.conv1d.bias)  # type: ignore[no-untyped-call]
        return self.gate * mixed


class CallingMixer(Mixer):
    """Reads the weights, and calls the convolution too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = super().forward(x) + self.conv1d(x)
        return out


class MixerBlock(nn.Module):
    def __init__(self, dim: int, mixer: Callable[[int], nn.Module] = Mixer) -> None:
        super().__init__()
        self.up = nn.Linear(dim, dim)
        self.mixer = mixer(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.mixer(torch.tanh(self.up(x)))
        return out


class MixerNet(Net):
    def make_layer(self, dim: int) -> nn.Module:
        return MixerBlock(dim)


class CallingModel(Net):
    def make_layer(self, dim: int) -> nn.Module:
        return MixerBlock(dim, CallingMixer)


class RecomputedMixers(Net):
    use_reentrant = False

    def make_layer(self, dim: int) -> nn.Module:
        return MixerBlock(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = cast(torch.Tensor, checkpoint(layer, x, use_reentrant=self.use_reentrant))
        head: torch.Tensor = self.head(x)
        return head


class MixersRecomputedByReentry(RecomputedMixers):
    use_reentrant = True


class RecomputedInside(Net):
    """The recomputed part is inside the unit."""

    def make_layer(self, dim: int) -> nn.Module:
        class InsideMixer(MixerBlock):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                mixed = checkpoint(self.mixer, torch.tanh(self.up(x)), use_reentrant=False)
                return x + cast(torch.Tensor, mixed)

        return InsideMixer(dim)


def mixers_of(model: nn.Module) -> Iterator[Mixer]:
    return (module for module in model.modules() if isinstance(module, Mixer))


def convs_of(model: nn.Module) -> list[nn.Linear]:
    return [mixer.conv1d for mixer in mixers_of(model)]


def shard_declared(model: Any, *, inner: dict[str, Any] | None = None, **options: Any) -> Any:
    """Units are every convolution, every block, and the model; mixers, which are no units, declare their reads."""
    for mixer in mixers_of(model):
        declare_reads(mixer, "conv1d.*")
        fully_shard(mixer.conv1d, **(options if inner is None else inner))
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


OWN_UNITS = ["root", "layers.0", "layers.1", "layers.2"]


def units_by_name(model: nn.Module) -> dict[str, Any]:
    """The units by the names of their own modules."""
    return {unit.parameters.name or "root": unit for _, unit in named_units(model)}


def record_by_name(model: nn.Module) -> Any:
    log = record(model)
    for name, unit in units_by_name(model).items():
        for group in unit.parameters.groups:
            group.transports.shard._name = name  # the last module of a unit, a read one, gave the name
    return log
