"""On GPUs: torch's optimizers step below DTensor's dispatch as on DTensors, multi-tensor kernels too."""

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch._dynamo  # As in test_nccl: once here instead of once a rank.
from torch import nn

from lamella_engine import MixedPrecisionPolicy, fully_shard
from lamella_integration.tasks import TASKS, shard, unsharded
from lamella_optim import install
from lamella_testing import run_ranks

install()

ALL_RANKS = pytest.mark.parametrize(
    "num_ranks", [pytest.param(num, marks=getattr(pytest.mark, f"gpu{num}")) for num in (1, 2, 4)]
)
NUM_STEPS = 4


@ALL_RANKS
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("AdamW", {"fused": True}),
        ("AdamW", {"fused": True, "capturable": True}),
        ("AdamW", {"foreach": True, "amsgrad": True}),
        ("SGD", {"foreach": True, "momentum": 0.9}),
    ],
)
def test_steps_equal_steps_on_dtensors_bit_by_bit(num_ranks: int, name: str, options: dict[str, Any]) -> None:
    task = TASKS["llama"]

    def weights_after(*, on_dtensors: bool) -> dict[str, torch.Tensor]:
        device = torch.device("cuda", torch.cuda.current_device())
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        model: nn.Module = shard(task.model(device=device), fully_shard, mp_policy=policy)
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=3e-3, **options)
        tokens, labels = (tensor.to(device) for tensor in task.batch(0))
        refuse = patch("lamella_optim._plain._States.plain_of", return_value=None)
        with refuse if on_dtensors else nullcontext():
            for _ in range(NUM_STEPS):
                task.loss(model(tokens), labels).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
        return {name: unsharded(p.detach()).cpu() for name, p in model.named_parameters()}

    def weights_by_way() -> tuple[object, object]:
        return weights_after(on_dtensors=False), weights_after(on_dtensors=True)

    for plain, on_dtensors in run_ranks(weights_by_way, num_ranks, device="cuda"):
        torch.testing.assert_close(plain, on_dtensors, rtol=0.0, atol=0.0)
