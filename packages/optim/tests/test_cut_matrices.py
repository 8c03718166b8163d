"""Muon over matrices that ranks share: torch's steps of whole matrices to the bit, and equal work for all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from lamella_engine import Rows, ShardingOptions, fully_shard
from lamella_engine.extending import placement_on
from lamella_optim import MuonAndAdam, _cut_matrices, _matrix_shares
from lamella_testing import run_ranks

MUON: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
NUM_STEPS = 3
SHAPES: dict[str, tuple[int, ...]] = {
    "wide": (6, 16),
    "tall": (24, 5),
    "experts": (4, 8, 6),
    "fused": (24, 8),
    "odd": (7, 3),
}
TURN = (4, 2, 2)  # of `fused`: queries, keys and values of three query groups


class Products(nn.Module):
    """Matrices, a stack of experts and a matrix of three, whose loss and gradients are the same on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))

    def forward(self) -> torch.Tensor:
        whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in self.parameters()]
        losses = [torch.sin(parameter * (i + 1)).square().sum() for i, parameter in enumerate(whole)]
        return torch.stack(losses).sum()


def apart(name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
    """The matrices of a parameter."""
    if name == "fused":
        return [rows.flatten(0, 1) for rows in torch.split(tensor.view(-1, sum(TURN), tensor.shape[1]), list(TURN), 1)]
    return list(tensor) if tensor.ndim == 3 else [tensor]


def together(name: str, matrices: Sequence[torch.Tensor], shape: torch.Size) -> torch.Tensor:
    """The parameter of some matrices."""
    if name == "fused":
        turns = [matrix.view(-1, rows, shape[1]) for matrix, rows in zip(matrices, TURN, strict=True)]
        return torch.cat(turns, 1).view(shape)
    return torch.stack([*matrices]).view(shape)


@cache
def by_torch() -> tuple[list[float], dict[str, list[torch.Tensor]]]:
    """Losses and matrices after each of some steps of torch's Muon over each matrix alone."""
    model = Products()
    matrices = {
        name: [nn.Parameter(m.clone()) for m in apart(name, p.detach())] for name, p in model.named_parameters()
    }
    optimizer = torch.optim.Muon([matrix for of in matrices.values() for matrix in of], **MUON)
    losses = []
    for _ in range(NUM_STEPS):
        model.zero_grad()
        loss = model()
        loss.backward()
        losses.append(loss.item())
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            for matrix, gradient in zip(matrices[name], apart(name, parameter.grad), strict=True):
                matrix.grad = gradient.clone()
        optimizer.step()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(together(name, matrices[name], parameter.shape))
    return losses, {name: [matrix.detach() for matrix in group] for name, group in matrices.items()}


def over_one_axis(model: nn.Module) -> None:
    fully_shard(model)


def by_columns(model: nn.Module) -> None:
    divide = {"wide": 1, "experts": 2, "fused": 1}
    dims = {id(model.get_parameter(name)): dim for name, dim in divide.items()}
    fully_shard(model, shard_placement_fn=lambda p: Shard(dims[id(p)]) if id(p) in dims else None)


def ragged(model: nn.Module) -> None:
    fully_shard(model, options=ShardingOptions(keep_together=Rows(1)))


def after_tensor_parallelism(model: nn.Module) -> None:
    """Two tensor-parallel ranks have rows, columns, or experts; each part is cut further."""
    num = dist.get_world_size()
    mesh = init_device_mesh("cpu", (num // 2, 2), mesh_dim_names=("data", "tensor"))
    for name, dim in {"wide": 1, "tall": 0, "experts": 1, "fused": 0}.items():
        part = distribute_tensor(model.get_parameter(name).detach(), mesh["tensor"], [Shard(dim)])
        setattr(model, name, nn.Parameter(part))
    fully_shard(model, mesh=mesh["data"])


def replicated_outside(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)


def experts_elsewhere(model: nn.Module) -> None:
    """Experts on a mesh of fewer ranks than the other matrices."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("outer", "inner"))
    placed, experts = placement_on(mesh["inner"], dim=1), model.get_parameter("experts")
    fully_shard(model, shard_placement_fn=lambda p: placed if p is experts else None)


@pytest.mark.parametrize(
    ("num_ranks", "shard"),
    [
        (1, over_one_axis),
        (2, over_one_axis),
        (4, over_one_axis),
        (2, by_columns),
        (4, ragged),
        (4, after_tensor_parallelism),
        (4, replicated_outside),
        (4, experts_elsewhere),
    ],
)
def test_ranks_take_the_steps_of_torchs_muon_over_each_matrix_to_the_bit(
    monkeypatch: pytest.MonkeyPatch, num_ranks: int, shard: Callable[[nn.Module], None]
) -> None:
    expected_losses, expected = by_torch()

    def on_each_rank() -> None:
        model = Products()
        shard(model)
        monkeypatch.setattr(_matrix_shares, "ROUND_NBYTES", 0 if num_ranks == 2 else 1 << 20)  # rounds of two matrices
        fused: dict[torch.Tensor, tuple[int, ...]] = {model.get_parameter("fused"): TURN}
        optimizer = MuonAndAdam(
            [{"params": model.parameters()}], is_matrix=lambda p: p.ndim >= 2, muon=MUON, adam={}, fused=fused
        )
        losses = []
        for _ in range(NUM_STEPS):
            optimizer.zero_grad()
            loss = model()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
        assert losses == pytest.approx(expected_losses, rel=1e-6)
        for name, parameter in model.named_parameters():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            for matrix, other in zip(apart(name, whole.detach()), expected[name], strict=True):
                assert torch.equal(matrix.reshape(other.shape), other), name

    run_ranks(on_each_rank, num_ranks)


def test_the_work_is_balanced_and_a_step_has_two_exchanges() -> None:
    """Two layers like Llama's, with most of the work in three matrices of seven."""
    shapes = [(16, 16), (4, 16), (4, 16), (16, 16), (56, 16), (56, 16), (16, 56)] * 2

    def on_each_rank() -> None:
        mesh = init_device_mesh("cpu", (4,))
        tensors = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in shapes)
        parameters = [nn.Parameter(distribute_tensor(tensor, mesh, [Shard(0)])) for tensor in tensors]
        for parameter in parameters:
            parameter.grad = parameter.detach().clone()
        updates = [_matrix_shares.MatrixUpdate(p, p, p, {}) for p in parameters]  # type: ignore[arg-type]
        exchange = _cut_matrices.MatrixExchange(updates)
        assert max(exchange.loads) <= 1.2 * sum(exchange.loads) / 4
        optimizer = MuonAndAdam([{"params": parameters}], is_matrix=lambda _: True, muon=MUON, adam={})
        with CommDebugMode() as communication:  # type: ignore[no-untyped-call]
            optimizer.step()
        assert communication.get_total_counts() == 2
        again = copy.deepcopy(optimizer)  # a process group cannot be copied
        again.step()

    run_ranks(on_each_rank, 4)
