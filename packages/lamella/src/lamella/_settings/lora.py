"""Checks between the options of adapters and others, each refused in one line before anything starts."""

from collections.abc import Iterator

from lamella._settings.options import ConfigError
from lamella._settings.sections import ModelConfig, OptimConfig, ParallelConfig


def check_lora(model: ModelConfig, optim: OptimConfig, parallel: ParallelConfig) -> None:
    """Refuse options of adapters without `--lora-rank`, and options that do not go with adapters.

    Raises:
        ConfigError: Names both options and a way out.
    """
    problems = _without_rank(model) if model.lora_rank is None else _beside_adapters(model, optim, parallel)
    if (problem := next(problems, None)) is not None:
        raise ConfigError(problem)


def _without_rank(model: ModelConfig) -> Iterator[str]:
    options = {"--dora": model.dora, "--lora-alpha": model.lora_alpha, "--lora-targets": model.lora_targets}
    for flag, setting in options.items():
        if setting:
            yield f"Expected --lora-rank with {flag}, got none. Pass --lora-rank 16, or leave {flag} out."


def _beside_adapters(model: ModelConfig, optim: OptimConfig, parallel: ParallelConfig) -> Iterator[str]:
    rank = model.lora_rank
    if optim.train:
        yield (
            f"Expected --lora-rank without --train, since adapters alone are trained, got both, {rank} and "
            f"{' '.join(optim.train)}. Leave one of them out; --lora-targets chooses layers."
        )
    if parallel.float8 != "no":
        yield (f"Expected --lora-rank without --float8, got both, {rank} and {parallel.float8}. Leave one of them out.")
