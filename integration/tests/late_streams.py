"""Set-ups of tests of late streams: batches with a row for each microbatch of four ranks, and sleeping streams."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import torch
import torch.distributed as dist
from torch import nn

from lamella_engine.testing import Streams, streams_of
from lamella_integration.repeatable import use_repeatable_kernels
from lamella_integration.tasks import TASKS, Batch, Task, Trace, TrainingSettings, train
from lamella_testing import run_ranks

LONGEST_SLEEP = 400_000  # cycles: 0.2 ms, longer than any of the models' kernels and copies


def _two_rows_a_rank(task: Task) -> Task:
    """Join two batches, so that each of four ranks has a row for either microbatch."""

    def draw(generator: torch.Generator) -> Batch:
        (x, y), (more_x, more_y) = task.draw(generator), task.draw(generator)
        return torch.cat([x, more_x]), torch.cat([y, more_y])

    return replace(task, draw=draw)


LLAMA, ODD = _two_rows_a_rank(TASKS["llama"]), TASKS["odd"]


def delay_streams(model: nn.Module, streams: Streams) -> None:
    """Let random streams sleep at random points of forward and backward, differently on each rank."""
    choose = Random(dist.get_rank())
    engines = [streams.all_gather_stream, streams.reduce_scatter_stream, streams.all_reduce_stream]

    def delay(*_: object) -> None:
        if choose.random() < 0.3:
            with streams.on(choose.choice([streams.compute_stream, *engines])):
                torch.cuda._sleep(choose.randrange(LONGEST_SLEEP))  # type: ignore[no-untyped-call]

    for module in model.modules():
        module.register_forward_pre_hook(delay)
        module.register_forward_hook(delay)
        if not list(module.children()):
            module.register_full_backward_pre_hook(delay)


def assert_no_bit_changes_when_late(
    task: Task,
    sharded: Callable[[], nn.Module],
    recipe: TrainingSettings,
    num_ranks: int,
    training: Callable[[Task, nn.Module, TrainingSettings], Trace] = train,
) -> None:
    """Train twice, with punctual and with late streams: a missing wait shows as a changed bit.

    Args:
        task: With a row for each microbatch of every rank.
        sharded: Makes the model; called on each rank, once for either run.
        recipe: Steps and learning rate of both runs.
        num_ranks: Number of ranks, each on a GPU.
        training: How a run goes.
    """

    def traces() -> tuple[Trace, Trace]:
        use_repeatable_kernels()
        punctual = training(task, sharded(), recipe)
        model = sharded()
        delay_streams(model, streams_of(model))
        return punctual, training(task, model, recipe)

    for punctual, late in run_ranks(traces, num_ranks, device="cuda"):
        assert late.losses == punctual.losses
        assert late.grad_norms == punctual.grad_norms
        torch.testing.assert_close(late.weights, punctual.weights, rtol=0.0, atol=0.0)
