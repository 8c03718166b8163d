"""lamella's own knobs: one object given to `fully_shard`, fields of the tree changed by one method."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
from engine_models import Net, fsdp, record_third_step, shard
from flat_models import LOSS
from torch import nn

from lamella_buffers import PoolAllocator
from lamella_engine import ZERO1, ZERO2, Rows, ShardingOptions, fully_shard, fully_shard_model
from lamella_engine.testing import named_units, unsharded_nbytes
from lamella_testing import run_ranks

OF_THE_TREE = ["prefetch_budget", "keep_budget", "order_check", "order_check_timeout_s"]


def test_every_field_is_the_units_or_the_trees() -> None:
    assert [field.name for field in fields(ShardingOptions)] == [
        *("placements", "allocator", "keep_together"),
        *OF_THE_TREE,
    ]
    with pytest.raises(FrozenInstanceError):
        ShardingOptions().keep_budget = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("field", "value", "error", "message"),
    [
        ("allocator", "pool", TypeError, r"`allocator` to be an Allocator or None, got str\."),
        ("keep_together", 3, TypeError, r"`keep_together` to be Rows\(n\), Whole\(\), None, or a function .* got 3"),
        ("prefetch_budget", 1.5, TypeError, "`prefetch_budget` to be a whole number of bytes, got 1.5"),
        ("prefetch_budget", -1, ValueError, "`prefetch_budget` to be at least 0 bytes, got -1"),
        ("keep_budget", None, TypeError, "`keep_budget` to be a whole number of bytes, got None"),
        ("keep_budget", True, TypeError, "`keep_budget` to be a whole number of bytes, got True"),
        ("order_check", 1, TypeError, "`order_check` to be True, False or None, got 1"),
        ("order_check_timeout_s", "1", TypeError, "`order_check_timeout_s` to be a number of seconds, got '1'"),
        ("order_check_timeout_s", 0, ValueError, "`order_check_timeout_s` to be a positive number of seconds, got 0"),
    ],
)
def test_a_field_of_another_kind_is_refused_by_name(
    field: str, value: object, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ShardingOptions(**{field: value})  # type: ignore[arg-type]


def test_options_given_to_fully_shard_count_as_those_set_later() -> None:
    def check() -> None:
        nbytes = int(2.5 * unsharded_nbytes(shard(Net()).layers[0]))
        options = ShardingOptions(prefetch_budget=nbytes, keep_budget=nbytes)
        early, late = shard(Net(num_layers=5), options=options), shard(Net(num_layers=5))
        fsdp(late).set_options(prefetch_budget=nbytes, keep_budget=nbytes)
        orders = []
        for model in (early, late, shard(Net(num_layers=5))):
            log = record_third_step(model, LOSS)
            LOSS(model).backward()
            orders.append(log.order)
        assert orders[0] == orders[1] != orders[2]
        assert fsdp(early).sharding_options == fsdp(late).sharding_options == options

    run_ranks(check, 2)


def test_a_whole_model_takes_options_for_all_of_its_units() -> None:
    def check() -> None:
        options = ShardingOptions(placements=ZERO2, prefetch_budget=1 << 20, order_check=True)
        model = fully_shard_model(Net(), units="layers.*", verbose=False, options=options)
        assert {fsdp(module).sharding_options for module in (model, *model.layers)} == {options}

    run_ranks(check, 1)


def test_fields_of_the_tree_are_the_outermost_units_and_change_for_every_unit() -> None:
    def check() -> None:
        model = Net()
        fully_shard(model.layers[0], options=ShardingOptions(placements=ZERO1))
        fully_shard(model.layers[1], options=ShardingOptions(keep_budget=7))
        fully_shard(model, options=ShardingOptions(keep_budget=7, order_check_timeout_s=5))
        fsdp(model).set_options(keep_budget=9, order_check=True)
        fields: dict[str, Any] = {"keep_budget": 9, "order_check": True, "order_check_timeout_s": 5}
        assert fsdp(model).sharding_options == fsdp(model.layers[1]).sharding_options == ShardingOptions(**fields)
        assert fsdp(model.layers[0]).sharding_options == ShardingOptions(placements=ZERO1, **fields)

    run_ranks(check, 1)


@pytest.mark.parametrize(("field", "inner", "outer"), [("prefetch_budget", 5, None), ("keep_budget", 5, 7)])
@pytest.mark.parametrize("later", [False, True], ids=["given", "set"])
def test_conflicting_tree_options_of_an_inner_unit_are_refused_before_sharding(
    field: str, inner: object, outer: object, later: bool
) -> None:
    def check() -> None:
        model = Net()
        if later:
            fsdp(fully_shard(model.layers[1])).set_options(**{field: inner})
        else:
            fully_shard(model.layers[1], options=ShardingOptions(**{field: inner}))  # type: ignore[arg-type]
        before = dict(model.named_parameters())
        options = ShardingOptions() if outer is None else ShardingOptions(**{field: outer})  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=rf"unit 'layers\.1' to leave `{field}` out .* {outer}, got {inner}:"):
            fully_shard(model, options=options)
        assert all(before[name] is parameter for name, parameter in model.named_parameters())
        fully_shard(model, options=ShardingOptions(**{field: inner}))  # type: ignore[arg-type]
        assert getattr(fsdp(model).sharding_options, field) == inner

    run_ranks(check, 1)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"prefetch_bugdet": 5}, TypeError, r"got `prefetch_bugdet`=5\. Did you mean `prefetch_budget`\?$"),
        ({"mesh": 5}, TypeError, rf"one of {', '.join(f'`{name}`' for name in OF_THE_TREE)}, got `mesh`=5\.$"),
        ({"placements": ZERO2}, ValueError, r"`placements` to stay as fully_shard was given it, ZERO1, got ZERO2: "),
        ({"keep_together": Rows(2)}, ValueError, r"options=ShardingOptions\(keep_together=\.\.\.\)"),
        ({"keep_budget": 7, "prefetch_budget": -5}, ValueError, "`prefetch_budget` to be at least 0 bytes, got -5"),
    ],
)
def test_a_change_that_cannot_be_is_refused_and_changes_nothing(
    changes: dict[str, object], error: type[Exception], message: str
) -> None:
    def check() -> None:
        options = ShardingOptions(placements=ZERO1, keep_budget=3)
        model = shard(Net(), options=options)
        with pytest.raises(error, match=message):
            fsdp(model).set_options(**changes)
        assert fsdp(model).sharding_options == options

    run_ranks(check, 1)


@pytest.mark.parametrize("options", [{"keep_budget": 5}, None], ids=str)
def test_an_options_argument_of_another_type_is_refused(options: Any) -> None:
    def check() -> None:
        with pytest.raises(TypeError, match="`options` to be ShardingOptions, got (dict|NoneType)"):
            fully_shard(nn.Linear(2, 2), options=options)

    run_ranks(check, 1)


def test_a_check_that_is_under_way_goes_on_where_another_field_changes() -> None:
    def check() -> None:
        model = shard(Net(), options=ShardingOptions(order_check=True))
        context = next(unit for _, unit in named_units(model)).parameters.context
        check = context.order_check
        assert check is not None
        fsdp(model).set_options(keep_budget=1 << 20)
        assert context.order_check is check
        fsdp(model).set_options(order_check_timeout_s=7)
        assert context.order_check is not check
        assert context.order_check is not None
        assert context.order_check.timeout_s == 7
        fsdp(model).set_options(order_check=False)
        assert context.order_check is None

    run_ranks(check, 1)


def test_the_environment_is_overruled_by_a_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAMELLA_DEBUG", "order")

    def check() -> None:
        for asked, checks in ((None, True), (False, False), (True, True)):
            model = shard(Net(), options=ShardingOptions(order_check=asked))
            assert (next(unit for _, unit in named_units(model)).parameters.context.order_check is not None) == checks

    run_ranks(check, 1)


@pytest.mark.parametrize("make", [PoolAllocator, lambda: None], ids=["pool", "none"])
def test_a_model_with_options_goes_without_the_cyclic_collector(make: Callable[[], PoolAllocator | None]) -> None:
    def check() -> None:
        model = shard(Net(), options=ShardingOptions(allocator=make(), keep_together=lambda _: Rows(1)))
        gone = weakref.ref(model)
        gc.disable()
        del model
        assert gone() is None

    run_ranks(check, 1)
