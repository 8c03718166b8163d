"""Checks between `--deterministic` and options whose kernels are not known to be so."""

from collections.abc import Iterator

from lamella._settings.options import ConfigError
from lamella._settings.sections import ModelConfig, ParallelConfig, RunConfig


def check_deterministic(run: RunConfig, model: ModelConfig, parallel: ParallelConfig) -> None:
    """Refuse options beside `--deterministic` whose kernels may add in another order in the next process.

    Raises:
        ConfigError: Names both options.
    """
    problems = _problems(model, parallel) if run.deterministic else iter(())
    if (problem := next(problems, None)) is not None:
        raise ConfigError(f"Expected --deterministic without {problem}, got both. Leave one of them out.")


def _problems(model: ModelConfig, parallel: ParallelConfig) -> Iterator[str]:
    if model.kernels != "none":
        yield f"--kernels {model.kernels}, whose kernels are not known to add in one order"
    if parallel.compile:
        yield "--compile, which chooses kernels by their time in each process"
