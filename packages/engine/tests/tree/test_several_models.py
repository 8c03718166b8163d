"""Models trained side by side, models with common units, and units on different axes of one mesh."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from engine_models import Net, Residual, assert_gradients_equal, case, inputs, shard, twins, whole
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lamella_engine import fully_shard
from lamella_engine.testing import assert_at_rest
from lamella_testing import run_ranks

X = inputs()


def test_two_models_train_against_each_other() -> None:
    def check() -> None:
        generators, critics = twins(seed=0), twins(seed=1)
        back = torch.randn(5, 3, generator=torch.Generator().manual_seed(2))
        losses: list[list[float]] = [[], []]
        for generator, critic, seen in zip(generators, critics, losses, strict=True):
            steppers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, critic)]
            for _ in range(3):
                fake = generator(X)
                loss = (critic(X).mean() - critic(fake.detach() @ back).mean()).square()
                loss.backward()
                steppers[1].step()
                steppers[1].zero_grad()
                reward = critic(fake @ back).square().mean()
                reward.backward()
                for stepper in steppers:
                    stepper.step()
                    stepper.zero_grad()
                seen += [loss.item(), reward.item()]
        assert losses[1] == pytest.approx(losses[0], rel=1e-4)
        for model in (generators[1], critics[1]):
            assert_at_rest(model)

    run_ranks(check, 2)


class _Headed(nn.Module):
    def __init__(self, trunk: nn.ModuleList) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = nn.Linear(7, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.trunk:
            x = layer(x)
        head: torch.Tensor = self.head(x)
        return head


class _TwoHeads(nn.Module):
    """Two models over one trunk, without a forward around both."""

    def __init__(self) -> None:
        super().__init__()
        trunk = nn.ModuleList(Residual() for _ in range(2))
        self.left, self.right = _Headed(trunk), _Headed(trunk)


def test_two_roots_may_share_their_inner_units() -> None:
    def apply(model: _TwoHeads) -> None:
        for layer in model.left.trunk:
            fully_shard(layer)
        fully_shard(model.left)
        fully_shard(model.right)

    def check() -> None:
        x = torch.ones(2, 7).cumsum(1)
        pair = twins(_TwoHeads, apply)
        for _ in range(3):
            for model in pair:
                model.zero_grad()
                first, second = model.get_submodule("left"), model.get_submodule("right")
                first(x).square().mean().backward()
                second(x).square().mean().backward()
                (first(x) + second(2 * x)).mean().backward()
            assert_gradients_equal(*pair)
            assert_at_rest(pair[1])

    run_ranks(check, 2)


def test_units_of_one_model_may_lie_on_different_axes_of_a_mesh() -> None:
    def check() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))

        def apply(model: Net) -> None:
            for i, layer in enumerate(model.layers):
                fully_shard(layer, mesh=mesh["ab"[i % 2]])
            fully_shard(model)

        reference, sharded = twins(Net, apply)
        for _ in range(2):
            for model in (reference, sharded):
                model.zero_grad()
                model(X).square().mean().backward()
            for (name, expected), got in zip(reference.named_parameters(), sharded.parameters(), strict=True):
                assert expected.grad is not None
                assert got.grad is not None
                with case(name):
                    torch.testing.assert_close(whole(got.grad), expected.grad)

    run_ranks(check, 4)


def test_some_of_the_ranks_may_shard_a_model_among_themselves() -> None:
    def check() -> None:
        mesh = DeviceMesh("cpu", [1, 2])
        if dist.get_rank() == 0:
            return
        reference, sharded = twins(Net, lambda model: fully_shard(model, mesh=mesh))
        for model in (reference, sharded):
            model(X).square().mean().backward()
        for expected, got in zip(reference.parameters(), sharded.parameters(), strict=True):
            assert expected.grad is not None
            assert got.grad is not None
            torch.testing.assert_close(whole(got.grad), expected.grad)

    run_ranks(check, 3)


def test_a_model_built_twice_shares_nothing() -> None:
    def check() -> None:
        first, second = shard(Net()), shard(Net())
        first(X).mean().backward()
        assert all(parameter.grad is None for parameter in second.parameters())
        del first
        second(X).mean().backward()
        assert_at_rest(second)

    run_ranks(check, 2)
