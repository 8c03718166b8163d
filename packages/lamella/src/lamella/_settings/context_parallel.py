"""Checks between `--context-parallel` and other options, each refused in one line before anything starts."""

from collections.abc import Iterator

from lamella._settings.conflicts import problems
from lamella._settings.options import ConfigError
from lamella._settings.sections import DataConfig, Packing, ParallelConfig, RunConfig


def check_context_parallel(data: DataConfig, parallel: ParallelConfig, run: RunConfig) -> None:
    """Refuse options that do not go with sequences cut over ranks.

    Raises:
        ConfigError: Names both options and a way out.
    """
    if data.packing != "auto":
        check_packing(data.packing, parallel)
    if parallel.context_parallel > 1 and (problem := next(_problems(parallel, run), None)) is not None:
        raise ConfigError(problem)


def check_packing(packing: Packing, parallel: ParallelConfig) -> None:
    """Refuse sequences of several documents that do not see each other, where sequences are cut.

    Args:
        packing: How the run's documents become sequences.
        parallel: The settings of sharding.

    Raises:
        ConfigError: Names both options and a way out.
    """
    if parallel.context_parallel > 1 and packing == "documents":
        raise ConfigError(
            "Expected --context-parallel with sequences of one document each or of one stream, got packed documents, "
            "which a piece of a sequence cannot keep apart. Pass --packing none or --packing stream."
        )


def _problems(parallel: ParallelConfig, run: RunConfig) -> Iterator[str]:
    excluded = {
        f"--tensor-parallel {parallel.tensor_parallel}": parallel.tensor_parallel > 1,
        f"--experts {parallel.experts}": parallel.experts > 1,
        "--compile, which was not tried on pieces of many lengths": bool(parallel.compile),
        "--sample, whose texts grow by a token at a time": bool(run.sample),
    }
    return problems("--context-parallel", parallel.context_parallel, parallel.ranks, excluded)
