"""Attaches an `FSDPState` to the modules of a unit, and looks the state up again."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator, Sequence
from typing import cast

import torch.distributed.fsdp as fsdp2
import torch.nn as nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed._composable_state import _module_state_mapping

from lamella_engine._modules.private_view import StateView
from lamella_engine._modules.state import STATE, FSDPState, find_state
from lamella_engine._streams.streams import Accelerator
from lamella_engine._unit.unit import Unit

_TORCHS_FUNCTION = inspect.unwrap(fsdp2.fully_shard)  # bound here: `install()` rebinds torch's name to lamella's


def attach_state(
    modules: Sequence[nn.Module], state: FSDPState, view: StateView, *, former_modules: Sequence[nn.Module]
) -> None:
    """Give the modules of a unit its state, past `nn.Module.__setattr__`, and mark them as torch marks its own units.

    By the marks `torch.distributed._composable.replicate` leaves the modules alone, and readers of FSDP2's state find a
    view.

    Args:
        modules: The unit's modules.
        state: The unit's state.
        view: The state under FSDP2's names.
        former_modules: Modules of former units, whose parameters the unit took over.
    """
    # Weak: the view holds the state. The modules' attributes below keep both alive.
    state.unit.view = weakref.ref(view)
    for module in (*modules, *former_modules):
        module.__dict__[STATE] = state
        module.__dict__.setdefault(STATE_KEY, {})[_TORCHS_FUNCTION] = view
        module.__dict__.setdefault(REGISTRY_KEY, {})["fully_shard"] = RegistryItem()
        _module_state_mapping[module] = weakref.ref(view)  # type: ignore[arg-type]  # shown as torch's `FSDPState`


def view_of(module: object) -> StateView | None:
    """A unit's state under FSDP2's names, or None for a module without a unit."""
    state = find_state(module)
    return None if state is None else cast(StateView, state.unit.view())


def unit_of(module: object) -> Unit | None:
    """The unit that a module is, alone or with others; None for a module that is none."""
    state = find_state(module)
    return None if state is None else state.unit


def is_torchs_unit(module: nn.Module) -> bool:
    """Whether torch's own `fully_shard` has made the module a unit."""
    return _TORCHS_FUNCTION in vars(module).get(STATE_KEY, {}) and find_state(module) is None


def state_of(module: object) -> FSDPState:
    """A unit's state."""
    state = find_state(module)
    assert state is not None, f"{type(module).__name__} has FSDPModule's methods but no state"
    return state


def units_of(module: object, recurse: bool) -> Iterator[Unit]:
    """A unit and, with `recurse`, all units below, each once."""
    assert isinstance(module, nn.Module)
    states = (find_state(inner) for inner in (module.modules() if recurse else (module,)))
    yield from dict.fromkeys(state.unit for state in states if state is not None)  # several modules may share one


def run_on(model: nn.Module, accelerator: Accelerator) -> None:
    """Put the work of a model's units on the streams of an accelerator, in place of torch's for the device.

    Args:
        model: The outermost unit, which has not run yet.
        accelerator: Stands in for `torch.cuda` or `torch.cpu`, for example to record the work of each stream.
    """
    for unit in units_of(model, recurse=True):
        unit.parameters.context.streams.run_on(accelerator)


def unit_state_of(module: object, expects: str = "Expects FSDPModule") -> FSDPState:
    """The state of a module that a user listed in `modules`.

    Args:
        module: One of the list.
        expects: FSDP2's words for the expected kind.

    Raises:
        ValueError: The module is no unit.
    """
    state = find_state(module)
    if state is None:
        raise ValueError(
            f"Expected `modules` to be a list of units, got {type(module).__name__} in it. {expects} but got "
            f"{type(module)}: {module}. Call fully_shard on it."
        )
    return state
