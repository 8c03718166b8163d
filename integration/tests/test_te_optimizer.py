"""On two GPUs: Transformer Engine's FusedAdam steps on local shards, and writes nothing beside empty shards."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo  # As in test_nccl: once here instead of once a rank.
from torch import nn
from torch.distributed.tensor import DTensor

from lamella_engine import fully_shard
from lamella_integration.tasks import unsharded
from lamella_optim import step_on_local_shards
from lamella_testing import run_ranks

pytestmark = [
    pytest.mark.te,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # warnings of Transformer Engine's import
    pytest.mark.filterwarnings("ignore:Detected a Jax installation"),
]

LR, WEIGHT_DECAY, NUM_STEPS = 1e-2, 0.1, 5


class ManyShort(nn.Module):
    """Matrices of a single row among larger matrices: empty shards at every place of several kernel launches.

    The output is linear in every matrix: gradients do not depend on weights, and rounding errors do not grow.
    """

    def __init__(self, num_matrices: int = 300) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(torch.randn(1 if i % 3 else 1 + i % 7, 8) for i in range(num_matrices))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(matrix * (x + i % 5)).mean() for i, matrix in enumerate(self.matrices)])


def _model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return ManyShort().to("cuda", dtype)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = NUM_STEPS) -> None:
    x = torch.randn(8, generator=torch.Generator().manual_seed(1)).to("cuda", next(model.parameters()).dtype)
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()


def _fused_adam(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    from transformer_engine.pytorch.optimizers import FusedAdam

    optimizer: torch.optim.Optimizer = FusedAdam(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, **options)
    return optimizer


def _on_shards(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return step_on_local_shards(_fused_adam(model, **options))


def _assert_close(sharded: nn.Module, reference: nn.Module, **tolerance: Any) -> None:
    for (name, got), expected_parameter in zip(sharded.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(
            unsharded(got).detach(), expected_parameter.detach(), **tolerance, msg=partial("{}: {}".format, name)
        )


def _num_empty(model: nn.Module) -> int:
    return sum(p.to_local().numel() == 0 for p in model.parameters() if isinstance(p, DTensor))


@pytest.mark.parametrize("capturable", [False, True], ids=["plain", "capturable"])
def test_fused_adam_on_local_shards_takes_the_steps_of_torchs_unsharded_adamw(capturable: bool) -> None:
    def check() -> int:
        reference, sharded = _model().double(), fully_shard(_model())
        _train(reference, torch.optim.AdamW(reference.parameters(), lr=LR, weight_decay=WEIGHT_DECAY))
        _train(sharded, _on_shards(sharded, capturable=capturable))
        _assert_close(sharded, reference.float(), rtol=1e-4, atol=1e-5)
        return _num_empty(sharded)

    assert max(run_ranks(check, 2, device="cuda")) > 100


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=str)
def test_bf16_weights_have_masters_that_a_state_dict_keeps(moments: torch.dtype) -> None:
    """The unsharded FusedAdam's steps, bit by bit: gradients of equal ranks have exact means in bf16."""
    options: dict[str, Any] = {"master_weights": True, "exp_avg_dtype": moments, "exp_avg_sq_dtype": moments}

    def check() -> None:
        reference, sharded = _model(torch.bfloat16), fully_shard(_model(torch.bfloat16))
        _train(reference, _fused_adam(reference, **options))
        optimizer = _on_shards(sharded, **options)
        _train(sharded, optimizer, 3)
        saved = optimizer.state_dict()
        for parameter, state in zip(sharded.parameters(), saved["state"].values(), strict=True):
            assert state.keys() == {"exp_avg", "exp_avg_sq", "master_param"}
            assert all(isinstance(value, DTensor) and value.shape == parameter.shape for value in state.values())
        resumed = _on_shards(sharded, **options)
        resumed.load_state_dict(saved)
        _train(sharded, resumed, NUM_STEPS - 3)
        _assert_close(sharded, reference, rtol=0.0, atol=0.0)

    run_ranks(check, 2, device="cuda")


def test_the_state_has_the_size_of_the_shards() -> None:
    """State made from a DTensor's `param.shape` would weigh as much as the unsharded model's."""

    def check() -> int:
        sharded = fully_shard(nn.Linear(4096, 4096, bias=False, device="cuda"))
        optimizer = _on_shards(sharded)
        sharded(torch.ones(1, 4096, device="cuda")).sum().backward()
        at_first = torch.cuda.memory_allocated()
        optimizer.step()
        return torch.cuda.memory_allocated() - at_first

    shard_nbytes = 4096 * 4096 * 4 // 2
    for grown in run_ranks(check, 2, device="cuda"):
        assert 2 * shard_nbytes <= grown < 2 * shard_nbytes + 2**20


def test_fused_adam_without_local_shards_is_refused_before_writing() -> None:
    def check() -> None:
        sharded = fully_shard(_model())
        before = [p.to_local().clone() for p in sharded.parameters() if isinstance(p, DTensor)]
        with pytest.raises(TypeError, match=r"step_on_local_shards\(optimizer\)"):
            _train(sharded, _fused_adam(sharded), 1)
        now = [p.to_local() for p in sharded.parameters() if isinstance(p, DTensor)]
        torch.testing.assert_close(now, before, rtol=0.0, atol=0.0)

    run_ranks(check, 2, device="cuda")
