"""The states of this process's random generators, as one value of a checkpoint's `extra`."""

import random
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import torch

from lamella_files import short


def random_states() -> dict[str, Any]:
    """The states of Python's, NumPy's, torch's and the current accelerator's generators, for `extra` of a save.

    Each rank's states come back on the same rank:

        save(path, model=model, optimizer=optimizer, extra={"step": step, "random": random_states()})
        extra = load(path, model=model, optimizer=optimizer)
        restore_random_states(extra["random"])

    Generators that a program makes (`torch.Generator`, `numpy.random.default_rng`) are not included: their
    `get_state()`, and `bit_generator.state`, are values of `extra` like any other.

    Effects: no collective. Copies the state of the current device's generator to the host, if torch has
        initialized the accelerator.
    """
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None:
        module = torch.get_device_module(accelerator)
        if module.is_initialized():
            states[accelerator.type] = module.get_rng_state()
    return states


def restore_random_states(states: Mapping[str, Any] | None) -> None:
    """Set the generators to states of `random_states`, after a load.

    Args:
        states: The loaded value. None, which a rank has that did not save (`load` on more ranks), leaves all
            generators as they are, with a warning: seed such a rank by its number.

    Raises:
        ValueError: Not the value of `random_states`.

    Effects: no collective. The accelerator's state is set on the current device. States of an absent accelerator are
        left out, with a warning.
    """
    if states is None:
        warnings.warn(
            "Expected this rank's random states, got none: fewer ranks saved. Its generators stay as they are; seed "
            "them by the rank's number.",
            stacklevel=2,
        )
        return
    if not _SETTERS.keys() <= {*states}:
        raise ValueError(f"Expected the value of `random_states()`, with {sorted(_SETTERS)}, got {short(states)}.")
    for name, state in states.items():
        setter = _SETTERS[name] if name in _SETTERS else _setter_of_device(name)
        if setter is not None:
            setter(state)


_SETTERS: Final[Mapping[str, Callable[[Any], object]]] = {
    "python": random.setstate,
    "numpy": np.random.set_state,
    "torch": torch.set_rng_state,
}


def _setter_of_device(kind: str) -> Callable[[Any], object] | None:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or accelerator.type != kind:
        present = "none" if accelerator is None else accelerator.type
        warnings.warn(f"Expected the accelerator {kind!r} of the random states, got {present}. Left out.", stacklevel=3)
        return None
    setter: Callable[[Any], object] = torch.get_device_module(accelerator).set_rng_state
    return setter
