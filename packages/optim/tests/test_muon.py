"""Muon over shards: each matrix stepped by its owner, stacks matrix by matrix, no collective, no cut matrix."""

from __future__ import annotations

import copy
import re
from functools import partial
from typing import Any

import pytest
import torch
from engine_models import Net, inputs, rows_of_this_rank, twins, whole
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from lamella_engine import Rows, ShardingOptions, Whole, fully_shard
from lamella_optim import MuonAndAdam, clip_grad_norm_
from lamella_testing import run_ranks

MUON: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
ADAM: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.0}
NUM_STEPS = 3


def is_matrix(parameter: torch.Tensor) -> bool:
    return parameter.ndim >= 2


def keep(parameter: torch.Tensor) -> Rows | Whole:
    return Whole() if parameter.ndim == 2 else Rows(1)


def optimizer_of(model: nn.Module, **options: Any) -> MuonAndAdam:
    return MuonAndAdam([{"params": model.parameters()}], is_matrix=is_matrix, muon=MUON, adam=ADAM, **options)


class Stacked(nn.Module):
    """A stack of three matrices and a vector."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.stack = nn.Parameter(torch.randn(3, 5, 7, generator=generator))
        self.bias = nn.Parameter(torch.randn(5, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = torch.einsum("emn,bn->bem", self.stack, x) + self.bias
        return outputs


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_owner_takes_the_steps_of_torchs_muon_without_a_collective(num_ranks: int) -> None:
    def on_rank() -> None:
        x = inputs()
        reference, sharded = twins(Net, partial(fully_shard, options=ShardingOptions(keep_together=keep)))
        matrices, vectors = ([p for p in reference.parameters() if is_matrix(p) is wanted] for wanted in (True, False))
        unsharded = [torch.optim.Muon(matrices, **MUON), torch.optim.AdamW(vectors, **ADAM)]
        optimizer = optimizer_of(sharded)
        for _ in range(NUM_STEPS):
            reference(x).square().mean().backward()
            sharded(rows_of_this_rank(x)).square().mean().backward()
            clip_grad_norm_(sharded.parameters(), 0.5)
            nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
            with CommDebugMode() as communication:  # type: ignore[no-untyped-call]
                optimizer.step()
            assert communication.get_total_counts() == 0
            for part in unsharded:
                part.step()
            for training in (optimizer, *unsharded):
                training.zero_grad()
        for plain, parameter in zip(reference.parameters(), sharded.parameters(), strict=True):
            torch.testing.assert_close(whole(parameter), plain, rtol=1e-3, atol=1e-4)  # Muon multiplies in bf16.

    run_ranks(on_rank, num_ranks)


@pytest.mark.parametrize("keep_together", [None, keep])
def test_each_matrix_of_a_stack_is_stepped_by_itself_wherever_the_stack_is_cut(keep_together: Any) -> None:
    def on_rank() -> None:
        reference, sharded = Stacked(), Stacked()
        fully_shard(sharded, options=ShardingOptions(keep_together=keep_together))
        apart = [nn.Parameter(matrix.clone()) for matrix in reference.stack.detach()]
        unsharded, optimizer = torch.optim.Muon(apart, **MUON), optimizer_of(sharded)
        x = torch.ones(2, 7)
        for _ in range(NUM_STEPS):
            reference.zero_grad()
            with torch.no_grad():
                reference.stack.copy_(torch.stack([matrix.detach() for matrix in apart]))
                reference.bias.copy_(whole(sharded.bias))
            reference(x).square().mean().backward()
            sharded(x).square().mean().backward()
            assert reference.stack.grad is not None
            for matrix, gradient in zip(apart, reference.stack.grad, strict=True):
                matrix.grad = gradient.clone()
            unsharded.step()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(whole(sharded.stack), torch.stack([*apart]), rtol=1e-3, atol=1e-4)

    run_ranks(on_rank, 2)


def test_vectors_and_options_that_are_not_muons_are_refused() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r"Expected matrices or stacks of matrices for Muon, got a shape of \(2,\)"):
        MuonAndAdam([{"params": model.parameters()}], is_matrix=lambda _: True, muon=MUON, adam=ADAM)
    with pytest.raises(ValueError, match="momentum should be >= 0"):
        MuonAndAdam([{"params": [model.weight]}], is_matrix=is_matrix, muon={"momentum": -1.0}, adam=ADAM)


@pytest.mark.parametrize(
    ("rows", "shape"), [((4, 2, 2), (12, 3)), ((4, 0), (8, 3)), ((4, 2, 2), (2, 8, 3))], ids=["rest", "empty", "stack"]
)
def test_rows_that_do_not_divide_a_fused_matrix_are_refused(rows: tuple[int, ...], shape: tuple[int, ...]) -> None:
    parameter = nn.Parameter(torch.ones(shape))
    words = re.escape(f"into turns of {' + '.join(map(str, rows))} rows, got a parameter of shape {shape}")
    with pytest.raises(ValueError, match=words):
        MuonAndAdam([{"params": [parameter]}], is_matrix=is_matrix, muon=MUON, adam=ADAM, fused={parameter: rows})


def test_a_fused_matrix_that_was_left_to_adamw_is_refused() -> None:
    parameter = nn.Parameter(torch.ones(8, 3))
    with pytest.raises(ValueError, match=r"every parameter of `fused`, for Muon, got a parameter of shape \(8, 3\)"):
        MuonAndAdam(
            [{"params": [parameter]}], is_matrix=lambda _: False, muon=MUON, adam=ADAM, fused={parameter: (4, 4)}
        )


def test_fused_matrices_are_of_the_construction_and_not_of_a_loaded_state_dict() -> None:
    def fused_or_not(is_fused: bool) -> tuple[nn.Parameter, MuonAndAdam]:
        parameter = nn.Parameter(torch.eye(8, 3))
        fused: dict[torch.Tensor, tuple[int, ...]] = {parameter: (4, 4)} if is_fused else {}
        return parameter, MuonAndAdam([{"params": [parameter]}], is_matrix=is_matrix, muon=MUON, adam=ADAM, fused=fused)

    def stepped(parameter: nn.Parameter, optimizer: MuonAndAdam) -> torch.Tensor:
        parameter.grad = torch.arange(24.0).view(8, 3)
        optimizer.step()
        return parameter.detach().clone()

    steps = {is_fused: stepped(*fused_or_not(is_fused)) for is_fused in (True, False)}
    assert not torch.equal(steps[True], steps[False])
    for is_fused in (True, False):
        parameter, optimizer = fused_or_not(is_fused)
        optimizer.load_state_dict(fused_or_not(not is_fused)[1].state_dict())
        assert torch.equal(stepped(parameter, optimizer), steps[is_fused])
    parameter, optimizer = copy.deepcopy(fused_or_not(True))
    assert torch.equal(stepped(parameter, optimizer), steps[True])


def test_a_further_param_group_of_muon_and_adam_is_refused() -> None:
    optimizer = optimizer_of(nn.Linear(2, 2))
    with pytest.raises(NotImplementedError, match="got a further group, .* Build another MuonAndAdam"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert len(optimizer.param_groups) == 2


def test_copies_step_on_their_own_state() -> None:
    model = nn.Linear(3, 2)
    optimizer = optimizer_of(model)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    again = copy.deepcopy(optimizer)
    assert all(part.state is again.state for part in again.parts)
    assert [group["lr"] for group in again.param_groups] == [0.02, 0.02]
