"""Trainable parameters that modules are given after `fully_shard` are refused at the next forward, by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from engine_models import Net, inputs, mean_square, rows_of_this_rank, shard
from torch import nn

from lamella_engine import fully_shard
from lamella_testing import run_ranks

LOSS = mean_square(lambda model: model(rows_of_this_rank(inputs())))


def _register(module: nn.Module) -> str:
    module.register_parameter("late", nn.Parameter(torch.ones(2)))
    return r"layers\.1\.up\.late"


def _assign(module: nn.Module) -> str:
    module.late = nn.Parameter(torch.ones(2))
    return r"layers\.1\.up\.late"


def _add_module(module: nn.Module) -> str:
    module.add_module("adapter", nn.Linear(2, 2))
    return r"layers\.1\.up\.adapter\.weight"


def _add_to_an_added_module(module: nn.Module) -> str:
    module.adapter = nn.Sequential(nn.ReLU())
    module.adapter.append(nn.Linear(2, 2))
    return r"layers\.1\.up\.adapter\.1\.weight"


@pytest.mark.parametrize("add", [_register, _assign, _add_module, _add_to_an_added_module])
def test_a_parameter_registered_after_sharding_is_refused_by_name(add: Callable[[nn.Module], str]) -> None:
    def check() -> None:
        model = shard(Net())
        LOSS(model).backward()
        name = add(model.get_submodule("layers.1.up"))
        with torch.no_grad():
            LOSS(model)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=rf"before fully_shard, got \['{name}'"):
                LOSS(model)
        for parameter in model.parameters():
            if type(parameter.data) is torch.Tensor:
                parameter.requires_grad_(False)
        LOSS(model).backward()

    run_ranks(check, 2)


def test_many_parameters_registered_late_are_named_once_each_and_counted() -> None:
    def check() -> None:
        model = shard(Net())
        for layer in model.layers:
            adapters = nn.ModuleDict()
            layer.adapters = adapters
            adapters["b"] = nn.Linear(2, 2, bias=False)
            layer.adapters = adapters
        head = model.get_submodule("head")
        head.first, head.second = (nn.Parameter(torch.ones(1)) for _ in range(2))
        names = r"\['layers\.0\.adapters\.b\.weight', 'layers\.1\.adapters\.b\.weight', 'layers\.2\..*'\]"
        with pytest.raises(RuntimeError, match=rf"got {names} and 2 more after it"):
            LOSS(model)

    run_ranks(check, 1)


def test_a_module_that_is_sharded_itself_may_be_added() -> None:
    def check() -> None:
        model = shard(Net())
        adapter = nn.Linear(2, 2)
        fully_shard(adapter)
        model.adapter = adapter
        LOSS(model).backward()

    run_ranks(check, 2)
