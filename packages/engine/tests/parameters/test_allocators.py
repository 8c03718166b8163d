"""Unsharded parameters in another allocator's memory: the same numbers, and a plan that outlives departures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_models import (
    Boom,
    Net,
    Residual,
    adamw,
    case,
    descend,
    fsdp,
    inputs,
    no_gradient_sync,
    rows_of_this_rank,
    whole,
)
from torch import nn

from lamella_buffers import Allocator, CachingAllocator, PoolAllocator
from lamella_engine import ZERO1, MixedPrecisionPolicy, ShardingOptions, fully_shard, fully_shard_model
from lamella_engine.testing import assert_at_rest, named_units
from lamella_testing import run_ranks

pytestmark = pytest.mark.usefixtures("steps_on_shards")

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


class _FailingBlock(Residual):
    fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise Boom
        return super().forward(x)


class _FailingNet(Net):
    def make_layer(self, dim: int) -> nn.Module:
        return _FailingBlock(dim)


def _sharded(allocator: Allocator, policy: MixedPrecisionPolicy | None = None, **options: Any) -> Net:
    torch.manual_seed(0)
    model = _FailingNet(num_layers=4)
    chosen = ShardingOptions(allocator=allocator, **options)
    for layer in model.layers:
        fully_shard(layer, options=chosen, mp_policy=policy)
    return fully_shard(model, options=chosen, mp_policy=policy)


def _backward(model: nn.Module, batch: torch.Tensor) -> None:
    loss: torch.Tensor = model(rows_of_this_rank(batch)).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]


def _validates(model: nn.Module) -> None:
    with torch.no_grad():
        model(inputs(seed=1))


def _accumulates(model: nn.Module) -> None:
    with no_gradient_sync(model):
        for seed in range(3):
            _backward(model, inputs(seed=seed))


def _fails(model: nn.Module) -> None:
    layer = model.get_submodule("layers.2")
    layer.fails = True  # type: ignore[assignment]
    with pytest.raises(Boom):
        _backward(model, inputs())
    layer.fails = False  # type: ignore[assignment]
    fsdp(model).reset_iter_state()


def _unshards_by_hand(model: nn.Module) -> None:
    fsdp(model).unshard()
    fsdp(model).reshard()


def _nothing(model: nn.Module) -> None: ...


HAPPENINGS = (_nothing, _validates, _accumulates, _fails, _unshards_by_hand, _nothing)


def _trained(allocator: Allocator, policy: MixedPrecisionPolicy | None) -> list[torch.Tensor]:
    """The weights after each of many steps, with validations and failures in between."""
    model = _sharded(allocator, policy)
    optimizer = adamw(list(model.parameters()))
    weights = []
    for happens in HAPPENINGS * 2:
        happens(model)
        _backward(model, inputs())
        optimizer.step()
        optimizer.zero_grad()
        assert_at_rest(model)
        weights += [whole(parameter).clone() for parameter in model.parameters()]
    return weights


@pytest.mark.parametrize("policy", [None, BF16], ids=["fp32", "bf16"])
def test_training_in_a_pool_equals_training_without_bit_by_bit(policy: MixedPrecisionPolicy | None) -> None:
    def check() -> None:
        pool = PoolAllocator()
        for got, expected in zip(_trained(pool, policy), _trained(CachingAllocator(), policy), strict=True):
            assert torch.equal(got, expected)

    run_ranks(check, 2)


def _steps(model: nn.Module, pool: PoolAllocator, num_steps: int = 1) -> int:
    """Train, and tell how many allocations found no place in the plan."""
    before = pool.report()
    for _ in range(num_steps):
        _backward(model, inputs())
    after = pool.report()
    return after.num_outside - before.num_outside if after.num_plans == before.num_plans else after.num_outside


def test_a_step_is_planned_in_the_bytes_that_are_alive_at_once_and_replayed_from_the_fourth_on() -> None:
    def check() -> None:
        pool = PoolAllocator()
        model = _sharded(pool)
        num_outside = [_steps(model, pool) for _ in range(6)]
        assert num_outside[0] > 0 < num_outside[2]  # the first gathers nothing ahead; the second comes again
        assert num_outside[3:] == [0, 0, 0]
        report = pool.report()
        assert report.planned_nbytes == report.reserved_nbytes == report.bound_nbytes

    run_ranks(check, 2)


def test_steps_replay_the_plan_after_validations_failures_and_manual_unshards() -> None:
    def check() -> None:
        for happens in HAPPENINGS:
            with case(happens.__name__):
                pool = PoolAllocator()
                model = _sharded(pool)
                _steps(model, pool, 3)
                for _ in range(4):
                    happens(model)
                    _steps(model, pool)
                happens(model)
                assert _steps(model, pool) == 0

    run_ranks(check, 2)


def test_microbatches_and_validation_never_leave_the_plan() -> None:
    def check() -> None:
        pool = PoolAllocator()
        model = _sharded(pool)
        _steps(model, pool, 4)
        for happens in (_accumulates, _validates):
            before = pool.report()
            happens(model)
            after = pool.report()
            assert after.num_outside == before.num_outside
            assert after.num_inside > before.num_inside
            assert _steps(model, pool) == 0

    run_ranks(check, 2)


def test_two_models_in_turn_share_a_plan() -> None:
    def check() -> None:
        pool = PoolAllocator()
        first, second = _sharded(pool), _sharded(pool)
        _steps(first, pool, 4)
        planned = pool.report().planned_nbytes
        for _ in range(5):
            _steps(first, pool)
            _steps(second, pool)
        assert _steps(first, pool) + _steps(second, pool) == 0
        assert pool.report().planned_nbytes == planned

    run_ranks(check, 2)


def test_a_model_inside_anothers_step_has_bytes_of_its_own() -> None:
    """A teacher run between a student's forward and backward."""

    def check() -> None:
        pool = PoolAllocator()
        student, teacher = _sharded(pool), _sharded(pool)
        reference = _sharded(CachingAllocator())
        x = inputs()
        for _ in range(5):
            output = student(x)
            _validates(teacher)
            output.square().mean().backward()
            reference(x).square().mean().backward()
        for got, expected in zip(student.parameters(), reference.parameters(), strict=True):
            assert got.grad is not None
            assert expected.grad is not None
            assert torch.equal(whole(got.grad), whole(expected.grad))
        assert pool.report().num_outside == 0

    run_ranks(check, 2)


def test_weights_that_are_replaced_get_places_too() -> None:
    def check() -> None:
        pool = PoolAllocator()
        model = _sharded(pool)
        _steps(model, pool, 4)
        model.load_state_dict(model.state_dict(), assign=True)
        model.double()
        model.float()
        _steps(model, pool, 4)
        assert _steps(model, pool) == 0
        report = pool.report()
        assert report.planned_nbytes == report.bound_nbytes

    run_ranks(check, 2)


def test_copies_that_are_kept_between_steps_stay_outside() -> None:
    """Some buffer is always alive, so no round ends, and no plan is needed."""

    def check() -> None:
        pool = PoolAllocator()
        model = _sharded(pool, placements=ZERO1)
        reference = _sharded(CachingAllocator(), placements=ZERO1)
        for _ in range(4):
            for twin in (model, reference):
                _backward(twin, inputs())
                descend(twin)
                fsdp(twin).mark_updated()
        assert pool.report().num_plans == 0
        for got, expected in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(whole(got), whole(expected))

    run_ranks(check, 2)


# -- the argument ---------------------------------------------------------------------------------------------------


def test_a_whole_model_takes_one_allocator_for_all_of_its_units() -> None:
    def check() -> None:
        pool = PoolAllocator()
        model = fully_shard_model(
            _FailingNet(), units=_FailingBlock, verbose=False, options=ShardingOptions(allocator=pool)
        )
        assert {id(group.allocator) for _, unit in named_units(model) for group in unit.parameters.groups} == {id(pool)}
        _steps(model, pool, 4)
        assert _steps(model, pool) == 0

    run_ranks(check, 2)


def test_an_allocator_option_of_another_type_is_refused_before_sharding() -> None:
    def check() -> None:
        model = Net()
        with pytest.raises(TypeError, match=r"Expected `allocator` to be an Allocator or None, got str\. It needs"):
            fully_shard(model, options=ShardingOptions(allocator="pool"))  # type: ignore[arg-type]
        fully_shard(model)

    run_ranks(check, 1)


class _FullAllocator(CachingAllocator):
    """Has no memory for a new buffer."""

    def create(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        raise torch.OutOfMemoryError("Tried to allocate 20.00 MiB")


def test_memory_that_runs_out_while_a_unit_is_made_names_the_unit_to_build_anew() -> None:
    def on_each_rank() -> None:
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate") as info:
            _sharded(_FullAllocator())
        (note,) = info.value.__notes__
        assert "unit _FailingBlock with 'gain'" in note and "build them anew" in note

    run_ranks(on_each_rank, 2)
