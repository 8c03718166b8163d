"""Checks between the options of adapters and others, each refused in one line before anything starts."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lamella._settings.options import ConfigError

if TYPE_CHECKING:
    from lamella._settings.config import Config


def check_lora(config: "Config") -> None:
    """Refuse options of adapters without `--lora-rank`, and options that do not go with adapters.

    Raises:
        ConfigError: Names both options and a way out.
    """
    problems = _without_rank(config) if config.model.lora_rank is None else _beside_adapters(config)
    if (problem := next(problems, None)) is not None:
        raise ConfigError(problem)


def _without_rank(config: "Config") -> Iterator[str]:
    model = config.model
    options = {"--dora": model.dora, "--lora-alpha": model.lora_alpha, "--lora-targets": model.lora_targets}
    for flag, setting in options.items():
        if setting:
            yield f"Expected --lora-rank with {flag}, got none. Pass --lora-rank 16, or leave {flag} out."


def _beside_adapters(config: "Config") -> Iterator[str]:
    rank = config.model.lora_rank
    if config.optim.train:
        yield (
            f"Expected --lora-rank without --train, since adapters alone are trained, got both, {rank} and "
            f"{' '.join(config.optim.train)}. Leave one of them out; --lora-targets chooses layers."
        )
    if config.parallel.float8 != "no":
        yield (
            f"Expected --lora-rank without --float8, got both, {rank} and {config.parallel.float8}. Leave one of them "
            "out."
        )
