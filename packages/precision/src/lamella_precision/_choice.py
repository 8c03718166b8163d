"""Parameters that a recipe serves, chosen by their modules and names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatch

import torch.nn as nn
from torch.utils.weak import WeakIdKeyDictionary

from lamella_precision._recipe import Recipe


def matrices_of(
    modules: nn.Module | Iterable[nn.Module], recipe: Recipe, *, names: str | Iterable[str] | None = None
) -> Callable[[nn.Parameter], Recipe | None]:
    """Choose a recipe for the matrices of some modules, as `MixedPrecisionPolicy.recipe`.

    Norms, biases and tables of embeddings stay in the compute dtype, and so does every parameter outside the modules:
    with a model's blocks as `modules`, its embedding and head.

    Args:
        modules: A module, or several (a list of blocks), before `fully_shard`.
        recipe: For parameters of at least two dims, outside `nn.Embedding`.
        names: Shell patterns of names of parameters in a module ("attn.*"), one of which must match; None for all.

    Returns:
        A function of a parameter, the recipe or None. The function keeps no parameter alive.

    Raises:
        ValueError: A pattern matches no such parameter.
    """
    patterns = [names] if isinstance(names, str) else None if names is None else list(names)
    chosen = WeakIdKeyDictionary()
    unused = set(patterns or ())
    given: Iterable[nn.Module]
    given = [modules] if isinstance(modules, nn.Module) and not isinstance(modules, nn.ModuleList) else modules
    for module in given:
        tables = {id(each.weight) for each in module.modules() if isinstance(each, nn.Embedding)}
        for name, parameter in module.named_parameters():
            matching = [pattern for pattern in patterns or () if fnmatch(name, pattern)]
            if parameter.ndim >= 2 and id(parameter) not in tables and (patterns is None or matching):
                chosen[parameter] = recipe
                unused.difference_update(matching)
    if unused:
        raise ValueError(
            f"Expected every one of `names` to match a matrix of the modules, got none for {sorted(unused)}. Names "
            "begin inside each module."
        )

    def choose(parameter: nn.Parameter) -> Recipe | None:
        found: Recipe | None = chosen.get(parameter)  # type: ignore[no-untyped-call]
        return found

    return choose
