"""The trained parameters of a run, chosen by patterns of their names; all others are frozen.

Note [Frozen weights at rest]
    The forward of a bf16 run takes each weight in bf16, and updates of the optimizer need the bits beyond. A frozen
    weight has no updates: published in bf16, the weight rests in bf16, half as large in memory and in checkpoints, and
    the forward takes the same numbers.
"""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from lamella._model.lora import ADAPTERS
from lamella._settings.config import Config
from lamella._settings.options import ConfigError, nearest
from lamella_transformers import fp32_parameters


def trained_patterns(config: Config) -> tuple[str, ...]:
    """Return the patterns of a run's trained parameters: `--train`, or the adapters' patterns; none for all."""
    return config.optim.train if config.model.lora_rank is None else ADAPTERS


def check_trained(names: Iterable[str], patterns: Sequence[str]) -> None:
    """Refuse patterns that match no parameter.

    Args:
        names: The names of the model's parameters.
        patterns: `--train`.

    Raises:
        ConfigError: Names the pattern, and the nearest parameter or the first.
    """
    names = list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            hint = nearest(pattern, names) or f" The first parameter is {names[0]!r}; a folder of names ends in '*'."
            raise ConfigError(f"Expected --train to match a parameter of the model, got {pattern!r}.{hint}")


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters without a matching pattern; without patterns none is frozen."""
    for name, parameter in model.named_parameters() if patterns else ():
        parameter.requires_grad_(is_trained(name, patterns))


def narrow_frozen(model: nn.Module, config: Config, weights_dtype: torch.dtype) -> None:
    """Let frozen weights of a bf16 run rest in bf16, if they were published so; see Note [Frozen weights at rest].

    Weights that the forward takes in fp32, and weights of units in float8, rest in fp32.

    Args:
        model: With the run's adapters, without memory, before it is sharded. Changed in place.
        config: The run's settings.
        weights_dtype: The dtype of the weights that the run starts from.
    """
    parallel, patterns = config.parallel, trained_patterns(config)
    if (parallel.precision, parallel.float8, weights_dtype) != ("bf16", "no", torch.bfloat16):
        return
    dtype_in_forward = fp32_parameters(model) or (lambda parameter: None)
    for name, parameter in model.named_parameters():
        if not is_trained(name, patterns) and dtype_in_forward(parameter) is None:
            parameter.data = parameter.data.to(torch.bfloat16)


def is_trained(name: str, patterns: Sequence[str]) -> bool:
    """True for the name of a trained parameter."""
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


def trained_line(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Return a line on the trained share of the parameters; none without patterns."""
    if not patterns:
        return []
    numels = {name: parameter.numel() for name, parameter in model.named_parameters()}
    trained = sum(numel for name, numel in numels.items() if is_trained(name, patterns))
    return [f"trained: {trained:,} of {sum(numels.values()):,} parameters; the others are frozen"]
