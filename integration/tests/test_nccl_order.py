"""On GPUs: what budgets allow to be gathered ahead or kept is what is allocated, and a departing rank is told so."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lamella_engine import FSDPModule, fully_shard
from lamella_testing import run_ranks

DIM, NUM_BLOCKS = 2048, 6
BLOCK = DIM * DIM * 4  # bytes
SLACK = BLOCK // 2


class _SkippingNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(NUM_BLOCKS))
        self.skipped: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            if i != self.skipped:
                x = torch.tanh(block(x))
        return x


def _sharded() -> _SkippingNet:
    torch.manual_seed(0)
    model = _SkippingNet().cuda()
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def _unit(model: nn.Module) -> FSDPModule:
    assert isinstance(model, FSDPModule)
    return model


def _step(model: nn.Module) -> None:
    model(torch.ones(2, DIM, device="cuda")).square().mean().backward()


@pytest.mark.gpu2
def test_budgets_bound_what_is_allocated_and_change_no_gradient() -> None:
    def check() -> None:
        expected: list[torch.Tensor] = []
        for num_prefetched, num_kept in ((None, 0), (0, 0), (3, 0), (3, 2), (9, 9)):
            model = _sharded()
            _unit(model).set_options(prefetch_budget=None if num_prefetched is None else num_prefetched * BLOCK)
            _unit(model).set_options(keep_budget=num_kept * BLOCK)
            for _ in range(3):
                model.zero_grad()
                _step(model)
            gradients = [parameter.grad.to_local() for parameter in model.parameters()]  # type: ignore[union-attr]
            for got, expected_gradient in zip(gradients, expected or gradients, strict=True):
                assert torch.equal(got, expected_gradient)
            expected = expected or gradients
            model.zero_grad()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            with torch.no_grad():
                model(torch.ones(2, DIM, device="cuda"))
            torch.cuda.synchronize()
            num_unsharded = 1 + min(max(num_prefetched or 0, 1), NUM_BLOCKS - 1)
            assert torch.cuda.max_memory_allocated() - before <= num_unsharded * BLOCK + SLACK, (
                num_prefetched,
                num_kept,
            )
            out = model(torch.ones(2, DIM, device="cuda"))
            torch.cuda.synchronize()
            assert torch.cuda.memory_allocated() - before <= min(num_kept, NUM_BLOCKS) * BLOCK + SLACK, (
                num_prefetched,
                num_kept,
            )
            out.mean().backward()

    run_ranks(check, 2, device="cuda")


@pytest.mark.gpu2
def test_a_rank_that_departs_is_told_so_before_the_collective() -> None:
    def check() -> str:
        model = _sharded()
        _unit(model).set_options(order_check=True, order_check_timeout_s=60.0)
        for _ in range(2):
            _step(model)
        model.skipped = 2 if dist.get_rank() == 1 else None
        with pytest.raises(RuntimeError, match="Expected every rank to run the same units") as caught:
            _step(model)
        _unit(model).reset_iter_state()
        model.skipped = None
        model.zero_grad()
        _step(model)
        torch.cuda.synchronize()
        return str(caught.value)

    for text in run_ranks(check, 2, device="cuda"):
        assert "forward of blocks.2" in text and "forward of blocks.3" in text
