"""The report of a run whose GPU memory ran out: the estimate beside it, and options that would help."""

from typing import Final

from lamella._estimate.api import estimate_run
from lamella._estimate.choice import leaner_options
from lamella._model.capture import captures
from lamella._processes.launch import WorkerError
from lamella._settings.config import Config
from lamella._settings.options import ConfigError
from lamella._settings.sizes import size

_NAME: Final = "OutOfMemoryError"


def with_estimate(error: WorkerError, config: Config) -> WorkerError:
    """Return the error of a worker, with the estimate and options that take less memory where its memory ran out.

    Args:
        error: Its message holds the traceback, which says how much was allocated.
        config: The run's settings.

    Effects: where memory ran out, as `estimate_run`, for three settings.
    """
    if _NAME not in str(error):
        return error
    try:
        estimate = estimate_run(config)
    except ConfigError as refusal:  # A run may have settings that no estimate has.
        return WorkerError(error.rank, f"{error.report}\nno estimate: {refusal}")
    peak = estimate.peak
    kinds = ", ".join(f"{kind} {size(nbytes)}" for kind, nbytes in peak.kinds.items())
    lines = [
        f"estimate: {size(estimate.total_nbytes)} a GPU, most at {peak.name!r} ({kinds}).",
        *(f"with {option.fields.flags()}: {size(option.estimate.total_nbytes)}." for option in leaner_options(config)),
    ]
    if captures(config):
        lines.append("with --no-capture: validations take their memory from a step's, which a graph keeps.")
    return WorkerError(error.rank, "\n".join([error.report, *lines]))
