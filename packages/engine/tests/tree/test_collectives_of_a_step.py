"""The collectives of a step: number, units, order and bytes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from engine_models import Net, fsdp, inputs, no_gradient_sync, shard
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from lamella_engine import fully_shard
from lamella_engine.testing import CollectiveLog, named_units, record
from lamella_layout import EvenLayout
from lamella_testing import run_ranks

# CommDebugMode's module hooks need the input's gradient, which also lets the root end before autograd.
X = inputs().requires_grad_()
BLOCKS = ["layers.0", "layers.1", "layers.2"]


def _sharded(**options: Any) -> tuple[Net, CollectiveLog]:
    """A model whose order is learned, and an empty log."""
    model = Net()
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    _step(model)
    return model, record(model)


def _step(model: nn.Module, x: torch.Tensor = X) -> None:
    model(x).mean().backward()


def _wire_nbytes(model: nn.Module, *names: str) -> int:
    """The bytes of the whole side of a collective: every tensor's slot, padded to equal shards."""
    senders = [unit for name, unit in named_units(model) if name in names]
    assert len(senders) == len(names)
    groups = [group for unit in senders for group in unit.parameters.groups]
    layouts = [group.layout for group in groups if isinstance(group.layout, EvenLayout)]
    assert len(layouts) == len(groups)
    return sum(4 * layout.full_slot(i).numel for layout in layouts for i in range(layout.num_tensors))


def test_a_step_gathers_each_unit_twice_but_the_root_once_and_reduces_each_once() -> None:
    def check() -> list[str]:
        model, log = _sharded()
        with CommDebugMode() as counted:  # type: ignore[no-untyped-call]
            _step(model)
        assert sorted(log.units_of("gather")) == sorted([*BLOCKS, *BLOCKS, "root"])
        assert log.units_of("reduce") == [*BLOCKS[::-1], "root"]
        assert log.nbytes_of("gather") == _wire_nbytes(model, "root", *BLOCKS) + _wire_nbytes(model, *BLOCKS)
        assert log.nbytes_of("reduce") == _wire_nbytes(model, "root", *BLOCKS)
        # Torch's count is the transport's: one grouped call each, and no further calls.
        assert counted.get_total_counts() == 7 + 4
        assert len(counted.get_comm_counts()) == 2
        return log.order

    for num_ranks in (2, 3):
        orders = run_ranks(check, num_ranks)
        assert orders == [orders[0]] * num_ranks


def test_an_optimizer_step_sends_nothing() -> None:
    def check() -> None:
        model, _ = _sharded()
        for optimizer in (torch.optim.AdamW(model.parameters()), torch.optim.SGD(model.parameters(), momentum=0.9)):
            _step(model)
            with CommDebugMode() as counted:  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
            assert counted.get_total_counts() == 0

    run_ranks(check, 2)


def test_one_rank_issues_no_collective() -> None:
    def check() -> None:
        model, _ = _sharded()
        with CommDebugMode() as counted:  # type: ignore[no-untyped-call]
            _step(model)
        assert counted.get_total_counts() == 0

    run_ranks(check, 1)


def test_units_that_stay_are_gathered_once_a_step() -> None:
    def check() -> None:
        model, log = _sharded(reshard_after_forward=False)
        _step(model)
        assert sorted(log.units_of("gather")) == sorted([*BLOCKS, "root"])
        assert sorted(log.units_of("reduce")) == sorted([*BLOCKS, "root"])

    run_ranks(check, 2)


def test_whether_units_stay_can_be_changed_between_steps() -> None:
    def check() -> None:
        model, log = _sharded()
        fsdp(model).set_reshard_after_forward(False)
        _step(model)
        assert Counter(log.units_of("gather")) == Counter([*BLOCKS, "root"])
        log.clear()
        fsdp(model).set_reshard_after_forward(True)
        _step(model)
        assert Counter(log.units_of("gather")) == Counter(2 * [*BLOCKS, "root"])
        log.clear()
        fsdp(model).set_reshard_after_forward(False, recurse=False)
        _step(model)
        assert Counter(log.units_of("gather")) == Counter([*BLOCKS, *BLOCKS, "root"])

    run_ranks(check, 2)


def test_a_root_that_was_told_to_go_after_forward_is_gathered_again() -> None:
    def check() -> None:
        model, log = _sharded(reshard_after_forward=True)
        _step(model)
        assert Counter(log.units_of("gather")) == Counter(2 * [*BLOCKS, "root"])

    run_ranks(check, 2)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_forward_without_gradients_gathers_each_unit_once(mode: Any) -> None:
    def check() -> None:
        model, log = _sharded()
        for _ in range(2):
            with mode():
                model(X)
            assert Counter(log.units_of("gather")) == Counter([*BLOCKS, "root"])
            assert log.units_of("reduce") == []
            log.clear()

    run_ranks(check, 2)


def test_microbatches_without_synchronisation_reduce_nothing() -> None:
    def check() -> None:
        model, log = _sharded()
        with no_gradient_sync(model):
            _step(model)
            _step(model)
        assert len(log.units_of("gather")) == 2 * 7
        assert log.units_of("reduce") == []
        _step(model)
        assert sorted(log.units_of("reduce")) == sorted([*BLOCKS, "root"])

    run_ranks(check, 2)


def test_synchronisation_can_be_switched_for_one_unit_alone() -> None:
    def check() -> None:
        model, log = _sharded()
        fsdp(model.layers[1]).set_requires_gradient_sync(False)
        fsdp(model).set_requires_gradient_sync(True, recurse=False)
        _step(model)
        assert log.units_of("reduce") == ["layers.2", "layers.0", "root"]

    run_ranks(check, 2)


def test_units_that_stay_after_backward_are_not_gathered_for_the_next_microbatch() -> None:
    def check() -> None:
        model, log = _sharded()
        fsdp(model).set_reshard_after_backward(False)
        _step(model)
        log.clear()
        fsdp(model).set_reshard_after_backward(True)
        _step(model)
        # The root and the first block stayed; every further block goes after forward, and is gathered again.
        assert Counter(log.units_of("gather")) == Counter(BLOCKS)

    run_ranks(check, 2)


def test_a_frozen_unit_is_gathered_but_never_reduced() -> None:
    def check() -> None:
        model, log = _sharded()
        model.layers[1].requires_grad_(False)
        _step(model)
        assert log.units_of("gather").count("layers.1") == 2, "gradients pass through it"
        assert log.units_of("reduce") == ["layers.2", "layers.0", "root"]

    run_ranks(check, 2)


def test_frozen_units_that_gradients_never_reach_are_not_gathered_for_backward() -> None:
    def check() -> None:
        model, log = _sharded()
        for module in (model.stem, model.layers[0], model.layers[1]):
            module.requires_grad_(False)
        _step(model, X.detach())
        log.clear()
        _step(model, X.detach())  # by now the early end of backward is learned
        assert Counter(log.units_of("gather")) == Counter([*BLOCKS, "root", "layers.2"])
        assert sorted(log.units_of("reduce")) == ["layers.2", "root"]

    run_ranks(check, 2)


def test_frozen_members_of_a_unit_do_not_travel_with_its_gradients() -> None:
    def check() -> None:
        model = Net(num_layers=1)
        model.layers[0].get_submodule("up").requires_grad_(False)
        shard(model)
        log = record(model)
        _step(model)
        reduced = next(event for event in log.events if event.kind == "reduce" and event.unit == "layers.0")
        # On two ranks: `down` has 7 rows of 13, padded to 8; `gain` one row, padded to two.
        assert reduced.nbytes == 4 * (8 * 13 + 2)

    run_ranks(check, 2)
