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

_ATTENTION: Final = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (torch.ops.aten._scaled_dot_product_flash_attention, 4),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        torch.ops.aten._scaled_dot_product_flash_attention_backward,
        7,
    ),
}
"""Attention on a CPU, its name in torch's counts, and the index of the argument that says causal."""

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
        counted, causal = _ATTENTION[packet]
        flops = float(flop_registry[counted](*arguments, out_val=output))
        return flops / 2 if len(arguments) > causal and arguments[causal] else flops
    if packet in flop_registry:
        return float(flop_registry[packet](*arguments, **options, out_val=output))
    return 0.0
