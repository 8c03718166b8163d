"""On GPUs: what is read without a call of its module, and optimizers that were built before sharding."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo  # `full_tensor` and optimizers import it: once here instead of once a rank.
from torch import nn
from torch.distributed.tensor import DTensor

from lamella_engine import MixedPrecisionPolicy, declare_reads, fully_shard
from lamella_optim import shard_optimizer
from lamella_testing import run_ranks

ONE = pytest.param(1, marks=pytest.mark.gpu1)
TWO = pytest.param(2, marks=pytest.mark.gpu2)
FOUR = pytest.param(4, marks=pytest.mark.gpu4)
ALL_RANKS = pytest.mark.parametrize("num_ranks", [ONE, TWO, FOUR])

DIM, NUM_LAYERS = 509, 4  # A prime: no number of ranks divides it.


class Mixer(nn.Module):
    """Reads the weight of its convolution and never calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(DIM, DIM)
        self.conv1d = nn.Conv1d(DIM, DIM, 3, padding=1, groups=DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = nn.functional.conv1d(
            torch.tanh(self.project(x)).mT, self.conv1d.weight, self.conv1d.bias, padding=1, groups=DIM
        )
        return x + mixed.mT


def _make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Mixer() for _ in range(NUM_LAYERS))).cuda()


def _shard(model: nn.Module, policy: MixedPrecisionPolicy | None = None) -> None:
    for mixer in model.children():
        declare_reads(mixer, "conv1d.*")
        fully_shard(mixer.get_submodule("conv1d"), mp_policy=policy)
        fully_shard(mixer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> list[float]:
    x = torch.randn(2, 64, DIM, generator=torch.Generator().manual_seed(1)).cuda()
    losses = []
    for _ in range(num_steps):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _full_value(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def _assert_trains_alike(num_ranks: int, run: Callable[[nn.Module, bool], list[float]]) -> None:
    def check() -> None:
        models = (_make(), _make())
        expected, got = (run(model, is_sharded) for model, is_sharded in zip(models, (False, True), strict=True))
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=0.0)
        for a, b in zip(*(model.parameters() for model in models), strict=True):
            torch.testing.assert_close(_full_value(b), _full_value(a), rtol=0.0, atol=1e-3)

    run_ranks(check, num_ranks, device="cuda")


@ALL_RANKS
def test_what_is_read_directly_trains_as_on_one_unsharded_gpu(num_ranks: int) -> None:
    def run(model: nn.Module, is_sharded: bool) -> list[float]:
        if is_sharded:
            _shard(model)
        return _train(model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), 5)

    _assert_trains_alike(num_ranks, run)


@ALL_RANKS
def test_in_bf16_what_is_read_directly_is_freed_after_every_step(num_ranks: int) -> None:
    def check() -> None:
        model = _make()
        _shard(model, MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        _train(model, optimizer, 2)
        at_rest = torch.cuda.memory_allocated()
        _train(model, optimizer, 4)
        assert torch.cuda.memory_allocated() == at_rest
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())

    run_ranks(check, num_ranks, device="cuda")


@ALL_RANKS
@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"capturable": True}])
def test_an_optimizer_that_has_stepped_goes_on_after_sharding(num_ranks: int, options: dict[str, Any]) -> None:
    def run(model: nn.Module, is_sharded: bool) -> list[float]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
        losses = _train(model, optimizer, 2)
        if is_sharded:
            _shard(model)
        return losses + _train(model, optimizer, 3)

    _assert_trains_alike(num_ranks, run)


@ALL_RANKS
def test_state_made_on_the_host_follows_its_parameters_to_the_gpu(num_ranks: int) -> None:
    def check() -> None:
        model = _make().cpu()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        model(torch.randn(2, 8, DIM)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        fully_shard(model)
        shard_optimizer(optimizer)
        assert {t.device.type for state in optimizer.state.values() for t in state.values()} == {"cuda"}
        _train(model, optimizer, 2)

    run_ranks(check, num_ranks, device="cuda")
