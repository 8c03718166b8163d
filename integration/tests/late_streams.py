"""What tests of late streams share: batches with a row for each microbatch of four ranks, and streams that sleep."""

from dataclasses import replace
from random import Random

import torch
import torch.distributed as dist
from torch import nn

from lamella_engine._context import Context
from lamella_integration.tasks import TASKS, Batch, Task

LONGEST_SLEEP = 400_000  # cycles: 0.2 ms, longer than any of these models' kernels and copies


def _two_rows_a_rank(task: Task) -> Task:
    """Two batches as one, so that each of four ranks has a row for either microbatch."""

    def draw(generator: torch.Generator) -> Batch:
        (x, y), (more_x, more_y) = task.draw(generator), task.draw(generator)
        return torch.cat([x, more_x]), torch.cat([y, more_y])

    return replace(task, draw=draw)


LLAMA, ODD = _two_rows_a_rank(TASKS["llama"]), TASKS["odd"]


def delay_streams(model: nn.Module, context: Context) -> None:
    """Let one stream or another sleep at random points of forward and backward; on each rank others."""
    choose = Random(dist.get_rank())
    engines = [context.all_gather_stream, context.reduce_scatter_stream]
    engines += [context.all_reduce_stream, context.update_stream]

    def delay(*_: object) -> None:
        if choose.random() < 0.3:
            with context.on(choose.choice([context.compute_stream, *engines])):
                torch.cuda._sleep(choose.randrange(LONGEST_SLEEP))

    for module in model.modules():
        module.register_forward_pre_hook(delay)
        module.register_forward_hook(delay)
        if not list(module.children()):
            module.register_full_backward_pre_hook(delay)
