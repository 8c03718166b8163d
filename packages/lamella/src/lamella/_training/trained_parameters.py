"""The trained parameters of a run, chosen by patterns of their names; all others are frozen."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from lamella._model.lora import ADAPTERS
from lamella._settings.config import Config
from lamella._settings.options import ConfigError, nearest


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
