"""Runs on some ranks, and their checkpoints, for tests that resume them on others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from lamella_checkpoint import Wanted
from lamella_convert import open_checkpoint
from lamella_layout import Chunk
from lamella_testing.megatron import LENGTH, VOCAB_SIZE, token_losses

BATCH = torch.randint(VOCAB_SIZE, (4, LENGTH + 1), generator=torch.Generator().manual_seed(1))


@dataclass(frozen=True)
class World:
    """Ranks, and the parallel sizes of a model on them."""

    num_ranks: int
    tp: int = 1
    ep: int = 1
    etp: int | None = None
    pp: int = 1

    def __str__(self) -> str:
        expert = "" if self.ep == 1 and self.etp is None else f"-ep{self.ep}-etp{self.etp}"
        return f"{self.num_ranks}ranks-tp{self.tp}{expert}{f'-pp{self.pp}' if self.pp > 1 else ''}"


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 2) -> list[float]:
    """Steps on the data-parallel rank's rows of one batch; the losses of the whole batch."""
    from megatron.core import parallel_state

    num, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    losses = []
    for _ in range(num_steps):
        loss = token_losses(model, BATCH.chunk(num)[rank]).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        for parameter in model.parameters():
            if getattr(parameter, "sequence_parallel", False):  # Each rank saw a part of the tokens.
                assert isinstance(parameter.grad, DTensor)
                dist.all_reduce(parameter.grad.to_local(), group=parallel_state.get_tensor_model_parallel_group())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    mean = torch.stack(losses)
    dist.all_reduce(mean, group=parallel_state.get_data_parallel_group())
    return (mean / num).tolist()  # type: ignore[no-any-return]


def read(path: Path) -> dict[str, torch.Tensor]:
    """All whole tensors of a checkpoint, by native names."""
    source = open_checkpoint(path)
    whole = {name: torch.full(info.shape, -1, dtype=info.dtype) for name, info in source.tensors.items()}
    source.read([Wanted(name, Chunk((0,) * into.ndim, tuple(into.shape)), into) for name, into in whole.items()])
    return whole


def assert_equal(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, rtol: float = 0.0, atol: float = 0.0
) -> None:
    """The same names, and values within the tolerances."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=rtol, atol=atol, msg=name)
