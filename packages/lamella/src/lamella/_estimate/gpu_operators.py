"""Operators that save other tensors for backward on GPUs than on CPUs, on tensors without memory.

An estimate runs on CPU tensors, since a torch without CUDA has no autograd for tensors of a GPU. Four operators differ:

* `rms_norm`: a CPU saves fp32 copies of the input, by smaller operators; CUDA's kernel saves a number a row.
* Attention of a piece of a sequence: a CPU saves a mask; flash attention counts from the last key.
* Products of float8 matrices: a CPU multiplies in fp32; a GPU's kernel reads and saves the codes.
* Weights encoded in float8: a CPU makes fp32 copies; a GPU's kernel writes the codes alone.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import CausalBias

from lamella._estimate.announced_kernels import announce_kernel
from lamella_precision import assume_float8_kernels


@contextmanager
def gpu_operators(device_type: str) -> Iterator[None]:
    """Let operators in the block save what they save on a device: "cuda" or "cpu"."""
    if device_type != "cuda":
        yield
        return
    originals = torch.rms_norm, F.scaled_dot_product_attention
    # A mode of torch would miss the layers that backward runs again: autograd leaves all modes.
    torch.rms_norm = _rms_norm  # type: ignore[assignment]
    F.scaled_dot_product_attention = partial(_attention, F.scaled_dot_product_attention)
    try:
        with assume_float8_kernels():
            yield
    finally:
        torch.rms_norm, F.scaled_dot_product_attention = originals


def _attention(
    original: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> torch.Tensor:
    if isinstance(attn_mask, CausalBias):  # values differ, bytes do not
        attn_mask, is_causal = None, True
    return original(query, key, value, attn_mask, dropout_p, is_causal, **options)


def _rms_norm(
    tensor: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    if weight is not None and weight.dtype != tensor.dtype:  # CUDA's kernel is for one dtype.
        return torch._C._VariableFunctions.rms_norm(tensor, normalized_shape, weight, eps)
    return cast(torch.Tensor, _FusedRmsNorm.apply(tensor, len(normalized_shape), weight))  # type: ignore[no-untyped-call]


class _FusedRmsNorm(torch.autograd.Function):
    """The shapes of `aten._fused_rms_norm` and its backward in CUDA: no values."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, num_dims: int, weight: torch.Tensor | None) -> torch.Tensor:
        rows = (*tensor.shape[:-num_dims], *(1 for _ in range(num_dims)))
        output = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        scales = torch.empty(rows, dtype=torch.float32, device=tensor.device)
        context.save_for_backward(tensor, weight, scales)
        announce_kernel("rms_norm", tensor, output)
        return output

    @staticmethod
    def backward(context: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tensor, weight, _ = context.saved_tensors
        announce_kernel("rms_norm_backward", tensor, tensor, tensor)
        return torch.empty_like(tensor), None, None if weight is None else torch.empty_like(weight)
