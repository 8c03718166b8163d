"""On GPUs: a whole step captured as one CUDA graph and replayed."""

import pytest
import torch
import torch._dynamo  # As in test_nccl: once here instead of once a rank.
from torch import nn

from lamella_engine import MixedPrecisionPolicy, fully_shard
from lamella_integration.tasks import TASKS, shard, unsharded
from lamella_testing import run_ranks

ALL_RANKS = pytest.mark.parametrize(
    "num_ranks", [pytest.param(num, marks=getattr(pytest.mark, f"gpu{num}")) for num in (1, 2, 4)]
)
NUM_STEPS = 6


@ALL_RANKS
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
def test_a_captured_step_replays_as_the_eager_one(num_ranks: int, reduce_dtype: torch.dtype | None) -> None:
    task = TASKS["llama"]

    def weights_after(*, captured: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
        device = torch.device("cuda", torch.cuda.current_device())
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
        model: nn.Module = shard(task.model(device=device), fully_shard, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True, capturable=True)
        tokens, labels = (tensor.to(device) for tensor in task.batch(0))

        def step() -> torch.Tensor:
            loss = task.loss(model(tokens), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        losses = []
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            losses += [step().item() for _ in range(3)]
        torch.cuda.current_stream().wait_stream(side)
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                loss = step()
            for _ in range(NUM_STEPS):
                graph.replay()
                losses.append(loss.item())
        else:
            losses += [step().item() for _ in range(NUM_STEPS)]
        return losses, {name: unsharded(p.detach()).cpu() for name, p in model.named_parameters()}

    def both() -> tuple[object, object]:
        return weights_after(captured=False), weights_after(captured=True)

    for eager, captured in run_ranks(both, num_ranks, device="cuda"):
        torch.testing.assert_close(captured, eager, rtol=0.0, atol=0.0)
