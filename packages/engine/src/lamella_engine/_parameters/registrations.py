"""Parameters and modules that modules of a unit were given after `fully_shard`.

Parameters that no unit gathers or reduces are refused; units join the tree.

torch calls hooks for every registration in the process, so a step asks only whether there was one.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator
from typing import Final, NamedTuple, Protocol

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from lamella_engine._parameters.sharded_parameter import is_sharded

_NUM_NAMES: Final = 3  # in an error


class NamedUnit(Protocol):
    """The parameters of a unit."""

    @property
    def prefix(self) -> str: ...


class _Watched(NamedTuple):
    """A module of a unit."""

    prefix: str  # of names in the module, from the unit on
    owner: weakref.ref[NamedUnit]  # weak, as modules own their units


# The process's, as torch's hooks are.
_watched: weakref.WeakKeyDictionary[nn.Module, _Watched] = weakref.WeakKeyDictionary()
# Read by every step, which calls nothing where the list is empty.
registrations: list[tuple[weakref.ref[nn.Module], str]] = []
_handles: list[object] = []


def watch(modules: Iterable[tuple[str, nn.Module]], owner: NamedUnit) -> None:
    """Note later registrations in a unit's modules.

    Args:
        modules: The unit's modules, outside inner units, with dotted prefixes.
        owner: The unit's parameters.

    Effects: the first call registers two hooks of torch, for registrations in all modules of the process.
    """
    if not _handles:
        _handles.append(register_module_parameter_registration_hook(_note_parameter))
        _handles.append(register_module_module_registration_hook(_note_module))
    for prefix, module in modules:
        _watched[module] = _Watched(prefix, weakref.ref(owner))


def _note_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    # An assignment over an earlier parameter is `adopt_replaced_shards`' affair, or the owner's of an ignored one.
    if parameter is not None and module in _watched and module._parameters.get(name) is None:
        registrations.append((weakref.ref(module), name))


def _note_module(module: nn.Module, name: str, added: nn.Module | None) -> None:
    if added is not None and (watched := _watched.get(module)) is not None:
        registrations.append((weakref.ref(module), name))
        # Modules further in too: a later registration in them would be seen by no unit.
        for inner_name, inner in added.named_modules(prefix=watched.prefix + name):
            _watched.setdefault(inner, _Watched(f"{inner_name}.", watched.owner))


def refuse_late_parameters(owners: Iterable[NamedUnit]) -> None:
    """Refuse trainable parameters registered in units' modules after `fully_shard`: ranks would drift apart.

    Args:
        owners: The parameters of a tree's units.

    Raises:
        RuntimeError: Some are still in place, in no unit.
    """
    if not torch.is_grad_enabled():
        # A pass without gradients drifts nowhere, and leaves the entries to the next training forward.
        return
    tree_owners = set(owners)
    if names := _late_names(tree_owners):
        others = f" and {len(names) - _NUM_NAMES} more" if len(names) > _NUM_NAMES else ""
        raise RuntimeError(
            "Expected the parameters of a unit's modules to be registered before fully_shard, got "
            f"{names[:_NUM_NAMES]}{others} after it, which no unit reduces: each rank would train values of its own. "
            "Register them before fully_shard, call fully_shard on the new module itself, or freeze them."
        )
    # Parameters frozen for now may be trained later, so entries go only with the parameters. Another tree's entries may
    # name units, which join that tree when its next pass begins.
    registrations[:] = [
        (reference, name)
        for reference, name in registrations
        if (module := reference()) is not None
        and (owner := _watched[module].owner()) is not None
        and (owner not in tree_owners or _is_pending(module, name))
    ]


def late_modules(owners: Iterable[NamedUnit]) -> Iterator[tuple[str, nn.Module]]:
    """The modules that units' modules were given after `fully_shard`, outer ones first, with their full names.

    Args:
        owners: The parameters of a tree's units.
    """
    for module, prefix, name in _registrations_of(set(owners)):
        if (added := module._modules.get(name)) is not None:
            yield from added.named_modules(prefix=prefix + name)


def _registrations_of(owners: Collection[NamedUnit]) -> Iterator[tuple[nn.Module, str, str]]:
    """The units' modules that were given something, each with the prefix of its names and the name in it."""
    for reference, name in registrations:
        if (module := reference()) is None or (watched := _watched.get(module)) is None:
            continue
        if (owner := watched.owner()) is not None and owner in owners:
            yield module, owner.prefix + watched.prefix, name


def _late_names(owners: Collection[NamedUnit]) -> list[str]:
    """The names of trainable parameters in no unit, each parameter once."""
    names: dict[nn.Parameter, str] = {}
    for module, prefix, name in _registrations_of(owners):
        for late_name, parameter in _parameters_at(module, name):
            if parameter.requires_grad and not is_sharded(parameter):
                names.setdefault(parameter, prefix + late_name)
    return list(names.values())


def _is_pending(module: nn.Module, name: str) -> bool:
    return any(not is_sharded(parameter) for _, parameter in _parameters_at(module, name))


def _parameters_at(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Parameter]]:
    if (parameter := module._parameters.get(name)) is not None:
        yield name, parameter
    elif (inner := module._modules.get(name)) is not None:
        yield from inner.named_parameters(prefix=name)
