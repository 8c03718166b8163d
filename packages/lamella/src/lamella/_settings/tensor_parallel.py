"""Checks between `--tensor-parallel` and other options, each refused in one line before anything starts."""

from collections.abc import Iterator

from lamella._settings.conflicts import problems
from lamella._settings.options import ConfigError
from lamella._settings.sections import ModelConfig, OptimConfig, ParallelConfig


def check_tensor_parallel(model: ModelConfig, optim: OptimConfig, parallel: ParallelConfig) -> None:
    """Refuse options that do not go with matrices cut over ranks.

    Raises:
        ConfigError: Names both options and a way out.
    """
    if parallel.tensor_parallel > 1 and (problem := next(_problems(model, optim, parallel), None)) is not None:
        raise ConfigError(problem)


def _problems(model: ModelConfig, optim: OptimConfig, parallel: ParallelConfig) -> Iterator[str]:
    excluded = {
        f"--experts {parallel.experts}, whose ranks have different tokens": parallel.experts > 1,
        f"--replicate {parallel.replicate}, which shards over ranks of one instance alone": parallel.replicate > 1,
        f"--float8 {parallel.float8}, whose products know whole matrices alone": parallel.float8 != "no",
        f"--lora-rank {model.lora_rank}, whose adapters no plan names": model.lora_rank is not None,
        "--compile, which fails on cut layers over rows of many lengths": bool(parallel.compile),
        "--optimizer muon, whose layout takes no cut tensor": optim.optimizer == "muon",
    }
    return problems("--tensor-parallel", parallel.tensor_parallel, parallel.ranks, excluded)
