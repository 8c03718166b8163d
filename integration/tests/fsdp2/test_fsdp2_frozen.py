"""Frozen parameters: gathered with the others, never reduced, and free to thaw."""

import itertools

import pytest
import torch
from fsdp2_models import (
    DIM,
    Api,
    Stack,
    assert_equal_models,
    assert_trains_as,
    average,
    count,
    descend,
    inputs,
    on_ranks,
    shard,
    twins,
)  # fmt: skip
from torch import nn
from torch.distributed._composable import checkpoint as composable_checkpoint  # type: ignore[attr-defined]
from torch.nn import functional as F

from lamella_integration.collectives import CollectiveCounter


def _freeze_weights(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("bias" in name)


@pytest.mark.parametrize("freeze_after", [False, True], ids=["frozen_before", "frozen_after"])
def test_trained_and_frozen_parameters_may_share_a_unit(api: Api, freeze_after: bool) -> None:
    def scenario(reshard: bool, recompute: bool) -> None:
        expected, model = twins()
        if not freeze_after:
            _freeze_weights(model)
        if recompute:
            for block in model.blocks:
                composable_checkpoint(block)
        shard(api, model, reshard_after_forward=reshard)
        if freeze_after:
            _freeze_weights(model)
        _freeze_weights(expected)
        with CollectiveCounter() as counter:
            model(inputs()).sum().backward()
        model.zero_grad()
        numels = [call.numel for call in counter.calls if call.kind == "reduce_scatter"]
        assert sorted(numels) == [6 + 4, 16, 16, 16]  # biases, each padded to a multiple of two
        assert_trains_as(expected, model)

    on_ranks(scenario, cases=itertools.product((True, False), (True, False)))


def test_a_frozen_unit_is_not_reduced(api: Api) -> None:
    def scenario() -> None:
        expected, model = twins()
        for network in (expected, model):
            network.blocks[1].requires_grad_(False)
        shard(api, model)
        counts, _ = count(lambda: model(inputs()).sum().backward())
        assert counts["reduce_scatter"] == 3
        model.zero_grad()
        assert_trains_as(expected, model)
        assert all(parameter.grad is None for parameter in model.blocks[1].parameters())

    on_ranks(scenario)


def test_units_may_freeze_and_thaw_between_steps(api: Api) -> None:
    def scenario(reshard: bool) -> None:
        expected, model = twins()
        shard(api, model, reshard_after_forward=reshard)
        for step, frozen in enumerate([(0, 2), (), (1,), (0,), ()]):
            for network in (expected, model):
                network.requires_grad_(True)
                for index in frozen:
                    network.blocks[index].requires_grad_(False)
                network(inputs(seed=step)).square().sum().backward()
            average(expected)
            assert_equal_models(expected, model)
            for network in (expected, model):
                descend(network)

    on_ranks(scenario, cases=(True, False))


class _Repeated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.trained = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(3):
            x = self.frozen(F.relu(self.trained(x)))
            with torch.no_grad():
                x += F.relu(self.trained(x))
        return x


def test_trained_and_frozen_units_may_run_often_with_and_without_gradients(api: Api) -> None:
    def scenario(reshard: bool) -> None:
        expected, model = twins(_Repeated)
        for module in (model.first, model.frozen, model.trained, model):
            api.fully_shard(module, reshard_after_forward=reshard)
        assert_trains_as(expected, model)

    on_ranks(scenario, cases=(True, False))


def test_a_wholly_frozen_model_passes_gradients_to_its_inputs(api: Api) -> None:
    def scenario() -> None:
        expected, model = twins(Stack)
        shard(api, model)
        gradients = []
        for network in (expected, model):
            network.requires_grad_(False)
            x = inputs().requires_grad_()
            network(x).square().sum().backward()
            gradients.append(x.grad)
        torch.testing.assert_close(gradients[1], gradients[0])
        assert all(parameter.grad is None for parameter in model.parameters())

    on_ranks(scenario)
