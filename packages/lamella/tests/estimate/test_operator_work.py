"""Floating-point operations of attention, against torch's own counts where torch counts."""

from typing import Any

import pytest
import torch
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode

from lamella._estimate.operator_work import operator_work

HEADS = 8
SHAPE = (2, HEADS, 64, 16)
TORCH: Any = flop_counter


class _AttentionFlops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The counts of attention's operators, in the order of their calls."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: list[float] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        if "attention" in function.overloadpacket.__name__:
            self.counts += [work.flops for work in operator_work(function, args, kwargs or {}, output, 0)]
        return output


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("num_key_heads", [HEADS, 2])
def test_attention_counts_products_of_all_query_heads(num_key_heads: int, is_causal: bool) -> None:
    query = torch.randn(SHAPE, requires_grad=True)
    key, value = (torch.randn(2, num_key_heads, 64, 16, requires_grad=True) for _ in range(2))
    with _AttentionFlops() as flops:
        output = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=is_causal, enable_gqa=num_key_heads != HEADS
        )
        torch.autograd.grad(output.sum(), [query, key, value])
    expected = [TORCH.sdpa_flop_count(SHAPE, SHAPE, SHAPE), TORCH.sdpa_backward_flop_count(SHAPE, SHAPE, SHAPE, SHAPE)]
    assert flops.counts == [count / (2 if is_causal else 1) for count in expected]
