"""The works of a run's step: recorded by the estimate's own step, for all microbatches of the run."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from lamella._estimate.api import record_module
from lamella._estimate.host_times import HOOKS
from lamella._estimate.recipe_step import record_recipe
from lamella._estimate.recorded_step import FORWARD_BEGINS, RecordedStep, forwards_of_units
from lamella._plan.recording import WorkRecorder, recorder_watch
from lamella._plan.works import Work, part_of, repeated
from lamella._settings.config import Config
from lamella._settings.options import ConfigError
from lamella._settings.sections import ParallelConfig


class RecordedWorks(NamedTuple):
    """A step's works, with the record of memory.

    Attributes:
        works: The works of a step, in the order of the host.
        step: The changes of live bytes, for an estimate.
    """

    works: list[Work]
    step: RecordedStep


def record_works(config: Config, rank: int = 0) -> RecordedWorks:
    """Record the works of a step on one rank of a run.

    Args:
        config: The run's settings, with ranks, device and precision.
        rank: The rank.

    Raises:
        ConfigError: The settings cannot be met, or include work without a price.

    Effects: as `record_recipe`.
    """
    parallel = config.parallel
    host_copies = "copies to the host's memory"
    for flag, work, is_set in (
        ("--rest cpu", host_copies, parallel.rest == "cpu"),
        ("--offload-activations", host_copies, parallel.offload_activations),
        ("--tensor-parallel", "sums of hidden states", parallel.tensor_parallel > 1),
        ("--context-parallel", "gathers of keys and values", parallel.context_parallel > 1),
    ):
        if is_set:
            raise ConfigError(
                f"Expected a plan of work that has a price, got {flag}, whose {work} have none. Leave the option out."
            )
    recorders: list[WorkRecorder] = []
    # A compiled layer's graph runs a fused kernel's operators singly: eager operators are as near.
    config = replace(config, parallel=replace(parallel, compile=False))
    step = record_recipe(config, rank, recorder_watch(recorders), validates=False)
    works = with_hooks(works_of(recorders[0], step), parallel)
    return RecordedWorks(with_microbatches(works, config.optim.accumulation), step)


def record_module_works(module: nn.Module, **options: Any) -> RecordedWorks:
    """Record the works of a step of any training loop over `fully_shard`.

    Args:
        module: On the meta device, not sharded. Sharded in place.
        options: Options of `record_module` but `watch`.

    Raises and effects: as `record_module`.
    """
    recorders: list[WorkRecorder] = []
    step = record_module(module, watch=recorder_watch(recorders), **options)
    return RecordedWorks(works_of(recorders[0], step), step)


def works_of(recorder: WorkRecorder, step: RecordedStep) -> list[Work]:
    """Return the works of the recorded step."""
    first = next(index for index, moment in enumerate(recorder.moment_of) if moment >= step.first_moment)
    return part_of(recorder.works, first)


def with_hooks(works: Sequence[Work], parallel: ParallelConfig) -> list[Work]:
    """Return works with the host's time for the hooks and modes of recomputed layers.

    Args:
        works: The works of a step.
        parallel: Tells the recomputed layers, and the kind of recomputation.
    """
    recomputed = forwards_of_units(work.moment for work in works)[: parallel.recompute_layers]
    return [work._replace(hooks=HOOKS[parallel.recompute]) if work.moment in recomputed else work for work in works]


def with_microbatches(works: Sequence[Work], count: int) -> list[Work]:
    """Return the works of a step of any number of microbatches, from the works of at most three."""
    begins = [
        index
        for index, work in enumerate(works)
        if work.moment == FORWARD_BEGINS and (index == 0 or works[index - 1].moment != FORWARD_BEGINS)
    ]
    if count <= 3 or len(begins) < 3:
        return [*works]
    return repeated(works, begins[1], begins[2], count - 2)
