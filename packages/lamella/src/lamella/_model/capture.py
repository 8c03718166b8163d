"""Steps captured in one CUDA graph: the runs that capture by default."""

import os
from typing import Final

from torch import nn

from lamella._model.spec import load_spec, outline
from lamella._settings.capture import capture_problem
from lamella._settings.config import Config
from lamella._settings.sections import ParallelConfig
from lamella_transformers import ModelSpec

_CAPTURED_TYPES: Final = ("llama",)
"""The model types whose captured steps were measured."""

_MOST_WEIGHTS: Final = 500_000_000
"""A graph makes 2.3 to 2.8 times the tokens of a second of 124 million weights (9.1 times with short sequences on two
GPUs), and 1.03 times those of 1.1 billion. In larger models the gain is small, and the graph holds a step's memory
beside a validation's."""


def captures(config: Config) -> bool:
    """Return whether a run captures its steps, if its text is plain where no packing is chosen.

    Args:
        config: The run's settings, with a device.
    """
    if config.parallel.capture is not None:
        return config.parallel.capture
    spec = load_spec(config.model.name, config.data.vocab_size)
    is_plain_stream = config.data.packing in ("auto", "stream")
    # Without memory, but a large model's modules take a second: only where no setting decides.
    return _was_measured(config, spec, is_plain_stream=is_plain_stream) and _is_small(outline(spec))


def captures_by_default(config: Config, model: nn.Module, spec: ModelSpec, *, is_plain_stream: bool) -> bool:
    """Return whether a run captures its steps without --capture and --no-capture: if measured to be faster.

    Args:
        config: The run's settings, with a device.
        model: The run's model, whose weights are counted.
        spec: The config of the model.
        is_plain_stream: The run's sequences are cut from one stream, and every token is a target.
    """
    return _was_measured(config, spec, is_plain_stream=is_plain_stream) and _is_small(model)


def _was_measured(config: Config, spec: ModelSpec, *, is_plain_stream: bool) -> bool:
    """Return whether captured steps of a run's settings and model type were measured, and no setting decides."""
    data, optim, parallel, run = config.data, config.optim, config.parallel, config.run
    return (
        parallel.capture is None
        and parallel.device == "cuda"
        and is_plain_stream
        and spec.model_type in _CAPTURED_TYPES
        # Positions of other kinds may depend on a batch's length, which the host reads and a graph cannot hold.
        and (getattr(spec, "rope_parameters", None) or {}).get("rope_type") == "default"
        and capture_problem(data, optim, parallel) is None
        and (config.model.attention, config.model.kernels, config.model.lora_rank) == ("auto", "none", None)
        and _has_measured_ranks(parallel)
        and (parallel.recompute, parallel.float8) == ("no", "no")
        and not (run.deterministic or run.profile)
    )


def _has_measured_ranks(parallel: ParallelConfig) -> bool:
    """Return whether captured steps of a run's ranks were measured: one, or two of a host that share each layer."""
    num_of_host = int(os.environ.get("LOCAL_WORLD_SIZE", parallel.ranks or 1))
    sharding = (parallel.stage, parallel.replicate, parallel.reshard_after_forward, parallel.keep_budget)
    return parallel.ranks == 1 or (parallel.ranks == num_of_host == 2 and sharding == (3, 1, True, None))


def _is_small(model: nn.Module) -> bool:
    return sum(parameter.numel() for parameter in model.parameters()) <= _MOST_WEIGHTS
