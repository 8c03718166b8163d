"""Parameters that a recipe serves, chosen by their modules and names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatch

import torch.nn as nn
from torch.utils.weak import WeakIdKeyDictionary

from lamella_precision._protocol import Recipe

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def matrices_of(
    modules: nn.Module | Iterable[nn.Module],
    recipe: Recipe,
    *,
    names: str | Iterable[str] | None = None,
    except_names: str | Iterable[str] = (),
) -> Callable[[nn.Parameter], Recipe | None]:
    """Choose a recipe for the matrices of some modules, as `MixedPrecisionPolicy.recipe`.

    Chosen are matrices with "weight" in their own name, as layers of any library name their factors, and stacks
    of matrices (at least three dims), as of experts; neither of convolutions. All other parameters stay in the compute
    dtype: norms, biases, tables of embeddings, matrices of another name (Mamba's `A_log`), and routers. A router is a
    module with "router" in its name, or with "gate" in its name in a module with experts. Also every
    parameter outside the modules stays: with a model's blocks as `modules`, embedding and head. For a choice by another
    rule any function of a parameter serves.

    Args:
        modules: A module, or several (a list of blocks), before `fully_shard` and after any replacement of parameters.
        recipe: The recipe of the chosen parameters.
        names: Shell patterns of names of parameters in a module ("attn.*"); at least one must match; None for all.
        except_names: Shell patterns of names of parameters to leave out.

    Returns:
        A function of a parameter, the recipe or None. The function keeps no parameter alive, and raises a `ValueError`
        if all chosen parameters were replaced before it chose any.

    Raises:
        TypeError: `recipe` is none.
        ValueError: A pattern matches no parameter, or nothing is chosen.
    """
    if isinstance(recipe, type) or not isinstance(recipe, Recipe):
        raise TypeError(f"Expected `recipe` to be a Recipe, got {recipe!r}. Pass an instance, such as Float8Recipe().")
    is_single = isinstance(modules, nn.Module) and not isinstance(modules, nn.ModuleList)
    roots: list[nn.Module] = [modules] if is_single else list(modules)  # type: ignore[arg-type,list-item]
    products = [product for module in roots for product in _products(module)]
    parameter_names = [name for module in roots for name, _ in module.named_parameters()]
    patterns, except_patterns = _listed("*" if names is None else names), _listed(except_names)
    _check_used("names", [] if names is None else patterns, [name for name, _ in products], "a matrix")
    _check_used("except_names", except_patterns, parameter_names, "a parameter")
    left_out = {id(parameter) for name, parameter in products if _matches(name, except_patterns)}
    chosen = [p for name, p in products if id(p) not in left_out and _matches(name, patterns)]
    if not chosen:
        raise ValueError(
            f"Expected weights of two dims or stacks of matrices in {[type(module).__name__ for module in roots]}, "
            "got none that `names` and `except_names` leave. Choose by a function of a parameter, or pass no recipe."
        )
    return _chooser(chosen, recipe)


def _chooser(parameters: Iterable[nn.Parameter], recipe: Recipe) -> Callable[[nn.Parameter], Recipe | None]:
    chosen = WeakIdKeyDictionary()
    for parameter in parameters:
        chosen[parameter] = recipe
    num_chosen, has_served = len(chosen), False

    def choose(parameter: nn.Parameter) -> Recipe | None:
        nonlocal has_served
        chosen_recipe: Recipe | None = chosen.get(parameter)  # type: ignore[no-untyped-call]
        has_served |= chosen_recipe is not None
        if not has_served and not len(chosen):  # after the first choice, sharding itself replaces parameters
            raise ValueError(
                f"Expected parameters that `matrices_of` chose, got other objects in the place of all {num_chosen}. "
                "Call matrices_of after what replaces parameters, such as `to_empty`."
            )
        return chosen_recipe

    return choose


def _products(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Names and parameters that are matrices of products, without tables and routers."""
    tables = {id(layer.weight) for layer in module.modules() if isinstance(layer, nn.Embedding)}
    routers = {id(inner) for router in _routers(module) for inner in router.modules()}
    for prefix, owner in module.named_modules():
        for name, parameter in owner.named_parameters(prefix, recurse=False):
            if id(owner) in routers or id(parameter) in tables or isinstance(owner, _CONVOLUTIONS):
                continue
            if _is_stack(parameter) or (parameter.ndim == 2 and "weight" in name.rpartition(".")[2]):
                yield name, parameter


def _is_stack(parameter: nn.Parameter) -> bool:
    return parameter.ndim >= 3 and min(parameter.shape[-2:]) > 1  # (1, 1, n) is a vector that broadcasts


def _routers(module: nn.Module) -> Iterator[nn.Module]:
    for layer in module.modules():
        holds_experts = any(_is_stack(parameter) for parameter in layer.parameters(recurse=False))
        holds_experts |= hasattr(layer, "experts")
        for name, child in layer.named_children():
            if "router" in name or (holds_experts and "gate" in name):
                yield child


def _listed(patterns: str | Iterable[str]) -> list[str]:
    """One pattern or several, as a list."""
    return [patterns] if isinstance(patterns, str) else list(patterns)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _check_used(argument: str, patterns: Sequence[str], names: Sequence[str], kind: str) -> None:
    if unused := [pattern for pattern in patterns if not any(fnmatch(name, pattern) for name in names)]:
        raise ValueError(
            f"Expected every one of `{argument}` to match {kind} of the modules, got none for {unused}. Names begin "
            "inside each module."
        )
