"""Linear layers whose three products run in float8: the gathered data is an operand as it is.

    product             operands           scales: per tensor   per row
    output              x, weight.T        of each              of tokens; of the weight's rows
    gradient of x       gradient, weight   of each              of tokens; the weight's are in the gradient
    gradient of weight  gradient.T, x      of each              of features; of features

There no operand has scales along the dim that a product adds up over: the gradient is multiplied by those of the
weight's rows first. Squares have: see `squares`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatch
from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from lamella_precision._products import squares
from lamella_precision._products.constant_results import assume_constant_result
from lamella_precision._products.operands import Operand, product, quantised
from lamella_precision._recipes.float8 import Float8Recipe
from lamella_precision._scales.assumed_kernels import assumes_float8_kernels
from lamella_precision._scales.encoding import has_float8
from lamella_precision._scales.tiles import Block
from lamella_precision._weights.linear_arguments import as_operand, rows_of
from lamella_precision._weights.quantized import QuantizedWeight

_ALIGNMENT = 16  # elements: of every dim that a kernel adds up over, and of the rows of the second operand


def use_float8_matmul(
    model: nn.Module, recipe: Float8Recipe | None = None, *, names: str | Iterable[str] = "*"
) -> list[str]:
    """Let linear layers compute in float8, forward and both gradients; before `fully_shard`.

    A weight that is gathered by an equal recipe is an operand as it is. Any other weight is quantised at each use. On
    devices without float8 products the same quantised operands are multiplied in fp32.

    Args:
        model: Its `nn.Linear` modules are changed in place; parameters and state dicts stay.
        recipe: A scale a tensor, a row or a square of 128 x 128; None for a scale a tensor. Activations and gradients
            follow current scaling: with a scale a tensor, a row, or 1 x 128.
        names: Shell patterns of modules' names; modules that match none stay. `float8_matmul_layers` gives the names of
            all with sizes that can be served.

    Returns:
        The names of the changed modules.

    Raises:
        TypeError: `recipe` is no Float8Recipe.
        ValueError: The recipe has other blocks or another dtype than torch.float8_e4m3fn, a matching module's sizes are
            no multiples of 16 (128 with squares), or a pattern matches no `nn.Linear`.
    """
    recipe = Float8Recipe() if recipe is None else recipe
    if not isinstance(recipe, Float8Recipe):
        raise TypeError(f"Expected `recipe` to be a Float8Recipe or None, got {recipe!r}. Pass Float8Recipe().")
    if recipe.block not in _SCALINGS or recipe.dtype != torch.float8_e4m3fn:
        raise ValueError(
            f"Expected a recipe with a scale a tensor, a row or 128 x 128, in torch.float8_e4m3fn, got {recipe}. Use "
            "Float8Recipe() with one of these blocks; others are gathered and dequantised."
        )
    patterns = [names] if isinstance(names, str) else list(names)
    linear = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    matched = [[name for name in linear if fnmatch(name, pattern)] for pattern in patterns]
    unused = [pattern for pattern, matches in zip(patterns, matched, strict=True) if not matches]
    if unused or not patterns:
        raise ValueError(
            f"Expected every one of `names` to match an nn.Linear, got none for {unused}. Call it before fully_shard."
        )
    layers = {name: module for name, module in linear.items() if any(name in matches for matches in matched)}
    fit = set(float8_matmul_layers(model, recipe))
    for name, module in layers.items():
        if name not in fit:
            raise ValueError(
                f"Expected sizes of {name!r} that are multiples of {_alignment(recipe)}, as float8 kernels need, got "
                f"{module.in_features} and {module.out_features}. Leave it out of `names`."
            )
    for module in layers.values():
        module.__class__ = Float8Linear
        module.recipe = recipe  # type: ignore[assignment]
    return list(layers)


def float8_matmul_layers(model: nn.Module, recipe: Float8Recipe) -> list[str]:
    """The names of the `nn.Linear` modules that `use_float8_matmul` takes: sizes are multiples of 16, or of 128.

    Args:
        model: Not changed.
        recipe: Asks for multiples of 128 if it has squares of 128 x 128.
    """
    alignment = _alignment(recipe)
    return [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear and not (module.in_features % alignment or module.out_features % alignment)
    ]


def _alignment(recipe: Float8Recipe) -> int:
    return _SCALINGS[recipe.block].alignment if recipe.block in _SCALINGS else _ALIGNMENT


def drop_float8_matmul(model: nn.Module) -> list[str]:
    """Undo `use_float8_matmul`: linear layers compute in their parameters' dtype again.

    Args:
        model: Before `fully_shard`, or sharded with no unit on a linear layer itself.

    Returns:
        The names of the changed modules.

    Raises:
        ValueError: Such a layer is a unit itself, or of a subclass; nothing is changed.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Float8Linear)}
    if units := {name: type(module).__name__ for name, module in layers.items() if type(module) is not Float8Linear}:
        raise ValueError(
            f"Expected linear layers that are no units themselves, got {units}. Call drop_float8_matmul before "
            "fully_shard."
        )
    for module in layers.values():
        del module.recipe
        module.__class__ = nn.Linear  # type: ignore[assignment]
    return list(layers)


class Float8Linear(nn.Linear):
    """A linear layer whose products take float8 operands; see `use_float8_matmul`.

    Attributes:
        recipe: The recipe of the operands.
    """

    recipe: Float8Recipe

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # the name in `nn.Linear`
        """(..., in_features) to (..., out_features), in the input's dtype, or in autocast's."""
        output: torch.Tensor = _Product.apply(as_operand(input), self.weight, self.recipe)  # type: ignore[no-untyped-call]
        return output if self.bias is None else output + as_operand(self.bias)  # type: ignore[redundant-expr]


class _Product(torch.autograd.Function):
    """`x @ weight.T` and its gradients in float8, differentiable once. The weight is saved as the wrapper."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, recipe: Float8Recipe) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.recipe = recipe
        rows = rows_of(x)
        # No tokens, as of an expert that none was sent to: amaxes of nothing are undefined.
        output = _output(rows, weight, recipe) if len(rows) else x.new_empty(0, len(weight))
        return output.view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        recipe: Float8Recipe = ctx.recipe
        rows, grad_output = rows_of(x), rows_of(gradients[0])
        if not len(rows):
            return torch.zeros_like(x), _zeros_like(weight) if ctx.needs_input_grad[1] else None, None
        grad_x, grad_weight = _SCALINGS[recipe.block].gradients(grad_output, rows, weight, recipe, ctx.needs_input_grad)
        return None if grad_x is None else grad_x.view(x.shape), grad_weight, None


def _zeros_like(weight: torch.Tensor) -> torch.Tensor:
    """A plain tensor of zeros, also for a quantised weight."""
    return torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)


def _output(x: torch.Tensor, weight: torch.Tensor, recipe: Float8Recipe) -> torch.Tensor:
    """`x @ weight.T`, of (tokens, in_features), in the dtype of `x`."""
    scaling = _SCALINGS[recipe.block]
    return scaling.multiply(quantised(x, scaling.block), _weight_operand(weight, recipe), x.dtype)


_Gradients = tuple[torch.Tensor | None, torch.Tensor | None]


def _gradients_by_tensors(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, recipe: Float8Recipe, needed: Sequence[bool]
) -> _Gradients:
    """The gradients of x and weight, with a scale a tensor: transposed when an element is a byte."""
    grad_x = grad_weight = None
    ours = quantised(gradient, recipe.block, torch.float8_e5m2)
    if needed[0]:
        elements, scales = _weight_operand(weight, recipe)
        grad_x = _multiply(ours, Operand(_transposed(elements), scales), x.dtype)
    if needed[1]:
        operands = ours, quantised(x, recipe.block)
        columns, theirs = (_padded(Operand(_transposed(elements), scales)) for elements, scales in operands)
        grad_weight = _multiply(columns, theirs, weight.dtype)
    return grad_x, grad_weight


def _gradients_by_rows(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, recipe: Float8Recipe, needed: Sequence[bool]
) -> _Gradients:
    """The gradients of x and weight, with scales of rows: of tokens in the first product, of features in the other."""
    grad_x = grad_weight = None
    if needed[0]:
        elements, scales = _weight_operand(weight, recipe)
        scaled = quantised(gradient * scales.view(1, -1), recipe.block)
        unit_scales = torch.ones_like(scales[:1]).expand(elements.shape[1], 1)
        grad_x = _multiply(scaled, Operand(_transposed(elements), unit_scales.contiguous()), x.dtype)
    if needed[1]:
        ours, theirs = (_padded(quantised(_transposed(factor), recipe.block)) for factor in (gradient, x))
        grad_weight = _multiply(ours, theirs, weight.dtype)
    return grad_x, grad_weight


def _gradients_by_blocks(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, recipe: Float8Recipe, needed: Sequence[bool]
) -> _Gradients:
    """The gradients of x and weight, with scales of blocks along the dim that is added up: features, then tokens."""
    grad_x = grad_weight = None
    if needed[0]:
        elements, scales = _weight_operand(weight, recipe)
        grad_x = squares.multiply(quantised(gradient, _VECTOR), Operand(_transposed(elements), scales.t()), x.dtype)
    if needed[1]:
        padding = -len(x) % squares.LENGTH  # tokens of zeros, which add nothing
        factors = [F.pad(factor, (0, 0, 0, padding)) if padding else factor for factor in (gradient, x)]
        ours, theirs = (quantised(_transposed(factor), _VECTOR) for factor in factors)
        grad_weight = squares.multiply(ours, theirs, weight.dtype)
    return grad_x, grad_weight


def _padded(operand: Operand) -> Operand:
    """An operand with columns of zeros, which add nothing, up to what kernels add up over."""
    elements, scales = operand
    padding = -elements.shape[1] % _ALIGNMENT
    return Operand(F.pad(elements.view(torch.uint8), (0, padding)).view(elements.dtype), scales) if padding else operand


def _transposed(matrix: torch.Tensor) -> torch.Tensor:
    """A contiguous transpose: kernels add up along rows of both operands."""
    return matrix.t().contiguous()


def _weight_operand(weight: torch.Tensor, recipe: Float8Recipe) -> Operand:
    """The gathered data as it is; or a plain weight, quantised."""
    if not isinstance(weight, QuantizedWeight):
        return quantised(weight.detach(), recipe.block, power_of_two=recipe.power_of_two)
    gather_recipe = weight.recipe
    is_operand = isinstance(gather_recipe, Float8Recipe) and (gather_recipe.block, gather_recipe.dtype) == (
        recipe.block,
        recipe.dtype,
    )
    if is_operand and not weight.views:
        assert weight.scales is not None
        # Not by `payloads`: a compiled graph would call the property again in each pass, to guard what it returned.
        return Operand(weight.payload_0, weight.scales)
    plain_weight = weight.dequantize_for(weight.gathered_direction())
    return quantised(plain_weight, recipe.block, power_of_two=recipe.power_of_two)


def _multiply(a: Operand, b: Operand, dtype: torch.dtype, *, is_fast: bool = False) -> torch.Tensor:
    """`a @ b.T`, of (m, k) and (n, k), in `dtype`."""
    assert a.data.shape[1] % _ALIGNMENT == 0, a.data.shape  # on every device, so that tests without a GPU see it
    if assumes_float8_kernels() or (a.data.is_cuda and _has_kernels(a.data.device.index)):
        is_single = a.scales.numel() == 1 and b.scales.numel() == 1
        out = dtype if is_single and dtype == torch.float32 else torch.bfloat16  # scales of rows: bf16 alone
        scales_b = b.scales if is_single else b.scales.t()
        output = torch._scaled_mm(a.data, b.data.t(), a.scales, scales_b, out_dtype=out, use_fast_accum=is_fast)
        return output.to(dtype)
    return (product(a.data, b.data) * a.scales * b.scales.view(1, -1)).to(dtype)


def _multiply_fast(a: Operand, b: Operand, dtype: torch.dtype) -> torch.Tensor:
    """`_multiply` for the forward, whose kernels may add up with fewer bits, as is usual: gradients may not."""
    return _multiply(a, b, dtype, is_fast=True)


@assume_constant_result
def _has_kernels(index: int) -> bool:
    return has_float8(index)


class _Scaling(NamedTuple):
    """How a weight's blocks are multiplied.

    Attributes:
        block: Rows and columns of activations with a common scale.
        alignment: A divisor of both sizes of a layer.
        multiply: The output of two operands.
        gradients: The gradients of the input and of the weight, from the output's.
    """

    block: Block
    alignment: int
    multiply: Callable[[Operand, Operand, torch.dtype], torch.Tensor]
    gradients: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Float8Recipe, Sequence[bool]], _Gradients]


_VECTOR: Block = (1, squares.LENGTH)
_SCALINGS: dict[Block, _Scaling] = {
    (None, None): _Scaling((None, None), _ALIGNMENT, _multiply_fast, _gradients_by_tensors),
    (1, None): _Scaling((1, None), _ALIGNMENT, _multiply_fast, _gradients_by_rows),
    (squares.LENGTH, squares.LENGTH): _Scaling(_VECTOR, squares.LENGTH, squares.multiply, _gradients_by_blocks),
}
