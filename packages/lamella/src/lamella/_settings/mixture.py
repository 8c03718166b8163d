"""The weights of a mixture of named sources: `--mixture wiki=0.7 code=0.3`."""

import math
from collections.abc import Mapping

from lamella._settings.named_texts import named_texts
from lamella._settings.options import ConfigError, shown
from lamella._settings.sections import DataConfig


def check_texts(config: DataConfig) -> None:
    """Refuse paths of which only some have names, and weights of other names than those of the sources.

    Raises:
        ConfigError: Names the option and the names.
    """
    named_texts("--validation-data", config.validation_paths)
    mixture_weights(config)


def mixture_weights(config: DataConfig) -> Mapping[str, float]:
    """Return the weight of each source, in the order of the sources; empty without a mixture.

    Raises:
        ConfigError: A weight is no number above 0, or the names are not those of the sources.
    """
    sources = [name for name in named_texts("--data", config.paths) if name]
    weights = dict(map(weight_of_source, config.mixture))
    if not weights:
        return {}
    if len(weights) < len(config.mixture) or {*weights} != {*sources}:
        raise ConfigError(
            f"Expected in --mixture each name of --data once, {', '.join(sources) or 'of which there are none'}, got "
            f"{', '.join(config.mixture)}. Pass the sources as --data NAME=PATH and their weights as --mixture NAME=X."
        )
    return {name: weights[name] for name in sources}


def weight_of_source(text: str) -> tuple[str, float]:
    """Return the name and the weight of NAME=X.

    Raises:
        ConfigError: The weight is no number above 0.
    """
    name, _, number = text.partition("=")
    try:
        weight = float(number)
    except ValueError:
        weight = math.nan
    if not (name and 0 < weight < math.inf):
        raise ConfigError(f"Expected --mixture to be of NAME=X with a weight X above 0, got {shown(text)}.")
    return name, weight
