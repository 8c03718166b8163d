"""Linears with the attributes and the order of events of Transformer Engine's, in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class GroupedLinear(nn.Module):
    """Several linears over equal parts of the rows; one is a plain linear.

    Transformer Engine's `Linear` is the same with a weight named `weight`, and both of its options act alike:
    `fuse_wgrad_accumulation` adds to `main_grad`, and `delay_wgrad_compute` leaves gradients of weights and biases to
    `backward_dw`.
    """

    def __init__(self, num_gemms: int, width: int, *, fuse: bool = False, delay: bool = False) -> None:
        super().__init__()
        self.fuse_wgrad_accumulation, self.delays, self.num_gemms = fuse, delay, num_gemms
        self._stored: list[Callable[[], None]] = []
        self._hooks: list[Callable[[], None]] = []
        for i in range(num_gemms):
            self.register_parameter(f"weight{i}", nn.Parameter(torch.randn(width, width) / width**0.5))
            self.register_parameter(f"bias{i}", nn.Parameter(torch.zeros(width)))
        if delay:
            for parameter in self.parameters():
                parameter.skip_backward_post_hook = True  # type: ignore[attr-defined]

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        self._hooks.append(hook)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = [self.get_parameter(f"weight{i}") for i in range(self.num_gemms)]
        biases = [self.get_parameter(f"bias{i}") for i in range(self.num_gemms)]
        output: torch.Tensor = _GroupedProduct.apply(self, x, *weights, *biases)  # type: ignore[no-untyped-call]
        return output

    @torch.no_grad()
    def backward_dw(self) -> None:
        """Compute the gradients left by the oldest backward."""
        self._stored.pop(0)()
        for hook in self._hooks:
            hook()


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: GroupedLinear, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        n = layer.num_gemms
        ctx.layer, ctx.weights, ctx.biases = layer, parameters[:n], parameters[n:]
        ctx.save_for_backward(x)
        if layer.fuse_wgrad_accumulation:
            # The attribute is looked for in forward, and the function is called in backward.
            asks = [hasattr(weight, "__fsdp_param__") for weight in ctx.weights]
            ctx.buffers = [
                w.get_main_grad if ask else lambda w=w: w.main_grad for w, ask in zip(ctx.weights, asks, strict=True)
            ]
        chunks = zip(x.chunk(n), ctx.weights, ctx.biases, strict=True)
        return torch.cat([rows @ weight.detach().T + bias.detach() for rows, weight, bias in chunks])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        layer, n = ctx.layer, ctx.layer.num_gemms
        (x,), parts = ctx.saved_tensors, gradient.chunk(ctx.layer.num_gemms)
        inputs = torch.cat([part @ weight for part, weight in zip(parts, ctx.weights, strict=True)])
        pairs = list(zip(parts, x.chunk(n), strict=True))
        buffers: list[torch.Tensor | None] = [None] * n
        if layer.fuse_wgrad_accumulation:
            buffers = [buffer() for buffer in ctx.buffers]
            for weight, buffer in zip(ctx.weights, buffers, strict=True):
                weight.main_grad = buffer

        def weight_gradients() -> list[torch.Tensor | None]:
            gradients_of_weights: list[torch.Tensor | None] = []
            for (part, rows), weight, buffer in zip(pairs, ctx.weights, buffers, strict=True):
                if buffer is None:
                    gradients_of_weights.append(part.T @ rows)
                    continue
                product = (part.T @ rows).to(buffer.dtype)
                buffer.copy_(product) if weight.overwrite_main_grad else buffer.add_(product)
                gradients_of_weights.append(None)
            return gradients_of_weights

        dummies: list[torch.Tensor | None] = [None] * n
        if layer.fuse_wgrad_accumulation:
            for i, weight in enumerate(ctx.weights):
                weight.grad_added_to_main_grad = True
                dummies[i] = torch.full_like(weight, 99.0)
        if not layer.delays:
            gradients_of_weights = weight_gradients()
            return (
                None,
                inputs,
                *(dummies if layer.fuse_wgrad_accumulation else gradients_of_weights),
                *(part.sum(0) for part in parts),
            )

        def later() -> None:
            for weight, weight_gradient in zip(ctx.weights, weight_gradients(), strict=True):
                if weight_gradient is not None:
                    weight.grad = weight_gradient
            for bias, part in zip(ctx.biases, parts, strict=True):
                if bias.grad is None:
                    bias.grad = part.sum(0)

        layer._stored.append(later)
        return None, inputs, *dummies, *[None] * n
