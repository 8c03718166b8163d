"""A budget of bytes lets several units be prefetched, within the budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_models import Net, assert_trains_alike, fsdp, inputs, mean_square, record_third_step, shard, twins
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lamella_engine import DataParallelMeshDims, MixedPrecisionPolicy, fully_shard
from lamella_engine.testing import CollectiveLog, assert_at_rest, named_units, unsharded_nbytes
from lamella_testing import run_ranks

X = inputs()
LOSS = mean_square(lambda model: model(X))


def _learned(model: Any, num_blocks: float | None) -> tuple[Net, CollectiveLog]:
    """A model whose order is known, whose budget holds so many blocks."""
    budget = None if num_blocks is None else int(num_blocks * unsharded_nbytes(model.layers[0]))
    fsdp(model).set_options(prefetch_budget=budget)
    return model, record_third_step(model, LOSS)


def test_as_many_units_are_ahead_as_fit_in_forward_and_in_backward() -> None:
    def check() -> None:
        model, log = _learned(shard(Net(num_layers=5)), 2.5)
        loss = LOSS(model)
        assert log.order == [
            *("gather root", "gather layers.0", "gather layers.1", "compute root"),
            *("gather layers.2", "compute layers.0"),
            *("gather layers.3", "compute layers.1"),
            *("gather layers.4", "compute layers.2"),
            *("compute layers.3", "compute layers.4"),
        ]
        log.clear()
        loss.backward()
        assert log.order == [
            *("gather layers.4", "gather layers.3"),  # at the root's beginning, which has stayed
            *("gather layers.2", "reduce layers.4"),
            *("gather layers.1", "reduce layers.3"),
            *("gather layers.0", "reduce layers.2"),
            *("reduce layers.1", "reduce layers.0", "reduce root"),
        ]

    run_ranks(check, 2)


@pytest.mark.parametrize("num_blocks", [0, 0.5, 1.5])
def test_a_budget_of_less_than_two_units_is_as_none(num_blocks: float) -> None:
    def check() -> None:
        orders = []
        for budget in (None, num_blocks):
            model, log = _learned(shard(Net()), budget)
            LOSS(model).backward()
            orders.append(log.order)
        assert orders[0] == orders[1]

    run_ranks(check, 2)


def test_a_prefetch_budget_for_all_units_gathers_all_units_first() -> None:
    def check() -> None:
        model, log = _learned(shard(Net()), 100)
        LOSS(model).backward()
        blocks = [f"gather layers.{i}" for i in range(3)]
        assert log.order[:5] == ["gather root", *blocks, "compute root"]
        assert log.order[8:11] == blocks[::-1]
        assert len(log.units_of("gather")) == 7, "as many as with any budget"

    run_ranks(check, 2)


@pytest.mark.parametrize("num_blocks", [None, 0, 2, 100])
def test_training_is_the_unsharded_models_with_every_budget(num_blocks: float | None) -> None:
    def check() -> None:
        reference, model = twins()
        _learned(model, num_blocks)
        assert_trains_alike(reference, model, LOSS, num_steps=3)

    run_ranks(check, 2)


def test_units_that_are_kept_cost_nothing() -> None:
    def apply(model: Net) -> None:
        fully_shard(model.layers[1], reshard_after_forward=False)
        fully_shard(model.layers[2], reshard_after_forward=False)
        fully_shard(model.layers[0])
        fully_shard(model)

    def check() -> None:
        reference, model = twins(Net, apply)
        assert_trains_alike(reference, model, LOSS)
        _, log = _learned(model, 0)
        loss = LOSS(model)
        log.clear()
        loss.backward()
        assert log.order == ["gather layers.0", "reduce layers.2", "reduce layers.1", "reduce layers.0", "reduce root"]

    run_ranks(check, 2)


class _Shift(nn.Module):
    """Backward does not look at the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.zeros(5000, 7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.by[: len(x)]


def test_a_unit_without_unshard_in_backward_takes_no_prefetch_budget() -> None:
    def make() -> Net:
        model = Net()
        model.layers[1] = _Shift()
        return model

    def check() -> None:
        reference, model = twins(make)
        fsdp(model.get_submodule("layers.1")).set_unshard_in_backward(False)
        _, log = _learned(model, 1)
        loss = LOSS(model)
        log.clear()
        loss.backward()
        assert log.order[:4] == ["gather layers.2", "gather layers.0", "reduce layers.2", "reduce layers.1"]
        model.zero_grad()
        assert_trains_alike(reference, model, LOSS)

    run_ranks(check, 2)


def test_a_block_that_runs_twice_is_gathered_ahead_twice() -> None:
    class RepeatedLayer(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers[1](self.layers[0](self.stem(x)))
            head: torch.Tensor = self.head(self.layers[2](self.layers[0](x)))
            return head

    def check() -> None:
        reference, model = twins(RepeatedLayer)
        _, log = _learned(model, 3)
        log.clear()
        LOSS(model)
        assert log.order == [
            *("gather root", "gather layers.0", "gather layers.1", "gather layers.2", "compute root"),
            *("compute layers.0", "gather layers.0", "compute layers.1"),
            *("compute layers.0", "compute layers.2"),
        ]
        fsdp(model).reset_iter_state()
        assert_trains_alike(reference, model, LOSS)

    run_ranks(check, 2)


def test_lists_count_instead_for_the_units_that_have_one() -> None:
    def check() -> None:
        model, log = _learned(shard(Net()), 100)
        fsdp(model).set_modules_to_forward_prefetch([fsdp(model.layers[1])])
        LOSS(model)
        assert log.order == [
            *("gather root", "gather layers.1", "compute root"),
            *("gather layers.0", "gather layers.2", "compute layers.0"),
            *("compute layers.1", "compute layers.2"),
        ]

    run_ranks(check, 2)


def test_units_that_were_gathered_for_nothing_are_freed_with_the_pass() -> None:
    class Exits(Net):
        depth = 3

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for layer in self.layers[: self.depth]:
                x = layer(x)
            head: torch.Tensor = self.head(x)
            return head

    def check() -> None:
        reference, model = twins(Exits)
        _, log = _learned(model, 100)
        reference.depth = model.depth = 1  # type: ignore[assignment]
        for num_gathers in (4, 2):
            log.clear()
            with torch.no_grad():
                torch.testing.assert_close(model(X), reference(X))
            assert_at_rest(model)
            assert len(log.units_of("gather")) == num_gathers, "the second time it is known"

    run_ranks(check, 2)


def test_unsharded_nbytes_of_a_unit_equals_its_allocated_bytes() -> None:
    def check() -> None:
        for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)):
            layer = fully_shard(Net().layers[0], mp_policy=policy)
            (group,) = dict(named_units(layer))["root"].parameters.groups
            fsdp(layer).unshard()
            assert unsharded_nbytes(layer) == group.unsharded_weight.flat.untyped_storage().nbytes() > 0

    run_ranks(check, 2)


def test_tensor_parallel_ranks_with_unequal_parts_count_alike() -> None:
    def check() -> tuple[int, int]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        model = nn.Linear(64, 33)
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Replicate(), Shard(0)]))
        model.bias = nn.Parameter(distribute_tensor(model.bias.detach(), mesh, [Replicate(), Replicate()]))
        fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="data"))
        (group,) = dict(named_units(model))["root"].parameters.groups
        fsdp(model).unshard()
        return unsharded_nbytes(model), group.unsharded_weight.flat.untyped_storage().nbytes()

    results = run_ranks(check, 4)
    weights, allocated = {weight for weight, _ in results}, {nbytes for _, nbytes in results}
    assert len(allocated) == 2, "else every rank could count its own"
    assert weights == {max(allocated)}


def test_an_invalid_prefetch_budget_is_refused() -> None:
    def check() -> None:
        model = shard(Net())
        for nbytes, error in ((True, TypeError), (1.5, TypeError), (-1, ValueError)):
            with pytest.raises(error, match=r"Expected `prefetch_budget` to be"):
                fsdp(model).set_options(prefetch_budget=nbytes)
        with pytest.raises(RuntimeError, match=r"outermost unit, got 'layers\.0'. Call set_options\(\)"):
            fsdp(model.layers[0]).set_options(prefetch_budget=1)

    run_ranks(check, 1)
