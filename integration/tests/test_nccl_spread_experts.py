"""Spread experts of transformers on GPUs: no bit changes under the schedule, or on the way through a checkpoint.

`gpu1` needs one GPU: experts are DTensors over one rank. `gpu2` sends tokens over NCCL. The parent never touches a GPU,
so that ranks can be forked from it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch._dynamo  # as in test_nccl: once here instead of once a rank
import torch.distributed as dist
from expert_training import batches_of, moe, plain_step, scheduled_step, sharded
from torch import nn
from torch.distributed.tensor import DTensor

from lamella_checkpoint import load, save
from lamella_engine import MixedPrecisionPolicy
from lamella_integration.repeatable import use_repeatable_kernels
from lamella_precision import Float8Recipe
from lamella_testing import run_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context"),
    pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation"),
]

DEVICE: Final = "cuda"
FAMILY = "qwen2_moe"  # with a shared expert
CASES: Final = [
    ("eager", None),
    ("grouped_mm", None),
    ("eager", Float8Recipe((1, None))),
    ("grouped_mm", Float8Recipe()),
]


def _training(experts: str, recipe: Float8Recipe | None, ep: int, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    options: dict[str, Any] = {"recipe": recipe} if recipe else {"mp_policy": policy}
    # A row in bf16 is a multiple of 16 bytes, as grouped kernels ask.
    model = sharded(moe(FAMILY, experts, width=16, seed=seed), ep, DEVICE, **options)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, *, is_scheduled: bool) -> list[torch.Tensor]:
    batches = [{name: tensor.to(DEVICE) for name, tensor in batch.items()} for batch in batches_of(dist.get_rank())]
    losses = scheduled_step(model, batches, DEVICE) if is_scheduled else plain_step(model, batches)
    optimizer.step()
    optimizer.zero_grad()
    return losses


def _full_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Weights and optimizer state, of all experts."""
    tensors: list[Any] = [
        tensor
        for parameter in model.parameters()
        for tensor in (parameter, *(slot for _, slot in sorted(optimizer.state[parameter].items())))
    ]
    return [
        (sharded_tensor.full_tensor() if isinstance(sharded_tensor, DTensor) else sharded_tensor).detach().clone()
        for sharded_tensor in tensors
    ]


def _assert_same_bits(path: Path, experts: str, recipe: Float8Recipe | None, num_ranks: int) -> None:
    def on_each_rank() -> tuple[list[int], int]:
        use_repeatable_kernels()
        plain, scheduled = (_training(experts, recipe, num_ranks, 3) for _ in range(2))
        losses = [
            [loss for _ in range(3) for loss in _step(*training, is_scheduled=training is scheduled)]
            for training in (plain, scheduled)
        ]
        save(path, model=scheduled[0], optimizer=scheduled[1])
        resumed = _training(experts, recipe, 1, 4)
        load(path, model=resumed[0], optimizer=resumed[1])
        trained = _full_state(*scheduled)
        pairs = [losses, (_full_state(*plain), trained), (trained, _full_state(*resumed))]
        unequal = [sum(not torch.equal(a, b) for a, b in zip(*pair, strict=True)) for pair in pairs]
        return unequal, len(scheduled[1].state)

    for unequal, num_stepped in run_ranks(on_each_rank, num_ranks, device=DEVICE, timeout_s=600):
        assert unequal == [0, 0, 0]
        assert num_stepped > 20


@pytest.mark.gpu1
@pytest.mark.parametrize(("experts", "recipe"), CASES)
def test_a_schedule_and_a_checkpoint_change_no_bit(tmp_path: Path, experts: str, recipe: Float8Recipe | None) -> None:
    _assert_same_bits(tmp_path / "step", experts, recipe, 1)


@pytest.mark.gpu2
@pytest.mark.parametrize(("experts", "recipe"), CASES)
def test_a_schedule_and_a_checkpoint_for_other_ranks_change_no_bit_of_two_gpus(
    tmp_path: Path, experts: str, recipe: Float8Recipe | None
) -> None:
    _assert_same_bits(tmp_path / "step", experts, recipe, 2)
