"""The units of megatron-core models. megatron-core is imported when a function is called."""

import importlib
from collections.abc import Collection, Iterator
from typing import Any

from torch import nn

from lamella_engine.extending import VendorVersions
from lamella_megatron._model.patterns import Pattern, parse_pattern
from lamella_megatron._model.placement import differs_between_ranks

MEGATRON_CORE = VendorVersions(
    distribution="megatron-core", floor="0.19.2", ceiling="0.20", extra="lamella-megatron[mcore]"
)
_UNIT_CLASSES = {
    "TransformerLayer": "megatron.core.transformer.transformer_layer",
    "MambaLayer": "megatron.core.ssm.mamba_layer",
    "MultiTokenPredictionLayer": "megatron.core.transformer.multi_token_prediction",
}


def sharding_units(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a megatron-core model (GPTModel, MambaModel, HybridModel), to shard in order.

    Layers are the smallest correct units: the mixer of a Mamba layer passes the convolution's weight to a fused kernel
    without calling the convolution, and would read a shard of a convolution sharded by itself. A multi-token prediction
    layer follows the layers inside it, and its unit holds its norms and its projection.

    Shard the layers, then the model itself, whose unit holds the embedding, the last norm and the output layer. For
    models whose ranks hold different parameters (tensor or expert parallel) call `fully_shard_model`.

    Raises:
        ImportError: megatron-core is not installed.
        ValueError: The model has no layers; or its parameters differ between ranks.
    """
    layers = layers_of(model)
    if (name := differs_between_ranks(model)) is not None:
        raise ValueError(
            f"Expected parameters that are equal on every rank, got {name!r}, of which ranks hold different parts "
            "(tensor or expert parallel): sharded over one mesh, the parts would be mixed up. Call "
            "lamella_megatron.fully_shard_model(model), which shards each parameter over its own ranks."
        )
    return layers


def layers_of(model: nn.Module, classes: Collection[type[nn.Module]] | None = None) -> list[nn.Module]:
    """The modules of some classes below a model, or megatron-core's layers; a module inside another one comes first.

    Raises:
        ImportError: megatron-core is not installed, or is older than the tested versions.
        ValueError: The model has none.
    """
    MEGATRON_CORE.check()
    candidates = _inner_first(model, unit_classes() if classes is None else tuple(classes))
    layers = [module for module in dict.fromkeys(candidates) if module is not model]
    if not layers:
        expected = sorted(_UNIT_CLASSES) if classes is None else sorted(layer_class.__name__ for layer_class in classes)
        raise ValueError(f"Expected a megatron-core model with layers {expected}, got {type(model).__name__}.")
    return layers


def _inner_first(module: nn.Module, classes: tuple[type[nn.Module], ...]) -> Iterator[nn.Module]:
    if is_group(module):
        yield module
        return
    for child in module.children():
        yield from _inner_first(child, classes)
    if isinstance(module, classes):
        yield module


def is_group(module: nn.Module) -> bool:
    """Whether a module is a group of layers in a stack of its own, as a branch of megatron-core builds groups."""
    return bool(getattr(module, "is_layer_group_stack", False))


def with_groups(model: nn.Module, layers: list[nn.Module], groups: str) -> list[nn.Module | list[nn.Module]]:
    """The layers of a HybridModel, with those of a group in brackets together.

    Args:
        model: A model with a flat stack of layers.
        layers: The layers from `layers_of`.
        groups: The pattern of the model's layers, with brackets. A pipeline stage's model has the stage's layers.

    Raises:
        ValueError: No pattern, or the pattern of other layers; or the model has no pattern, or groups in stacks of
            their own.
    """
    stack = _stack(model)
    pattern = parse_pattern(groups)
    _check_layers(groups, pattern.symbols, stack)
    members_by_first = {
        stack.layers[group.first]: list(stack.layers)[group.first : group.layers.stop] for group in pattern.groups
    }
    grouped_layers = {layer for members in members_by_first.values() for layer in members}
    units: list[nn.Module | list[nn.Module]] = []
    for layer in layers:
        if layer not in grouped_layers:
            units.append(layer)
        elif (members := members_by_first.get(layer)) is not None:
            units.append(members if len(members) > 1 else layer)
    return units


def with_neighbours(model: nn.Module, layers: list[nn.Module], min_size: int) -> list[nn.Module | list[nn.Module]]:
    """The layers of a model, with neighbours in one list of modules together until they hold enough parameters.

    Layers of one list run in the list's order. A layer with a unit inside, as a multi-token prediction layer, stays
    alone. The last layers of a list are a unit, however small.

    Args:
        model: The model of the layers.
        layers: The layers from `layers_of`.
        min_size: The number of this rank's parameters from which on a unit is closed.
    """
    places = {
        child: (modules, index)
        for modules in model.modules()
        if isinstance(modules, nn.ModuleList)
        for index, child in enumerate(modules)
    }
    units: list[list[nn.Module]] = []
    size = 0
    for layer in layers:
        modules, index = places.get(layer, (None, 0))
        is_neighbour = bool(units) and modules is not None and places.get(units[-1][-1]) == (modules, index - 1)
        if is_neighbour and size < min_size:
            units[-1].append(layer)
        else:
            units.append([layer])
            size = 0
        size += sum(parameter.numel() for parameter in layer.parameters())
    return [unit if len(unit) > 1 else unit[0] for unit in units]


def groups_of_all_stages(model: nn.Module, groups: str) -> Pattern:
    """The pattern of a HybridModel's layers on all pipeline stages, with groups.

    Args:
        model: The model of one stage.
        groups: The pattern of all stages' layers, with brackets.

    Raises:
        ValueError: No pattern, or the pattern of other layers than the stage's; or the model has no pattern.
    """
    stack = _stack(model)
    pattern = parse_pattern(groups)
    if stack.pre_process and stack.post_process:
        _check_layers(groups, pattern.symbols, stack)
    elif len(stack.layers):
        first = stack.layers[0].layer_number - 1  # megatron-core counts from 1, over all stages
        _check_layers(groups, pattern.symbols[first:][: len(stack.layers)], stack)
    return pattern


def _stack(model: nn.Module) -> Any:
    stack: Any = next((module for module in model.modules() if hasattr(module, "layer_type_list")), None)
    if stack is None:
        raise ValueError(
            f"Expected a HybridModel for `layer_groups`, got {type(model).__name__}, whose layers have no pattern. "
            "Leave `layer_groups` out."
        )
    if (place := next((i for i, layer in enumerate(stack.layers) if is_group(layer)), None)) is not None:
        raise ValueError(
            f"Expected a model of single layers for `layer_groups`, got one whose layer {place} is a group in a stack "
            "of its own, a unit and an item of the schedule already. Leave `layer_groups` out."
        )
    return stack


def _check_layers(groups: str, symbols: str, stack: Any) -> None:
    kinds = "".join(stack.layer_type_list)
    if symbols != kinds:
        raise ValueError(
            f"Expected `layer_groups` to be the model's pattern {kinds!r} with brackets, got {groups!r}, a pattern of "
            f"{symbols!r}."
        )


def unit_classes() -> tuple[type[nn.Module], ...]:
    """megatron-core's classes of layers.

    Raises:
        ImportError: megatron-core is not installed, or is older than the tested versions.
    """
    MEGATRON_CORE.check()
    try:
        return tuple(getattr(importlib.import_module(module), name) for name, module in _UNIT_CLASSES.items())
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("megatron"):
            raise
        raise ImportError(
            "Expected megatron-core to be installed, got none. With Python 3.12 or newer install it from a clone: "
            "uv pip install './packages/megatron[mcore]'"
        ) from error
