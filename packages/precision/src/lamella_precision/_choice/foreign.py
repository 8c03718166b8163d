"""Weights in classes of another library: recognised by the class's module, which is never imported here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn as nn
from torch.utils.weak import WeakIdKeyDictionary

from lamella_precision._protocol import Recipe

_WAYS_OUT = {
    "transformer_engine": (
        "Call `lamella_precision.te.replace_quantized_weights(model)` before fully_shard, and give its result as "
        "`recipe` to MixedPrecisionPolicy."
    )
}


def is_quantized(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a class of a known quantising library."""
    return _library(tensor) in _WAYS_OUT


def refuse_quantized(name: str, tensor: torch.Tensor) -> None:
    """Refuse a weight in another library's format: its shards would be of the quantised values.

    Raises:
        TypeError: The tensor is of a known quantising library's class.
    """
    if is_quantized(tensor):
        raise TypeError(
            f"Expected {name!r} to be a plain tensor, got a {type(tensor).__name__} of {_library(tensor)}, which was "
            f"quantised when it was built. {_WAYS_OUT[_library(tensor)]}"
        )


def read_directly(weight: torch.Tensor) -> None:
    """Let torch read attributes of a foreign weight (`shape`, `requires_grad`) as of a plain tensor.

    A linear layer reads six a forward. The class's `__torch_function__` maps over all arguments before it acts as torch
    by itself, and takes tens of microseconds.

    Source: Transformer Engine 2.11, `pytorch/quantized_tensor.py`.
    """
    if is_quantized(weight):
        # Torch asks the object before the class. Not a class of our own: extensions compare the class itself.
        vars(weight)["__torch_function__"] = torch._C._disabled_torch_function_impl


def replace_weights(
    model: nn.Module,
    recipe_of: Callable[[str, nn.Module, nn.Parameter], Recipe | None],
    values_of: Callable[[nn.Parameter], torch.Tensor],
    *,
    dropped: Sequence[str] = (),
) -> Callable[[nn.Parameter], Recipe | None] | None:
    """Replace the parameters with a recipe by plain parameters, after all recipes are known; ties stay.

    Args:
        model: Changed in place.
        recipe_of: From name, module and parameter; None leaves the parameter.
        values_of: The values of the new parameter, which gets the marks of libraries too.
        dropped: Attributes of a parameter that are no marks of libraries.

    Returns:
        A function of a parameter: its recipe or None, which keeps no parameter alive. None: no parameter has a recipe.
    """
    quantized: dict[int, tuple[nn.Parameter, Recipe, list[tuple[nn.Module, str]]]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in quantized:
                recipe = recipe_of(f"{prefix}.{name}" if prefix else name, module, parameter)
                if recipe is None:
                    continue
                quantized[id(parameter)] = parameter, recipe, []
            quantized[id(parameter)][2].append((module, name))
    if not quantized:
        return None
    recipes = WeakIdKeyDictionary()
    while quantized:  # an original's memory goes as soon as its values are copied
        _, (parameter, recipe, holders) = quantized.popitem()
        plain = nn.Parameter(values_of(parameter).detach(), requires_grad=parameter.requires_grad)
        unmarked = (*vars(parameter.detach()), *dropped, "_is_param")  # the class's, and what makes it a parameter
        vars(plain).update({key: mark for key, mark in vars(parameter).items() if key not in unmarked})
        recipes[plain] = recipe
        for module, name in holders:
            setattr(module, name, plain)

    def choose(parameter: nn.Parameter) -> Recipe | None:
        chosen: Recipe | None = recipes.get(parameter)  # type: ignore[no-untyped-call]
        return chosen

    return choose


def _library(tensor: torch.Tensor) -> str:
    return type(tensor).__module__.partition(".")[0]
