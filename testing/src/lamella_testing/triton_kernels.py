"""Triton's kernels of other libraries, compiled in one of their configurations."""

import importlib
import math
from typing import Any


def limit_autotuning() -> None:
    """Let Triton's kernels that are defined from here on take their cheapest configuration.

    To try all configurations of mamba-ssm's and flash-linear-attention's kernels, each process compiles for minutes.
    """
    autotuner = importlib.import_module("triton.runtime.autotuner").Autotuner
    initialize = autotuner.__init__

    def initialize_with_one_configuration(tuner: Any, *args: Any, **kwargs: Any) -> None:
        initialize(tuner, *args, **kwargs)
        tuner.configs = [min(tuner.configs, key=_block_size)]

    autotuner.__init__ = initialize_with_one_configuration


def _block_size(configuration: Any) -> int:
    """The elements of a block in all stages: shared memory grows with them."""
    sizes = [size for size in configuration.kwargs.values() if type(size) is int and size > 0]
    return math.prod([*sizes, int(configuration.num_stages)])
