"""A gathered weight in a recipe's format: dequantised where an operator asks for its values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self, runtime_checkable

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map

from lamella_precision._recipe import Direction


@runtime_checkable
class Dequantizes(Protocol):
    """A recipe that reads values back, for weights and for `quantization_errors`."""

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of the values."""
        ...

    def dequantize(
        self, payloads: Sequence[torch.Tensor], scales: torch.Tensor | None, shape: torch.Size, direction: Direction
    ) -> torch.Tensor:
        """The values that a direction computes with, in `compute_dtype`."""
        ...


class QuantizedWeight(torch.Tensor):
    """A weight of which only the gathered payloads, and the scales, have bytes.

    `torch.nn.functional.linear` reads forward's values in forward and backward's in backward, and saves no dequantised
    copy. All other operators read forward's values, and save copies where autograd saves inputs.

    Args:
        payloads: Whole, as the recipe describes.
        scales: Of the blocks of the whole weight; None if the payloads have the scales.
        shape: The weight's.
        recipe: Reads the values back.

    Attributes:
        scales: As given.
        recipe: As given.
    """

    scales: torch.Tensor | None
    recipe: Dequantizes
    payload_0: torch.Tensor
    _names: tuple[str, ...]  # an attribute for each payload, as compilers ask of wrappers

    @staticmethod
    def __new__(
        cls, payloads: Sequence[torch.Tensor], scales: torch.Tensor | None, shape: Sequence[int], recipe: Dequantizes
    ) -> Self:
        """The wrapper, with the payloads' device and the recipe's compute dtype."""
        made = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=recipe.compute_dtype, device=payloads[0].device
        )
        made.scales = scales
        made.recipe = recipe
        made._names = tuple([f"payload_{i}" for i in range(len(payloads))])
        for name, payload in zip(made._names, payloads, strict=True):
            setattr(made, name, payload)
        return made

    @property
    def payloads(self) -> tuple[torch.Tensor, ...]:
        """The whole payloads, as the recipe describes."""
        return tuple([getattr(self, name) for name in self._names])

    def dequantize_for(self, direction: Direction) -> torch.Tensor:
        """The values of a direction, a new tensor in the compute dtype.

        Effects: an allocation of the weight's size and a few kernels, on the current stream.
        """
        return self.recipe.dequantize(self.payloads, self.scales, self.shape, direction)

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"QuantizedWeight({tuple(self.shape)}, {self.recipe})"

    # Dynamo and AOTAutograd take the wrapper apart by these two.

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return [*self._names, *(["scales"] if self.scales is not None else [])], self.recipe

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], recipe: Dequantizes, size: Sequence[int], stride: Sequence[int]
    ) -> QuantizedWeight:
        scales = inner.get("scales")
        payloads = [inner[name] for name in inner if name != "scales"]
        return QuantizedWeight(payloads, scales, size, recipe)

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
        if func is torch.ops.aten.detach.default or func is torch.ops.aten.alias.default:
            (weight,) = args
            return cls(weight.payloads, weight.scales, weight.shape, weight.recipe)
        plain = tree_map(_values, (tuple(args), kwargs or {}))
        return func(*plain[0], **plain[1])


def _values(each: object) -> object:
    return each.dequantize_for(Direction.FORWARD) if isinstance(each, QuantizedWeight) else each


def _linear(
    input: torch.Tensor,  # noqa: A002  # the name in `torch.nn.functional.linear`
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    if not isinstance(weight, QuantizedWeight):  # a quantised input, or a bias
        with torch._C.DisableTorchFunctionSubclass():
            return F.linear(input, weight, bias)
    made: torch.Tensor = _Linear.apply(input, weight)  # type: ignore[no-untyped-call]
    return made if bias is None else made + bias


class _Linear(torch.autograd.Function):
    """A matrix product with a quantised weight, saved as the wrapper: its bytes come and go with the gathers."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight.dequantize_for(Direction.FORWARD))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = gradient @ weight.dequantize_for(Direction.BACKWARD)
        if ctx.needs_input_grad[1]:
            of_weight = gradient.flatten(0, -2).t() @ x.flatten(0, -2)
        return of_x, of_weight
