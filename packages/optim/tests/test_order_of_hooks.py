"""The hook before every optimizer's step: the order of the functions, and the failures of any other order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from engine_models import Net, fsdp, inputs, rows_of_this_rank, shard
from torch import nn
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from lamella_engine import FSDPModule, delay_gradient, fully_shard
from lamella_engine.extending import before_step
from lamella_engine.testing import AFTER_STEP, BEFORE_STEP, after_step, register_step_hooks, tree_of
from lamella_optim import install
from lamella_optim._installation import STEP_HOOKS
from lamella_testing import run_ranks

Pair = tuple[str, str]


def _backward(model: nn.Module) -> None:
    model(rows_of_this_rank(inputs())).square().mean().backward()


def _head_weight(model: Net) -> nn.Parameter:
    return model.head.get_parameter("weight")


def _optimizer_from_before(
    model: nn.Module, apply: Callable[..., object], kind: Callable[..., Optimizer] = torch.optim.AdamW
) -> Optimizer:
    """An optimizer with parameters from before sharding."""
    optimizer = kind(model.parameters())
    apply(model)
    return optimizer


def _a_layer_that_is_sharded_after_the_optimizer_was_built_steps() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0])
    optimizer = _optimizer_from_before(model, lambda model: fully_shard(model.get_submodule("1")))
    model(torch.ones(2, 4)).square().mean().backward()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.step()
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert not torch.equal(parameter, old)


def _kernels_that_know_no_dtensors_are_refused() -> None:
    kind = type("FusedAdam", (torch.optim.AdamW,), {"__module__": "transformer_engine.pytorch.optimizers"})
    model = Net()
    optimizer = _optimizer_from_before(model, shard, kind)
    _backward(model)
    with pytest.raises(TypeError, match="step_on_local_shards"):
        optimizer.step()


def _a_backward_that_is_not_finalized_is_refused() -> None:
    model = Net()
    optimizer = _optimizer_from_before(model, shard)
    fsdp(model).set_manual_backward_finalization(True)
    _backward(model)
    with pytest.raises(RuntimeError, match="finalize_backward"):
        optimizer.step()


def _a_missing_delayed_gradient_is_refused() -> None:
    model = Net()
    optimizer = _optimizer_from_before(model, shard)
    delay_gradient(model, _head_weight(model))
    _backward(model)
    with pytest.raises(RuntimeError, match="delayed gradient"):
        optimizer.step()


def _shards_on_the_cpu_are_waited_for() -> None:
    """On a CPU no gather is late: a tree with a late gather stands in."""
    model = Net()
    optimizer = _optimizer_from_before(model, shard)
    _backward(model)
    tree = tree_of(model)
    tree.streams.reads_shards = True
    optimizer.step()
    assert not tree.streams.reads_shards


def _a_refused_step_counts_no_write(prepare: Callable[[FSDPModule, Net], object]) -> None:
    """A view of the optimizer counts writes to the parameters when the view is made."""
    model = shard(Net())
    optimizer = torch.optim.AdamW(model.parameters())
    prepare(fsdp(model), model)
    _backward(model)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    versions = [parameter._version for parameter in parameters]
    with pytest.raises(RuntimeError):
        optimizer.step()
    assert [parameter._version for parameter in parameters] == versions


def _refusing_an_unfinished_backward_counts_no_write() -> None:
    def prepare(root: FSDPModule, model: Net) -> None:
        root.set_manual_backward_finalization(True)
        _backward(model)
        root.finalize_backward()

    _a_refused_step_counts_no_write(prepare)


def _refusing_to_miss_a_delayed_gradient_counts_no_write() -> None:
    _a_refused_step_counts_no_write(lambda _, model: delay_gradient(model, _head_weight(model)))


ORDERED: dict[Pair, Callable[[], None]] = {
    ("originals", "view"): _a_layer_that_is_sharded_after_the_optimizer_was_built_steps,
    ("originals", "kernels"): _kernels_that_know_no_dtensors_are_refused,
    ("originals", "finalization"): _a_backward_that_is_not_finalized_is_refused,
    ("originals", "delayed gradients"): _a_missing_delayed_gradient_is_refused,
    ("originals", "offloaded shards"): _shards_on_the_cpu_are_waited_for,
    ("finalization", "view"): _refusing_an_unfinished_backward_counts_no_write,
    ("delayed gradients", "view"): _refusing_to_miss_a_delayed_gradient_counts_no_write,
}
NAMES = list(BEFORE_STEP)


@contextmanager
def _in_order(names: tuple[str, ...]) -> Iterator[None]:
    with patch.dict(BEFORE_STEP, {name: BEFORE_STEP[name] for name in names}, clear=True):
        yield


def test_lamella_registers_one_hook_before_and_one_hook_after_a_step() -> None:
    register_step_hooks()  # as the first `fully_shard` does
    for registered, ours in (
        (torch_optimizer._global_optimizer_pre_hooks, before_step),
        (torch_optimizer._global_optimizer_post_hooks, after_step),
    ):
        own_hooks = [hook for hook in registered.values() if hook.__module__.startswith("lamella_")]
        assert own_hooks == [ours]


def test_functions_of_lamella_optim_have_their_places_in_the_order_of_step_hooks() -> None:
    install()
    in_place = {**BEFORE_STEP, **AFTER_STEP}
    assert {name: in_place[name] for name in STEP_HOOKS} == STEP_HOOKS
    assert [*BEFORE_STEP] == NAMES


def test_the_written_order_keeps_every_pair() -> None:
    for earlier, later in ORDERED:
        assert NAMES.index(earlier) < NAMES.index(later)


@pytest.mark.parametrize("program", ORDERED.values(), ids=lambda program: program.__name__.strip("_"))
def test_a_step_is_right_in_the_written_order(program: Callable[[], None]) -> None:
    run_ranks(program, 2)


@pytest.mark.parametrize("adjacent", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["adjacent", "apart"])
@pytest.mark.parametrize("pair", ORDERED, ids=" before ".join)
def test_a_step_goes_wrong_wherever_a_pair_is_swapped(pair: Pair, adjacent: bool) -> None:
    """In every order of the pair and the exchange of originals with the pair alone swapped."""

    def check() -> None:
        for names in _orders_that_break(pair, adjacent):
            with _in_order(names), pytest.raises((AssertionError, pytest.fail.Exception)):
                ORDERED[pair]()

    run_ranks(check, 2)


def _orders_that_break(pair: Pair, adjacent: bool) -> Iterator[tuple[str, ...]]:
    """Each place for the later of a pair ahead of the earlier, with the remaining functions in the written order.

    Args:
        adjacent: Return the orders with nothing between the two, or all others.
    """
    earlier, later = pair
    other_names = [name for name in NAMES if name not in pair]
    for first, second in itertools.combinations_with_replacement(range(len(other_names) + 1), 2):
        if (first == second) == adjacent:
            yield (*other_names[:first], later, *other_names[first:second], earlier, *other_names[second:])
