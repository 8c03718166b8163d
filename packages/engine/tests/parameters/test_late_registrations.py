"""Parameters that modules are given after `fully_shard` are refused at the next forward, and units join the tree."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_models import (
    Net,
    assert_gradients_equal,
    fsdp,
    inputs,
    mean_square,
    no_gradient_sync,
    rows_of_this_rank,
    shard,
    twins,
)
from torch import nn

from lamella_engine import ShardingOptions, fully_shard
from lamella_engine.testing import assert_at_rest
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


class _Adapted(Net):
    """Adapters that a microbatch may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters = nn.ModuleList()

    def forward(self, x: torch.Tensor, num_adapters: int = 0) -> torch.Tensor:
        for adapter in self.adapters[:num_adapters]:
            x = x + adapter(x)
        return super().forward(x)


def _adapter() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


def _shard_and_add(model: Any, adapter: Any) -> None:
    fully_shard(adapter[0])
    fully_shard(adapter)
    model.adapters.append(adapter)


def _add_and_shard(model: Any, adapter: Any) -> None:
    model.adapters.append(adapter)
    fully_shard(adapter[0])
    fully_shard(adapter)


def _shard_and_use_and_add(model: Any, adapter: Any) -> None:
    _shard_and_add(model, adapter)
    adapter(inputs()).sum().backward()
    adapter.zero_grad()


@pytest.mark.parametrize("add", [_shard_and_add, _add_and_shard, _shard_and_use_and_add])
@pytest.mark.parametrize("trains_before", [False, True])
def test_a_unit_that_is_added_later_is_part_of_the_tree(
    add: Callable[[Any, Any], None], *, trains_before: bool
) -> None:
    """The step's last microbatch, which does not use the adapter, reduces the adapter's gradients all the same."""

    def check() -> None:
        pair: Any = twins(_Adapted)
        reference, sharded = pair
        for num_adapters in (1, 2):
            if trains_before:
                LOSS(sharded).backward()
                sharded.zero_grad()
            adapter = _adapter()
            reference.adapters.append(copy.deepcopy(adapter))
            add(sharded, adapter)
            for model in pair:
                model.zero_grad()
                with no_gradient_sync(sharded):
                    model(inputs(), num_adapters).square().mean().backward()
                model(inputs()).square().mean().backward()
            assert_gradients_equal(reference, sharded)
            assert_at_rest(sharded)
        with pytest.raises(RuntimeError, match=r"the outermost unit, got 'adapters\.0'"):
            fsdp(sharded.get_submodule("adapters.0")).reset_iter_state()

    run_ranks(check, 2)


def test_a_unit_with_other_options_of_the_tree_is_refused_by_name() -> None:
    def check() -> None:
        model, adapter = _Adapted(), _adapter()
        shard(model)
        fully_shard(adapter, options=ShardingOptions(prefetch_budget=1))
        model.adapters.append(adapter)
        with pytest.raises(ValueError, match=r"the unit 'adapters\.0' to leave `prefetch_budget` out"):
            LOSS(model)

    run_ranks(check, 1)
