"""Floating-point operations of attention, against torch's own counts where torch counts."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from lamella._estimate.operator_work import operator_work

BATCH, HEADS, LENGTH, SIZE = 2, 8, 64, 16


class _Flops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.of_attention: list[float] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        if "attention" in function.overloadpacket.__name__:
            self.of_attention += [work.flops for work in operator_work(function, args, kwargs or {}, output, 0)]
        return output


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("num_key_heads", [HEADS, 2])
def test_attention_counts_products_of_all_query_heads(num_key_heads: int, is_causal: bool) -> None:
    query = torch.randn(BATCH, HEADS, LENGTH, SIZE, requires_grad=True)
    key, value = (torch.randn(BATCH, num_key_heads, LENGTH, SIZE, requires_grad=True) for _ in range(2))
    with _Flops() as flops:
        output = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=is_causal, enable_gqa=num_key_heads != HEADS
        )
        output.sum().backward()
    shape = (BATCH, HEADS, LENGTH, SIZE)
    expected = [sdpa_flop_count(shape, shape, shape), sdpa_backward_flop_count(shape, shape, shape, shape)]
    assert flops.of_attention == [count / (2 if is_causal else 1) for count in expected]
