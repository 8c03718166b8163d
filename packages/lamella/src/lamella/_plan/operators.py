"""An operator's kind, floating-point operations and bytes, from arguments and outputs without memory."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from lamella._plan.works import WorkKind

_ALLOCATIONS: Final = frozenset(
    ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "_unsafe_view", "lift_fresh")
)
_COPIES: Final = frozenset(("copy_", "_to_copy", "clone", "cat", "_foreach_copy_"))
_SOFTMAX: Final = ("softmax", "nll_loss", "logsumexp", "cross_entropy")
_LOOKUPS: Final = frozenset(("embedding", "index", "gather", "index_select"))
_FILLS: Final = frozenset(("zeros", "zeros_like", "new_zeros", "zero_", "fill_", "_foreach_zero_", "new_full", "full"))


class OperatorCost(NamedTuple):
    """The cost of an operator on a GPU.

    Attributes:
        kind: The kind of the kernel.
        flops: Floating-point operations.
        nbytes: Bytes read and written by the kernel.
        dtype: The dtype of a product's factors; empty otherwise.
    """

    kind: WorkKind
    flops: float
    nbytes: float
    dtype: str = ""


def cost_of(function: Any, arguments: Sequence[Any], options: Any, output: Any) -> OperatorCost | None:
    """Return the cost of an operator; None without a kernel: for a view or an allocation."""
    packet = function.overloadpacket
    name = packet.__name__
    if function.namespace != "aten" or function.is_view or name in _ALLOCATIONS:
        return None
    outputs = _tensors(output)
    if not outputs and not function._schema.is_mutable:
        return None
    inputs = _tensors([arguments, [*options.values()]])
    nbytes = _nbytes(name, inputs, outputs, is_mutable=function._schema.is_mutable)
    if "scaled_dot_product" in name or "_attention_" in name:
        return OperatorCost(WorkKind.ATTENTION, _attention_flops(name, arguments, options), nbytes)
    count = flop_registry.get(packet) or flop_registry.get(getattr(torch.ops.aten, name.removesuffix("_"), None))
    if count is not None:  # of `addmm_` too: a product added in place
        flops = count(*arguments, **options, out_val=output)
        return OperatorCost(WorkKind.MATMUL, flops, nbytes, str(_tensors(arguments)[0].dtype).removeprefix("torch."))
    if name in _COPIES:
        return OperatorCost(WorkKind.COPY, 0.0, nbytes)
    kind = WorkKind.SOFTMAX if any(word in name for word in _SOFTMAX) else WorkKind.ELEMENTWISE
    return OperatorCost(kind, 0.0, nbytes)


def _nbytes(name: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], *, is_mutable: bool) -> float:
    written = sum(map(_touched, outputs))
    if name in _FILLS:
        return written or sum(map(_touched, inputs))
    if name in _LOOKUPS:  # reads as many elements as written, not the whole tensor
        return 2 * written
    if name in ("copy_", "_foreach_copy_"):  # the destination is an argument too, and is not read
        half = len(inputs) // 2
        return sum(map(_touched, inputs[half:])) + sum(map(_touched, inputs[:half]))
    if is_mutable and not outputs:  # `_foreach` operators in place return nothing
        return 2 * sum(map(_touched, inputs))
    return written + sum(map(_touched, inputs))


def _touched(tensor: torch.Tensor) -> float:
    """Return the bytes of a tensor's elements; an element repeated by a broadcast counts once."""
    numel = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        numel *= size if stride else 1
    return numel * tensor.itemsize if tensor.numel() else 0


def _tensors(nest: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_iter(nest) if isinstance(leaf, torch.Tensor)]


def _attention_flops(name: str, arguments: Sequence[Any], options: Any) -> float:
    """Count two products forward and five backward, of half of the square for causal attention."""
    is_backward = "backward" in name
    tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
    query, key = tensors[1:3] if is_backward else tensors[:2]
    sequences, heads, num_queries, head_dim = query.shape
    flops = 4.0 * sequences * heads * num_queries * key.shape[-2] * head_dim
    is_causal = options.get("is_causal", False) or any(argument is True for argument in arguments)
    return flops * (2.5 if is_backward else 1.0) * (0.5 if is_causal else 1.0)
