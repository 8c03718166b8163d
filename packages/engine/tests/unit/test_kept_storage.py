"""Unsharded parameters with lasting memory: at one address, stale between uses, and gone after the option is off."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_models import Net, assert_trains_alike, fsdp, inputs, mean_square, shard, shard_on, twins
from extended_models import Halves
from torch import nn

from lamella_buffers import PoolAllocator
from lamella_engine import DDP, ZERO1, ShardingOptions, fully_shard
from lamella_engine.testing import named_units, record
from lamella_testing import run_ranks


def _nbytes(model: nn.Module) -> dict[str, int]:
    return {
        name: sum(group.unsharded_weight.flat.untyped_storage().nbytes() for group in unit.parameters.groups)
        for name, unit in named_units(model)
    }


def _addresses(model: nn.Module) -> list[int]:
    return [
        group.unsharded_weight.flat.data_ptr() for _, unit in named_units(model) for group in unit.parameters.groups
    ]


def _loss(model: nn.Module) -> Any:
    return model(inputs()).square().mean()


def test_kept_storage_stays_between_uses_and_is_freed_when_the_option_is_off() -> None:
    def on_each_rank() -> None:
        _, model = twins()
        assert isinstance(model, Net)
        fsdp(model).set_keep_unsharded_storage(True)
        assert set(_nbytes(model).values()) == {0}, "nothing is kept that was not used"
        for _ in range(2):
            _loss(model).backward()
            assert 0 not in _nbytes(model).values()
            model.zero_grad()
        fsdp(model.layers[1]).set_keep_unsharded_storage(False)
        assert [name for name, nbytes in _nbytes(model).items() if nbytes == 0] == ["layers.1"]
        fsdp(model).set_keep_unsharded_storage(False)
        assert set(_nbytes(model).values()) == {0}

    run_ranks(on_each_rank, 2)


def test_units_are_gathered_as_often_as_without() -> None:
    def on_each_rank() -> None:
        logs = []
        for keeps in (False, True):
            _, model = twins()
            fsdp(model).set_keep_unsharded_storage(keeps)
            _loss(model).backward()
            model.zero_grad()
            log = record(model)
            _loss(model).backward()
            logs.append(log.order)
        assert logs[0] == logs[1]

    run_ranks(on_each_rank, 2)


WAYS: dict[str, dict[str, Any]] = {
    "as a rule": {},
    "kept after forward": {"reshard_after_forward": False},
    "two neighbours": {"reshard_after_forward": 2},
    "ZERO1": {"options": ShardingOptions(placements=ZERO1)},
    "DDP": {"options": ShardingOptions(placements=DDP)},
}


@pytest.mark.parametrize("way", WAYS)
def test_units_with_kept_storage_train_as_unsharded_at_constant_addresses(way: str) -> None:
    def on_each_rank() -> None:
        reference, model = twins(Net, shard_on((4,), **WAYS[way]))
        fsdp(model).set_keep_unsharded_storage(True)
        torch.testing.assert_close(_loss(model), _loss(reference))
        before = [
            group.unsharded_weight.flat.data_ptr() for _, unit in named_units(model) for group in unit.parameters.groups
        ]
        for _ in range(2):
            for twin in (reference, model):
                _loss(twin).backward()
            for a, b in zip(reference.parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(b.grad.full_tensor(), a.grad, rtol=1e-4, atol=1e-6)  # type: ignore[union-attr]
            for twin in (reference, model):
                torch.optim.SGD(twin.parameters(), lr=0.1).step()
                twin.zero_grad()
        after = [
            group.unsharded_weight.flat.data_ptr() for _, unit in named_units(model) for group in unit.parameters.groups
        ]
        assert before == after

    run_ranks(on_each_rank, 4)


def test_units_with_kept_storage_train_beside_units_in_a_pool() -> None:
    def on_each_rank() -> None:
        pool = PoolAllocator()
        reference, model = twins(Net, lambda model: shard(model, options=ShardingOptions(allocator=pool)))
        assert isinstance(model, Net)
        fsdp(model.layers[0]).set_keep_unsharded_storage(True)
        for num_steps in (4, 2):
            for _ in range(num_steps):
                for twin in (reference, model):
                    _loss(twin).backward()
                    twin.zero_grad()
            fsdp(model).set_keep_unsharded_storage(False)
        assert_trains_alike(reference, model, mean_square(lambda model: model(inputs())))

    run_ranks(on_each_rank, 2)


def test_shards_that_were_replaced_keep_memory_of_their_own() -> None:
    def on_each_rank() -> None:
        reference, model = twins()
        fsdp(model).set_keep_unsharded_storage(True)
        for twin in (reference, model):
            twin.double()
            twin(inputs().double()).square().mean().backward()
            twin.zero_grad()
        assert 0 not in _nbytes(model).values()
        fsdp(model).set_keep_unsharded_storage(False)
        assert_trains_alike(reference, model, mean_square(lambda model: model(inputs().double())))

    run_ranks(on_each_rank, 2)


def test_storage_of_extended_parameters_is_kept_too() -> None:
    def on_each_rank() -> None:
        torch.manual_seed(0)
        layer = nn.Linear(4, 4, bias=False)
        expected = layer.weight.detach().clone()
        layer.weight = nn.Parameter(Halves.encode(layer.weight.detach()))
        model = fsdp(fully_shard(layer))
        model.set_keep_unsharded_storage(True)
        addresses = set()
        for _ in range(2):
            model.unshard()
            torch.testing.assert_close(layer.weight.detach(), expected, rtol=1e-4, atol=1e-4)
            addresses.add(layer.weight.untyped_storage().data_ptr())
            model.reshard()
        assert len(addresses) == 1
        assert 0 not in addresses

    run_ranks(on_each_rank, 2)
