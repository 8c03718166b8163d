"""Reads the state of a sharded model's units."""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn as nn
from torch.distributed.tensor import DTensor

from lamella_engine._modules.attached import state_of, unit_of
from lamella_engine._streams.streams import Streams
from lamella_engine._tree.tree import Tree
from lamella_engine._unit.unit import Unit
from lamella_engine._unit.weights import Residency


def require_unit(module: object) -> Unit:
    """The unit that a module is, alone or with other modules.

    Raises:
        AssertionError: The module is no unit.
    """
    return state_of(module).unit


def tree_of(module: object) -> Tree:
    """The tree of a module's unit.

    Raises:
        AssertionError: The module is no unit.
    """
    return state_of(module).tree


def streams_of(module: object) -> Streams:
    """The streams of a module's tree.

    Raises:
        AssertionError: The module is no unit.
    """
    return state_of(module).tree.streams


def named_units(model: nn.Module) -> Iterator[tuple[str, Unit]]:
    """Each unit under the module's name in the model, in the order of `named_modules`; the model itself is "root".

    A unit of several modules comes once for each module.
    """
    for name, module in model.named_modules():
        if (unit := unit_of(module)) is not None:
            yield name or "root", unit


def unsharded_nbytes(module: object) -> int:
    """Bytes of a unit's parameters while unsharded, padding included.

    Raises:
        AssertionError: The module is no unit.
    """
    return require_unit(module).parameters.unsharded_nbytes


def held_nbytes(model: nn.Module) -> dict[str, int]:
    """Bytes held by each unit for unsharded parameters at the moment, by name; without empty units."""
    nbytes_of = {
        name: sum(group.unsharded_weight.flat.untyped_storage().nbytes() for group in unit.parameters.groups)
        for name, unit in named_units(model)
    }
    return {name: nbytes for name, nbytes in nbytes_of.items() if nbytes}


def assert_at_rest(model: nn.Module) -> None:
    """Assert that shards alone hold memory, with every unit out of backward.

    Persistent copies of weights (DDP, ZeRO-1, ZeRO-2, HFSDP) count as at rest.

    Raises:
        AssertionError: A unit has unsharded bytes, parts for neighbours or unreduced gradients, or waits for the
            end of backward; or a parameter is no DTensor. The message names the unit or parameter.
    """
    for name, unit in named_units(model):
        # A persistent copy stays gathered between uses by the unit's strategy: not a leak.
        keeps_copy = unit.parameters.strategy.keeps_copy and unit.weights.residency is Residency.KEPT
        assert keeps_copy or unit.weights.residency is Residency.SHARDED, f"{name} is {unit.weights.residency}"
        assert not unit.is_in_backward, f"{name} still waits for its backward to end"
        for group in unit.parameters.groups:
            is_free = group.unsharded_weight.flat.untyped_storage().nbytes() == 0
            assert is_free or unit.parameters.strategy.keeps_copy, f"{name} kept its unsharded buffer"
            assert group.parts is None, f"{name} kept parts for its neighbours"
            assert not group.has_gradients, f"{name} kept unreduced gradients"
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), f"{name} is a {type(parameter).__name__}"
