"""Checks between `--deterministic` and options whose kernels are not known to be so."""

from collections.abc import Iterator

from lamella._settings.conflicts import exclusions
from lamella._settings.options import ConfigError
from lamella._settings.sections import ModelConfig, ParallelConfig, RunConfig


def check_deterministic(run: RunConfig, model: ModelConfig, parallel: ParallelConfig) -> None:
    """Refuse options beside `--deterministic` whose kernels may add in another order in the next process.

    Raises:
        ConfigError: Names both options.
    """
    problems = _problems(model, parallel) if run.deterministic else iter(())
    if (problem := next(problems, None)) is not None:
        raise ConfigError(problem)


def _problems(model: ModelConfig, parallel: ParallelConfig) -> Iterator[str]:
    excluded = {
        f"--kernels {model.kernels}, whose kernels are not known to add in one order": model.kernels != "none",
        f"--attention {model.attention}, whose kernels are not known to add in one order": (
            model.attention not in ("auto", "eager", "sdpa")
        ),
        "--compile, which chooses kernels by their time in each process": bool(parallel.compile),
    }
    return exclusions("--deterministic", excluded)
