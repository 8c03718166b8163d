"""Stand-ins for Liger's kernels of layers, on tensors without memory: the same saved tensors and allocations.

Liger's kernels need Triton, which runs on no CPU. Source of their memory: liger-kernel 0.8, `ops/rms_norm.py`,
`ops/swiglu.py` and `ops/rope.py`. A norm saves the input and a number a row, a gated product saves two factors, a
rotation works in place; backward writes into saved tensors and incoming gradients.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, cast

import torch
from torch import nn

from lamella._estimate.announced_kernels import announce_kernel

_ROTATION: Final = "apply_rotary_pos_emb"
_FACTORS: Final = ("gate_proj", "up_proj", "down_proj")


@contextmanager
def liger_operators(model: nn.Module) -> Iterator[None]:
    """Let the layers of a model of transformers save the tensors saved by Liger's kernels, in the block.

    Args:
        model: Not sharded yet. Norms and gated products are changed in place, for good.
    """
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "weight"):
            module.forward = partial(_normed, module)
        elif all(hasattr(module, name) for name in _FACTORS):
            module.forward = partial(_gated, module)
    namespace: Any = sys.modules[type(model).__module__]
    rotation: Callable[..., Any] | None = getattr(namespace, _ROTATION, None)
    if rotation is None:
        yield
        return
    setattr(namespace, _ROTATION, _rotated)
    try:
        yield
    finally:
        setattr(namespace, _ROTATION, rotation)


def _normed(module: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    return cast(torch.Tensor, _Norm.apply(hidden_states.contiguous(), module.weight))  # type: ignore[no-untyped-call]


def _gated(module: Any, x: torch.Tensor) -> torch.Tensor:
    product = _GatedProduct.apply(module.gate_proj(x), module.up_proj(x))  # type: ignore[no-untyped-call]
    return cast(torch.Tensor, module.down_proj(product))


def _rotated(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *_: object, **__: object
) -> tuple[torch.Tensor, torch.Tensor]:
    rotated = _Rotation.apply(q, k, cos, sin)  # type: ignore[no-untyped-call]
    return cast(tuple[torch.Tensor, torch.Tensor], rotated)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        scales = torch.empty(tensor.shape[:-1], dtype=torch.float32, device=tensor.device)
        context.save_for_backward(tensor, weight, scales)
        announce_kernel("rms_norm", tensor, tensor)
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)

    @staticmethod
    def backward(context: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tensor, weight, _ = context.saved_tensors
        announce_kernel("rms_norm_backward", tensor, tensor, grads[0])
        return grads[0].contiguous(), torch.empty_like(weight)


class _GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(gate, up)
        announce_kernel("swiglu", gate, up, gate)
        return torch.empty_like(gate)

    @staticmethod
    def backward(context: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = context.saved_tensors
        announce_kernel("swiglu_backward", gate, up, grads[0], gate, up)
        return gate, up


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        context.save_for_backward(cos, sin)
        announce_kernel("rotation", q, q, k, k)
        return _in_place(q), _in_place(k)

    @staticmethod
    def backward(context: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        announce_kernel("rotation_backward", grads[0], grads[0], grads[1], grads[1])
        return _in_place(grads[0]), _in_place(grads[1]), None, None


def _in_place(heads: torch.Tensor) -> torch.Tensor:
    """Return heads in their tokens' order in memory, (num_sequences, num_heads, num_tokens, head_dim)."""
    return heads.transpose(1, 2).contiguous().transpose(1, 2)
