"""Layers that add the weight's gradient to a given buffer, like fused kernels."""

from __future__ import annotations

from typing import Any

import torch
from engine_models import Net
from torch import nn

from lamella_engine import set_main_grads

DIM = 8


class FusedLinear(nn.Linear):
    """Adds the weight's gradient to `main_grad` and returns a dummy, like fused kernels; or is an ordinary layer."""

    fuses = False
    asks = True  # for the buffer, rather than read the attribute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.fuses:
            return super().forward(x)
        fused: torch.Tensor = _FusedProduct.apply(x, self.weight, self.bias, self.asks)  # type: ignore[no-untyped-call]
        return fused


class _FusedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, bias: torch.Tensor, asks: bool) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        ctx.get = weight.get_main_grad if asks and weight.__fsdp_param__ else lambda: weight.main_grad
        output: torch.Tensor = x @ weight.detach().T + bias
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        if not ctx.needs_input_grad[1]:
            return gradient @ weight, None, gradient.sum(0), None
        buffer: torch.Tensor = ctx.get()
        weight_gradient = (gradient.T @ x).to(buffer.dtype)
        if weight.overwrite_main_grad:
            buffer.copy_(weight_gradient)
        else:
            buffer.add_(weight_gradient)
        weight.grad_added_to_main_grad = True
        dummy = torch.full_like(weight, 99.0)
        if getattr(weight, "zero_out_wgrad", False):
            dummy.zero_()
        return gradient @ weight, dummy, gradient.sum(0), None


class FusedBlock(nn.Module):
    """Two weights with gradients in buffers, one weight without, and biases."""

    def __init__(self) -> None:
        super().__init__()
        self.up = FusedLinear(DIM, 13)
        self.plain = nn.Linear(13, 13)
        self.down = FusedLinear(13, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        update: torch.Tensor = self.down(torch.tanh(self.plain(self.up(x))))
        return x + update


class FusedNet(Net):
    def __init__(self) -> None:
        super().__init__(num_layers=2, dim=DIM)

    def make_layer(self, dim: int) -> nn.Module:
        return FusedBlock()


def fuse(module: nn.Module, *, asks: bool = True) -> None:
    """Make a sharded unit's fused layers use the unit's buffers."""
    fused = [layer for layer in module.modules() if isinstance(layer, FusedLinear)]
    set_main_grads(module, [layer.get_parameter("weight") for layer in fused])
    for layer in fused:
        layer.fuses, layer.asks = True, asks
