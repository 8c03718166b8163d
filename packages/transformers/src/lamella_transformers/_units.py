"""The units of a model and the dtypes of parameters in compute, by an adapter's rules or by transformers' names."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from lamella_engine import plan_units
from lamella_transformers._adapters import DtypeRule, find_adapter
from lamella_transformers._errors import ModelError


@dataclass(frozen=True, kw_only=True)
class UnitChoice:
    """The modules to shard one by one, before the model.

    Attributes:
        modules: The modules, none inside another.
        note: The modules in a few words, if neither an adapter nor transformers names them; None otherwise.
    """

    modules: list[nn.Module]
    note: str | None = None


def choose_units(model: nn.Module) -> UnitChoice:
    """Choose the modules to shard one by one, before the model.

    The modules follow from the rule of the adapter for the model's type, or are the possible units among the layers
    that transformers names (`_no_split_modules`), or the modules of the list with most parameters.

    Args:
        model: An unsharded model of transformers; may be on the meta device.

    Raises:
        ModelError: The model names no layers, and has no list of modules.

    Effects: imports the package of the adapter.
    """
    if (adapter := find_adapter(_model_type(model))) is not None:
        return UnitChoice(modules=adapter.sharding_units(model))
    layers = _layers_in_lists(model)
    named = _named_by_transformers(model)
    # Some models name a part of their layers alone (RoBERTa-PreLayerNorm: attention), or a class without instances.
    if named and 2 * _numel_shared(layers, named) >= _numel_shared(layers, layers):
        return UnitChoice(modules=named)
    if not layers:
        raise ModelError(f"Expected a model with a list of layers, got {_model_type(model)!r}, which has none.")
    classes = ", ".join(sorted({type(layer).__name__ for layer in layers}))
    return UnitChoice(modules=layers, note=f"the {len(layers)} modules of the longest list ({classes})")


def _named_by_transformers(model: nn.Module) -> list[nn.Module]:
    try:
        return _planned(model, "no_split")
    except ValueError:  # The model names no classes, or builds no module of the named classes.
        return []


def _layers_in_lists(model: nn.Module) -> list[nn.Module]:
    """Return the modules of the list with most parameters, and of the lists beside it with further parts of the layers.

    XLM keeps the attention of all layers in one list, and their products in another.
    """
    lists = dict(_outer_lists(model))
    if not lists:
        return []
    largest = max(lists, key=lambda name: sum(parameter.numel() for parameter in lists[name].parameters()))
    parent = largest.rpartition(".")[0]
    names = [
        f"{name}.{index}"
        for name, modules in lists.items()
        if name.rpartition(".")[0] == parent and len(modules) == len(lists[largest])
        for index, module in enumerate(modules)
        if name == largest or any(module.children())
    ]
    return _planned(model, names)


def _outer_lists(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.ModuleList]]:
    """Yield the outermost lists of modules, with their names."""
    for name, module in model.named_children():
        if isinstance(module, nn.ModuleList) and len(module):
            yield f"{prefix}{name}", module
        else:
            yield from _outer_lists(module, f"{prefix}{name}.")


def _planned(model: nn.Module, units: str | list[str]) -> list[nn.Module]:
    """Return the possible units of the engine: no module inside another, no module with a tied parameter."""
    return [model.get_submodule(unit.name) for unit in plan_units(model, units=units).units if unit.name]


def _numel_shared(modules: Iterable[nn.Module], reference_modules: Iterable[nn.Module]) -> int:
    """Return the number of elements of the parameters in both."""
    ids = {id(parameter) for module in reference_modules for parameter in module.parameters()}
    return sum(p.numel() for module in modules for p in module.parameters() if id(p) in ids)


def sharding_units(model: nn.Module) -> list[nn.Module]:
    """Return the modules to shard one by one, before the model, by `choose_units`.

    Raises:
        ModelError: The conditions of `choose_units`.

    Effects: as `choose_units`.
    """
    return choose_units(model).modules


def fp32_parameters(model: nn.Module) -> DtypeRule | None:
    """Return the adapter's rule for parameters in fp32 beside bf16 weights in compute: a `param_dtype_override_fn`.

    None for models without a rule.
    """
    adapter = find_adapter(_model_type(model))
    return None if adapter is None or adapter.keep_fp32 is None else adapter.keep_fp32(model)


def _model_type(model: nn.Module) -> str:
    return str(cast(Any, model).config.model_type)
