"""Optimizers on ranks with no row of some parameters, beside ranks with many: the unsharded steps, or an error.

The even layout's short parameters are in `test_every_optimizer`; here are the flat layout's, and both together.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from engine_models import assert_weights_equal, case, inputs, mesh_of, twins
from optimizer_models import OPTIMIZERS
from torch import nn
from torch.distributed.tensor import DTensor

from lamella_engine import HFSDP, ZERO3, RaggedDTensor, Rows, ShardingOptions, Whole, fully_shard
from lamella_engine.testing import assert_at_rest, flat_alignment
from lamella_layout import Keep
from lamella_testing import run_ranks

X = inputs()

# Refused in the flat layout, with an error on every rank alike.
REFUSED = {
    "Adafactor": "norms of rows and columns",
    "LBFGS": "flattens all parameters into one vector",
    "SparseAdam": "takes sparse gradients only",
}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"foreach": False},
    {"foreach": True},
    {"fused": True},
    {"amsgrad": True, "maximize": True, "weight_decay": 0.1, "foreach": True},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "foreach": True},
    {"momentum": 0.9, "centered": True, "foreach": False},
]


class Ragged(nn.Module):
    """Parameters of one to eleven rows."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(3, 11)
        self.two = nn.Linear(11, 2)
        self.one = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.one(torch.tanh(self.two(torch.tanh(self.wide(x)))))
        return out


@pytest.fixture(autouse=True)
def _small_parameters_are_cut() -> Iterator[None]:
    """At the engine's own alignment no parameter of the tests' models would be cut in the flat layout."""
    with flat_alignment(1):
        yield


def _variants(name: str) -> Iterator[dict[str, Any]]:
    accepted = inspect.signature(OPTIMIZERS[name]).parameters.keys()
    yield from (variant for variant in VARIANTS if accepted >= variant.keys())


def _train(model: nn.Module, make: partial[Any], num_steps: int = 2) -> None:
    matrices = make.func is torch.optim.Muon  # Muon is for matrices, and refuses vectors when built
    optimizer = make([p for p in model.parameters() if p.ndim == 2 or not matrices])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(X).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    for _ in range(num_steps):
        optimizer.step(closure)


def _is_cut(model: nn.Module) -> tuple[bool, bool]:
    """Whether this rank owns nothing of one parameter, and a part of another."""
    rows = [(len(p.to_local()), len(p)) for p in model.parameters() if isinstance(p, DTensor)]
    return any(not num_local for num_local, _ in rows), any(0 < num_local < all_ for num_local, all_ in rows)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - REFUSED.keys() - {"Muon"}))
def test_every_variant_of_every_optimizer_takes_the_unsharded_steps(name: str) -> None:
    def check() -> tuple[bool, bool]:
        for variant in _variants(name):
            with case(f"{name} {variant}"):
                reference, sharded = twins(Ragged, partial(fully_shard, options=ShardingOptions(keep_together=Rows(1))))
                for model in (reference, sharded):
                    _train(model, partial(OPTIMIZERS[name], lr=1e-2, **variant))
                assert_weights_equal(reference, sharded, rtol=1e-4, atol=1e-6)
                assert_at_rest(sharded)
        return _is_cut(sharded)

    own_nothing, own_a_part = zip(*run_ranks(check, 4), strict=True)
    assert any(own_nothing)
    assert any(own_a_part)


def _matrices_in_the_flat_layout(parameter: nn.Parameter) -> Keep | None:
    return Rows(1) if parameter.ndim == 2 else None


@pytest.mark.parametrize("variant", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=repr)
def test_an_optimizer_over_even_and_flat_layouts_trains_as_unsharded(variant: dict[str, Any]) -> None:
    def check() -> None:
        reference, sharded = twins(
            Ragged, partial(fully_shard, options=ShardingOptions(keep_together=_matrices_in_the_flat_layout))
        )
        assert len({type(parameter) for parameter in sharded.parameters()}) == 2
        for model in (reference, sharded):
            _train(model, partial(torch.optim.AdamW, lr=1e-2, **variant))
        assert_weights_equal(reference, sharded, rtol=1e-4, atol=1e-6)

    run_ranks(check, 4)


@pytest.mark.parametrize("name", ["Adam", "SGD"])
def test_main_weights_that_two_axes_cut_take_the_unsharded_steps(name: str) -> None:
    def check() -> None:
        mesh = mesh_of((2, 2))
        apply = partial(
            fully_shard, options=ShardingOptions(keep_together=Rows(1), placements=(HFSDP, ZERO3)), mesh=mesh
        )
        for variant in ({"foreach": True}, {"fused": True}):
            reference, sharded = twins(Ragged, apply)
            for model in (reference, sharded):
                _train(model, partial(OPTIMIZERS[name], lr=1e-2, **variant))
            assert_weights_equal(reference, sharded, rtol=1e-4, atol=1e-6)

    run_ranks(check, 4)


def test_muon_takes_the_unsharded_steps_where_matrices_are_whole_and_is_refused_where_not() -> None:
    def check() -> None:
        for variant in ({}, {"nesterov": False, "weight_decay": 0.0}, {"adjust_lr_fn": "match_rms_adamw"}):
            reference, sharded = twins(Ragged, partial(fully_shard, options=ShardingOptions(keep_together=Whole())))
            for model in (reference, sharded):
                _train(model, partial(torch.optim.Muon, lr=1e-2, **variant))
            assert_weights_equal(reference, sharded, rtol=1e-3, atol=1e-5)
        reference, sharded = twins(Ragged, partial(fully_shard, options=ShardingOptions(keep_together=Rows(1))))
        assert not all(len(p.to_local()) in (0, len(p)) for p in sharded.parameters())  # type: ignore[attr-defined]
        with pytest.raises(NotImplementedError, match=r"Whole\(\)"):
            _train(sharded, partial(torch.optim.Muon, lr=1e-2))

    run_ranks(check, 2)


@pytest.mark.parametrize("name", REFUSED)
def test_non_elementwise_optimizers_raise_on_every_rank_and_leave_units_at_rest(name: str) -> None:
    def check() -> None:
        _, sharded = twins(Ragged, partial(fully_shard, options=ShardingOptions(keep_together=Rows(1))))
        with pytest.raises((RuntimeError, NotImplementedError)):
            _train(sharded, partial(OPTIMIZERS[name]))
        assert_at_rest(sharded)

    run_ranks(check, 4)


@pytest.mark.parametrize("fused", [True, False])
def test_an_optimizer_of_one_parameter_writes_no_rows_of_other_parameters(fused: bool) -> None:
    def check() -> None:
        _, sharded = twins(Ragged, partial(fully_shard, options=ShardingOptions(keep_together=Rows(1))))
        optimizer = torch.optim.AdamW([sharded.get_parameter("one.bias")], lr=0.5, fused=fused)
        before = {name: p.to_local().clone() for name, p in sharded.named_parameters()}  # type: ignore[attr-defined]
        sharded(X).square().mean().backward()
        optimizer.step()
        for name, parameter in sharded.named_parameters():
            assert isinstance(parameter, RaggedDTensor)
            changed = not torch.equal(parameter.to_local(), before[name])
            assert changed == (name == "one.bias" and len(parameter.to_local()) == 1)

    run_ranks(check, 4)


def test_state_of_a_parameter_that_is_not_here_is_kept_and_loaded_again() -> None:
    def check() -> None:
        _, sharded = twins(Ragged, partial(fully_shard, options=ShardingOptions(keep_together=Rows(1))))
        optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
        for _ in range(2):
            sharded(X).square().mean().backward()
            optimizer.step()
        state = optimizer.state_dict()
        _, again = twins(Ragged, partial(fully_shard, options=ShardingOptions(keep_together=Rows(1))))
        other = torch.optim.AdamW(again.parameters(), lr=1e-2)
        other.load_state_dict(state)
        for mine, theirs in zip(optimizer.state.values(), other.state.values(), strict=True):
            assert isinstance(theirs["exp_avg"], RaggedDTensor)
            assert torch.equal(mine["exp_avg"].full_tensor(), theirs["exp_avg"].full_tensor())

    run_ranks(check, 4)
