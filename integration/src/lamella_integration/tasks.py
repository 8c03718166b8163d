"""Small training tasks with results independent of sharding, and a training loop.

A batch is global; a rank trains on its rows of the batch, microbatch by microbatch, and losses are means over rows of
equal weight. One process and any number of ranks dividing the rows therefore take the same steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from lamella_integration.llama import SIZES, Llama, next_token_loss
from lamella_integration.mlp import Mlp
from lamella_integration.reference import ReferenceModel, init_weights

NUM_ROWS = 4

Batch = tuple[torch.Tensor, torch.Tensor]


# `fully_shard` of lamella or of torch, with options that only one of the two may know.
FullyShard = Callable[..., object]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model, its data and its loss."""

    build: Callable[[], ReferenceModel]
    draw: Callable[[torch.Generator], Batch]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    def batch(self, step: int) -> Batch:
        """Return the global batch of a step, on the CPU. Two batches alternate, so the model can learn both."""
        return self.draw(torch.Generator().manual_seed(step % 2))

    def model(self, *, device: torch.device | str = "cpu", seed: int = 0) -> ReferenceModel:
        """Make the unsharded model with its initial weights."""
        with torch.device(device):
            model = self.build()
        init_weights(model, seed)
        return model


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """Settings of training.

    Attributes:
        reduce_every_microbatch: With several microbatches, reduce gradients after each instead of after the last.
        foreach: Argument of `torch.optim.AdamW`. False rounds each element alike for any list of shards: for some lists
            torch runs single-tensor kernels, which round differently from multi-tensor kernels.
    """

    num_steps: int = 20
    learning_rate: float = 3e-3
    num_microbatches: int = 1
    reduce_every_microbatch: bool = True
    max_norm: float | None = None
    foreach: bool | None = None


@dataclass(kw_only=True)
class Trace:
    """The results of training: global losses, gradient norms before clipping, final unsharded weights."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def _draw_tokens(generator: torch.Generator) -> Batch:
    tokens = torch.randint(SIZES["tiny"].vocab_size, (NUM_ROWS, 17), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def _draw_points(generator: torch.Generator) -> Batch:
    x = torch.randn(NUM_ROWS * 8, 5, generator=generator)
    return x, x[:, :2]


def _squared_error(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    # Cast to the labels' dtype: on CUDA, torch's backward of a loss of two dtypes raises.
    return F.mse_loss(outputs.to(labels.dtype), labels)


TASKS = {
    "llama": Task(build=lambda: Llama(SIZES["tiny"]), draw=_draw_tokens, loss=next_token_loss),
    "tied": Task(
        build=lambda: Llama(replace(SIZES["tiny"], tied_embedding=True)), draw=_draw_tokens, loss=next_token_loss
    ),
    "odd": Task(build=Mlp, draw=_draw_points, loss=_squared_error),
}


def shard(model: ReferenceModel, fully_shard: FullyShard, **options: object) -> ReferenceModel:
    """Shard the model's units, then the root."""
    for unit in model.units():
        fully_shard(unit, **options)
    fully_shard(model, **options)
    return model


def train(
    task: Task,
    model: nn.Module,
    recipe: TrainingSettings,
    prepare: Callable[[torch.optim.Optimizer], object] = lambda optimizer: None,
) -> Trace:
    """Train on this rank's rows of each batch; without a process group, on all rows.

    Args:
        task: Data and loss.
        model: Model to train.
        recipe: Settings of training.
        prepare: Called with the optimizer before the first step.

    Effects: with a process group, the collectives of the model, and a collective per loss and weight of the trace.
    """
    trace = Trace()
    optimizer = torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=recipe.learning_rate,
        foreach=recipe.foreach,
    )
    prepare(optimizer)
    device = next(model.parameters()).device
    for step in range(recipe.num_steps):
        microbatches = _microbatches(task.batch(step), recipe.num_microbatches, device)
        trace.losses.append(_mean_over_ranks(_accumulate(task, model, microbatches, recipe)))
        if recipe.max_norm is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), recipe.max_norm)
            trace.grad_norms.append(unsharded(norm).item())
        optimizer.step()
        optimizer.zero_grad()
    trace.weights = {name: unsharded(parameter.detach()).cpu() for name, parameter in model.named_parameters()}
    return trace


def unsharded(tensor: torch.Tensor) -> torch.Tensor:
    """Return the unsharded tensor. Effects: collective over the mesh of a DTensor."""
    if isinstance(tensor, DTensor):
        full: torch.Tensor = tensor.full_tensor()
        return full
    return tensor


def _accumulate(task: Task, model: nn.Module, microbatches: Sequence[Batch], recipe: TrainingSettings) -> torch.Tensor:
    total = torch.zeros(())
    for index, (inputs, labels) in enumerate(microbatches):
        set_sync: Callable[[bool], None] | None = getattr(model, "set_requires_gradient_sync", None)
        if set_sync is not None:
            set_sync(index == len(microbatches) - 1 or recipe.reduce_every_microbatch)
        loss = task.loss(model(inputs), labels) / len(microbatches)
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach().cpu()
    return total


def _microbatches(batch: Batch, num_microbatches: int, device: torch.device) -> list[Batch]:
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    inputs, labels = (tensor.chunk(num_ranks)[rank].to(device) for tensor in batch)
    return list(zip(inputs.chunk(num_microbatches), labels.chunk(num_microbatches), strict=True))


def _mean_over_ranks(loss: torch.Tensor) -> float:
    if not dist.is_initialized():
        return loss.item()
    losses: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(losses, loss.item())
    return sum(losses) / len(losses)
