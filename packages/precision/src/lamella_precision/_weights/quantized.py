"""A gathered weight in a recipe's format: operators read dequantised values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol, Self, runtime_checkable

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_leaves, tree_map

from lamella_precision._protocol import Direction, PayloadFormat
from lamella_precision._weights.linear_arguments import as_operand, autocast_dtype, rows_of
from lamella_precision._weights.views import RecordedView, is_single, views_by

_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


@runtime_checkable
class Dequantizes(Protocol):
    """A recipe with a way back to values, for weights and for `quantization_errors`.

    If scales and payloads of a weight of more than two dims have an entry for each index along dim 0, the entries of
    some indices must be a weight too: a `QuantizedWeight` then dequantises a selected expert alone.
    """

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of the values."""
        ...

    def payloads(self, shape: Sequence[int], main_dtype: torch.dtype) -> Sequence[PayloadFormat]:
        """The payloads of a weight, the same dtypes and directions for every shape."""
        ...

    def dequantize(
        self, payloads: Sequence[torch.Tensor], scales: torch.Tensor | None, shape: torch.Size, direction: Direction
    ) -> torch.Tensor:
        """The values for a direction's products, in `compute_dtype`."""
        ...


class QuantizedWeight(torch.Tensor):
    """A weight, or a view of a weight, with bytes of the gathered payloads, and of the scales, alone.

    `torch.nn.functional.linear` reads forward's values in forward and backward's in backward. All other operators read
    forward's values, or backward's where forward's payloads have no bytes. Autograd saves the wrapper. Selects, slices,
    transposes and permutations are wrappers again: of the parts of payloads and scales, for indices along dim 0 of a
    stack of matrices, else of all. Every other view is of dequantised values, which autograd saves. Operators that
    write to the weight are refused.

    Args:
        payloads: The whole payloads, as the recipe describes.
        scales: Scales of the whole weight's blocks; None if the payloads have the scales.
        shape: The whole weight's shape.
        recipe: The recipe of the payloads.
        views: Views of the values, in a row.

    Attributes:
        scales: Scales of the whole weight's blocks, or None.
        recipe: The recipe of the payloads.
        weight_shape: The weight's shape, before the views.
        views: The views of the values, in a row.
        is_matrix: Whether there are two dims after the views.
    """

    scales: torch.Tensor | None
    recipe: Dequantizes
    weight_shape: torch.Size
    views: tuple[RecordedView, ...]
    is_matrix: bool  # without a call of `__torch_function__`, as `ndim` makes
    payload_0: torch.Tensor
    _names: tuple[str, ...]  # an attribute for each payload, as compilers ask of wrappers

    @staticmethod
    def __new__(
        cls,
        payloads: Sequence[torch.Tensor],
        scales: torch.Tensor | None,
        shape: Sequence[int],
        recipe: Dequantizes,
        views: Sequence[RecordedView] = (),
    ) -> Self:
        """The wrapper, with the payloads' device and the recipe's compute dtype."""
        size, strides = (tuple(shape), None) if not views else _layout(shape, views)
        weight = torch.Tensor._make_wrapper_subclass(
            cls, size, strides=strides, dtype=recipe.compute_dtype, device=payloads[0].device
        )
        weight.scales = scales
        weight.recipe = recipe
        weight.weight_shape = torch.Size(shape)
        weight.views = tuple(views)
        weight.is_matrix = len(size) == 2
        weight._names = tuple([f"payload_{i}" for i in range(len(payloads))])
        for name, payload in zip(weight._names, payloads, strict=True):
            setattr(weight, name, payload)
        return weight

    @property
    def payloads(self) -> tuple[torch.Tensor, ...]:
        """The whole payloads, as the recipe describes."""
        return tuple([getattr(self, name) for name in self._names])

    def dequantize_for(self, direction: Direction) -> torch.Tensor:
        """The values of a direction, a new tensor in the compute dtype, or a view of one.

        Raises:
            RuntimeError: The payloads of the direction have no bytes.

        Effects: an allocation of the whole weight's size and a few kernels, on the current stream.
        """
        payloads = self.payloads
        if not _have_bytes(payloads) and not _have_bytes(self._payloads_for(direction)):
            raise RuntimeError(
                f"Expected a weight of shape {tuple(self.weight_shape)} that is gathered for {direction.value}, got "
                f"payloads without bytes, of {self.recipe}. Read the weight in its module's own forward, or between "
                "`unshard` and `reshard`."
            )
        weight = self.recipe.dequantize(payloads, self.scales, self.weight_shape, direction)
        for view in self.views:
            weight = view.of(weight)
        return weight

    def gathered_direction(self) -> Direction:
        """Backward if its payloads alone have bytes, else forward."""
        if _have_bytes(self.payloads) or _have_bytes(self._payloads_for(Direction.FORWARD)):
            return Direction.FORWARD
        return Direction.BACKWARD

    def _payloads_for(self, direction: Direction) -> list[torch.Tensor]:
        formats = self.recipe.payloads(self.weight_shape, self.recipe.compute_dtype)
        return [
            payload
            for payload, payload_format in zip(self.payloads, formats, strict=True)
            if payload_format.direction.meets(direction)
        ]

    def _viewed(self, view: RecordedView) -> QuantizedWeight:
        """A view, dequantised for operators that ask for values."""
        if view.is_part_of_stack and self._is_stack:
            return self._part(view)
        return QuantizedWeight(self.payloads, self.scales, self.weight_shape, self.recipe, (*self.views, view))

    def _records(self, views: Sequence[RecordedView]) -> bool:
        """Whether several views are wrappers: pieces are; indices are not if each would dequantise all."""
        return views[0].name == "slice" or (views[0].is_part_of_stack and self._is_stack)

    @property
    def _is_stack(self) -> bool:
        """Whether an index along dim 0 has payloads and scales of its own."""
        return (
            len(self.weight_shape) > 2
            and self.scales is not None
            and all(len(tensor) == self.weight_shape[0] for tensor in (*self.payloads, self.scales))
            and all(view.keeps_first_dim for view in self.views)
        )

    def _part(self, view: RecordedView) -> QuantizedWeight:
        """Some indices along dim 0 of a stack, or a single index."""
        assert self.scales is not None
        payloads, scales = [view.of(payload) for payload in self.payloads], view.of(self.scales)
        if view.name == "select":
            views = [recorded.without_first_dim() for recorded in self.views]
            return QuantizedWeight(payloads, scales, self.weight_shape[1:], self.recipe, views)
        return QuantizedWeight(payloads, scales, (len(scales), *self.weight_shape[1:]), self.recipe, self.views)

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"QuantizedWeight({tuple(self.shape)}, {self.recipe})"

    # Dynamo and AOTAutograd take the wrapper apart by the following two methods.

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names = [*self._names, *(["scales"] if self.scales is not None else [])]
        return names, (self.recipe, self.weight_shape if self.views else None, self.views)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: Any, size: Sequence[int], stride: Sequence[int]
    ) -> QuantizedWeight:
        recipe, weight_shape, views = context
        scales = inner.get("scales")
        payloads = [inner[name] for name in inner if name != "scales"]
        return QuantizedWeight(payloads, scales, size if weight_shape is None else weight_shape, recipe, views)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is F.linear:
            return _linear(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # `DTensor.to_local` takes a view of the local tensor's own shape.
        if func in _ALIASES or (func is torch.ops.aten.view.default and tuple(args[1]) == tuple(args[0].shape)):
            weight = args[0]
            return cls(weight.payloads, weight.scales, weight.weight_shape, weight.recipe, weight.views)
        if (views := views_by(func, args)) and (is_single(func) or args[0]._records(views)):
            wrappers = [args[0]._viewed(view) for view in views]
            return wrappers[0] if is_single(func) else wrappers
        _refuse_write(func, args, kwargs or {})
        plain = tree_map(_dequantized, (tuple(args), kwargs or {}))
        return func(*plain[0], **plain[1])


def _layout(shape: Sequence[int], views: Sequence[RecordedView]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Size and strides of views of a contiguous tensor."""
    like = torch.empty(tuple(shape), device="meta")
    for view in views:
        like = view.of(like)
    return tuple(like.shape), like.stride()


def _have_bytes(payloads: Sequence[torch.Tensor]) -> bool:
    """Whether no payload's storage is released; true for a compiler's tensors, which have no storage."""
    if torch.compiler.is_compiling():
        return True
    return all(
        type(payload) is not torch.Tensor or payload.untyped_storage().nbytes() or not payload.numel()
        for payload in payloads
    )


def _refuse_write(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Refuse an operator that writes to a quantised weight: the values written would be lost with a temporary."""
    for index, name in _written(func):
        argument = args[index] if index < len(args) else kwargs.get(name)
        for leaf in tree_leaves(argument):
            if isinstance(leaf, QuantizedWeight):
                raise RuntimeError(
                    f"Expected a gathered weight to be read, got {func} writing to a weight of shape "
                    f"{tuple(leaf.shape)}, gathered by {leaf.recipe}: the values would be lost. Write to the sharded "
                    "parameter, which the module holds after `reshard`."
                )


@cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """Place and name of the arguments under an operator's writes."""
    if func is torch.ops.aten.record_stream.default:  # its schema calls the mark a write
        return ()
    arguments = enumerate(func._schema.arguments)
    return tuple(
        (index, argument.name) for index, argument in arguments if argument.alias_info and argument.alias_info.is_write
    )


def _dequantized(leaf: object) -> object:
    return leaf.dequantize_for(leaf.gathered_direction()) if isinstance(leaf, QuantizedWeight) else leaf


def _linear(
    input: torch.Tensor,  # noqa: A002  # the name in `torch.nn.functional.linear`
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    # Without the function of autograd: a quantised input, or a bias; a row; `torch.func`, which has no rule for it.
    is_transformed = torch._C._are_functorch_transforms_active()
    if not isinstance(weight, QuantizedWeight) or not weight.is_matrix or is_transformed:
        with torch._C.DisableTorchFunctionSubclass():
            return F.linear(input, weight, bias)
    dtype = autocast_dtype(weight.recipe.compute_dtype, input.device)
    output: torch.Tensor = _Linear.apply(as_operand(input), weight, dtype)  # type: ignore[no-untyped-call]
    return output if bias is None else output + as_operand(bias)


class _Linear(torch.autograd.Function):
    """A matrix product with a quantised weight, saved as the wrapper: bytes come and go with the gathers.

    Differentiable once: the values that backward reads have no graph to the weight.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.dtype, ctx.weight_dtype = dtype, weight.recipe.compute_dtype
        return F.linear(x, weight.dequantize_for(Direction.FORWARD).to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            # Hooks of saved tensors may have put a plain copy in the wrapper's place.
            is_wrapper = isinstance(weight, QuantizedWeight)
            grad_x = gradient @ (weight.dequantize_for(Direction.BACKWARD) if is_wrapper else weight).to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = (rows_of(gradient).t() @ rows_of(x)).to(ctx.weight_dtype)
        return grad_x, grad_weight, None
