"""Steps captured in one CUDA graph: the runs that capture by default."""

from typing import Final

from torch import nn

from lamella._model.compilation import COMPILED_TYPES
from lamella._settings.capture import capture_problem
from lamella._settings.config import Config

_MOST_WEIGHTS: Final = 500_000_000
"""The host is the limit below: a graph multiplies the speed of 124 million weights by 2.3 to 2.8, of 1.1 billion by
1.03. It keeps the memory of a step."""


def captures_by_default(config: Config, model: nn.Module, model_type: str, *, is_plain_stream: bool) -> bool:
    """Return whether a run captures its steps without --capture and --no-capture: if measured to be faster.

    Args:
        config: The run's settings, with a device.
        model: The run's model, whose weights are counted.
        model_type: The type of the model's config.
        is_plain_stream: The run's sequences are cut from one stream, and every token is a target.
    """
    data, optim, parallel, run = config.data, config.optim, config.parallel, config.run
    return (
        parallel.capture is None
        and parallel.device == "cuda"
        and is_plain_stream
        and model_type in COMPILED_TYPES
        and capture_problem(data, optim, parallel) is None
        and (config.model.attention, config.model.kernels, config.model.lora_rank) == ("auto", "none", None)
        and (parallel.ranks, parallel.recompute, parallel.float8) == (1, "no", "no")
        and not (run.deterministic or run.profile)
        and sum(parameter.numel() for parameter in model.parameters()) <= _MOST_WEIGHTS
    )
