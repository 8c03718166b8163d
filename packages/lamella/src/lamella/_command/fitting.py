"""`lamella train --memory`: the options with which a run fits, chosen before it starts."""

import os

from lamella._estimate.choice import fit_options
from lamella._estimate.host_times import ASSUMED_HOST
from lamella._processes.placement import place, under_torchrun
from lamella._record.output import log
from lamella._settings.config import Config


def fitted(config: Config, memory: str) -> Config:
    """Return the settings of a run with options that fit into the memory of a GPU.

    Args:
        config: The settings.
        memory: `--memory`.

    Raises:
        ConfigError: No options fit, or the settings cannot be met.

    Effects: rank 0 prints the options. Every rank under torchrun chooses alike, by itself: with the times of an
        assumed host, since no two measure the same.
    """
    options = fit_options(place(config), memory, ASSUMED_HOST if under_torchrun() else None)
    if os.environ.get("RANK", "0") == "0":
        log([*options.lines()])
    return options.config
