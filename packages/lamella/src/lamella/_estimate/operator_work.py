"""The work of an operator on a GPU: its floating-point operations, and the bytes that it reads and writes."""

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

_ALLOCATIONS: Final = {
    torch.ops.aten.empty,
    torch.ops.aten.new_empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty_strided,
    torch.ops.aten._unsafe_view,
    torch.ops.aten.lift_fresh,
    torch.ops.aten.set_,
}
_PRODUCTS: Final = {
    torch.ops.aten.mm: 0,
    torch.ops.aten.bmm: 0,
    torch.ops.aten.addmm: 1,
    torch.ops.aten.addmm_: 1,
    torch.ops.aten.baddbmm: 1,
    torch.ops.aten._scaled_mm: 0,
    torch.ops.aten._grouped_mm: 0,
}
"""Products, and the index of the argument that is the left factor."""


class _CpuAttention(NamedTuple):
    """An operator of attention on a CPU, which torch does not count.

    Attributes:
        query: The index of the query among the arguments; key and value follow.
        causal: The index of the flag of a causal mask.
        num_head_products: The number of matrix products between scores and heads of the query's size.
        num_value_products: The number of matrix products between scores and heads of the value's size.
    """

    query: int
    causal: int
    num_head_products: int
    num_value_products: int

    def flops(self, arguments: Sequence[Any]) -> float:
        """Count the operations of the products; a causal kernel makes half. Keys may have fewer heads than queries."""
        tensors: Sequence[torch.Tensor] = arguments[self.query : self.query + 3]
        query, key, value = tensors
        num_scores = query.shape[:-1].numel() * key.shape[-2]
        inner = self.num_head_products * query.shape[-1] + self.num_value_products * value.shape[-1]
        is_causal = len(arguments) > self.causal and arguments[self.causal]
        return 2.0 * num_scores * inner / (2 if is_causal else 1)


_ATTENTION: Final = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _CpuAttention(0, 4, 1, 1),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _CpuAttention(1, 7, 3, 2),
}

_RATE_OF_DTYPE: Final = {1: 1.6, 2: 1.0, 4: 0.08, 8: 0.06}
"""Rate of products by the bytes of an element, over that of bf16."""


class OperatorWork(NamedTuple):
    """The work of an operator that launches a kernel.

    Attributes:
        moment: The index of the moment.
        flops: Floating-point operations, those of other dtypes as so many in bf16.
        nbytes: Bytes that the kernel reads and writes.
    """

    moment: int
    flops: float
    nbytes: int


def operator_work(
    function: Any, arguments: Sequence[Any], options: Any, output: Any, moment: int
) -> Iterator[OperatorWork]:
    """Yield the work of an operator; nothing for a view or an allocation."""
    packet = function.overloadpacket
    if function.namespace != "aten" or function.is_view or packet in _ALLOCATIONS:
        return
    tensors = [leaf for leaf in tree_iter((arguments, output)) if isinstance(leaf, torch.Tensor)]
    if tensors:
        nbytes = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
        yield OperatorWork(moment, _flops(packet, arguments, options, output), nbytes)


def _flops(packet: Any, arguments: Sequence[Any], options: Any, output: Any) -> float:
    if packet in _PRODUCTS:
        factor: torch.Tensor = arguments[_PRODUCTS[packet]]
        return 2.0 * factor.numel() * int(output.shape[-1]) / _RATE_OF_DTYPE[factor.itemsize]
    if packet in _ATTENTION:
        return _ATTENTION[packet].flops(arguments)
    if packet in flop_registry:
        return float(flop_registry[packet](*arguments, **options, out_val=output))
    return 0.0
