"""Checks between `--capture` and other options, each refused in one line before anything starts."""

from lamella._settings.conflicts import exclusions
from lamella._settings.options import ConfigError
from lamella._settings.sections import DataConfig, OptimConfig, Packing, ParallelConfig


def check_capture(data: DataConfig, optim: OptimConfig, parallel: ParallelConfig) -> None:
    """Refuse options that do not go with a step captured in a CUDA graph.

    Raises:
        ConfigError: Names both options and a way out.
    """
    if not parallel.capture:
        return
    if data.packing != "auto":
        check_capturable(data.packing, parallel, has_answers=False)
    if (problem := capture_problem(data, optim, parallel)) is not None:
        raise ConfigError(problem)


def check_capturable(packing: Packing, parallel: ParallelConfig, *, has_answers: bool) -> None:
    """Refuse text whose batches differ in shape, or in their number of targets, where steps are captured.

    Args:
        packing: How the run's documents become sequences.
        parallel: The settings of sharding.
        has_answers: The loss may leave tokens out.

    Raises:
        ConfigError: Names both options and a way out.
    """
    if parallel.capture and (packing != "stream" or has_answers):
        kind = "conversations or completions" if has_answers else f"--packing {packing}"
        raise ConfigError(
            f"Expected --capture with plain text in --packing stream, got {kind}, whose batches differ in shape or in "
            "number of targets. Leave --capture out."
        )


def capture_problem(data: DataConfig, optim: OptimConfig, parallel: ParallelConfig) -> str | None:
    """Return an error about the first option that does not go with a captured step; None if every option does."""
    excluded = {
        "--streaming, whose numbers of targets come with the batches": data.streaming,
        f"--optimizer {optim.optimizer}, which was not tried in a graph": optim.optimizer != "adamw",
        f"--states {optim.states}, which were not tried in a graph": optim.states != "fp32",
        "--rest cpu, where the host steps": parallel.rest == "cpu",
        f"--experts {parallel.experts}, whose numbers of tokens the host reads": parallel.experts > 1,
        "--offload-activations, which was not tried in a graph": parallel.offload_activations,
        "--tensor-parallel, which was not tried in a graph": parallel.tensor_parallel > 1,
        "--context-parallel, which was not tried in a graph": parallel.context_parallel > 1,
    }
    return next(exclusions("--capture", excluded), None)
