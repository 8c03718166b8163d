"""Every optimizer of torch.optim, on four ranks of which some own no row of a parameter."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_models import assert_weights_equal, case, inputs, mean_square, twins
from optimizer_models import (
    NO_DTENSOR_FUSED_KERNEL,
    OPTIMIZERS,
    WHOLE_MATRICES_BEFORE,
    WHOLE_TENSORS_ONLY,
    Short,
    flavours_of,
)
from torch import nn
from torch.distributed.tensor import DTensor

from lamella_engine import DDP, ZERO3, Rows, ShardingOptions, fully_shard
from lamella_engine.testing import assert_at_rest
from lamella_testing import run_ranks

MakeOptimizer = Callable[..., torch.optim.Optimizer]
X = inputs()
LOSS = mean_square(lambda model: model(X))


def _train(model: nn.Module, make_optimizer: partial[torch.optim.Optimizer]) -> None:
    # Muon is for matrices, and refuses vectors when built.
    matrices = make_optimizer.func is torch.optim.Muon
    optimizer = make_optimizer([p for p in model.parameters() if p.ndim == 2 or not matrices])
    _step(model, optimizer)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def closure() -> Any:
        optimizer.zero_grad()
        loss = LOSS(model)
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)


def test_every_flavour_of_every_optimizer_trains_short_parameters_as_unsharded() -> None:
    def check() -> set[str]:
        trained = sorted(OPTIMIZERS.keys() - WHOLE_TENSORS_ONLY.keys())
        for name in trained:
            for flavour in flavours_of(name):
                with case(f"{name} {flavour}"):
                    reference, sharded = twins(Short, fully_shard)
                    for model in (reference, sharded):
                        _train(model, partial(OPTIMIZERS[name], lr=1e-2, **flavour))
                    assert_weights_equal(reference, sharded, rtol=1e-4, atol=1e-6)
                    assert_at_rest(sharded)
        return set(trained)

    (trained, *_) = run_ranks(check, 4)
    assert trained >= {"ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD"}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        # Since torch 2.15 Rprop steps on DTensors, one tensor at a time.
        *((name, {"foreach": True} if name == "Rprop" else {}) for name in WHOLE_TENSORS_ONLY),
        *((name, {"fused": True}) for name in sorted(NO_DTENSOR_FUSED_KERNEL)),
    ],
)
def test_optimizers_unfit_for_dtensors_raise_on_every_rank_instead_of_hanging(
    name: str, options: dict[str, Any]
) -> None:
    def check() -> None:
        reference, sharded = twins(Short, fully_shard)
        make_optimizer = partial(OPTIMIZERS[name], **options)
        if name in WHOLE_MATRICES_BEFORE and torch.__version__ < WHOLE_MATRICES_BEFORE[name]:
            for model in (reference, sharded):
                _train(model, make_optimizer)
            assert_weights_equal(reference, sharded, rtol=1e-4, atol=1e-6)
        else:
            with pytest.raises((RuntimeError, NotImplementedError)):
                _train(sharded, make_optimizer)
        assert_at_rest(sharded)

    run_ranks(check, 4)


@pytest.mark.parametrize(("name", "needs"), [("Adafactor", "parameters that are not cut"), ("LBFGS", "as many rows")])
def test_a_step_beyond_elements_is_refused_by_the_optimizers_name_before_its_closure(name: str, needs: str) -> None:
    def check() -> None:
        for options in (ShardingOptions(), ShardingOptions(keep_together=Rows(1))):
            _, sharded = twins(Short, partial(fully_shard, options=options))
            optimizer = OPTIMIZERS[name](sharded.parameters())
            with pytest.raises(
                NotImplementedError, match=rf"Expected {name} to hold .*{needs}.* shape \(2, 3\) .* on 4 ranks.*AdamW"
            ):
                optimizer.step(lambda: pytest.fail("the closure was called"))

    run_ranks(check, 4)


def test_lbfgs_on_even_shards_and_adafactor_under_ddp_train_as_unsharded() -> None:
    def check() -> None:
        for name, submodule, placements in (("LBFGS", "two", ZERO3), ("Adafactor", "three", DDP)):
            reference, sharded = twins(Short, partial(fully_shard, options=ShardingOptions(placements=placements)))
            for model in (reference, sharded):
                _step(model, OPTIMIZERS[name](model.get_submodule(submodule).parameters()))
            assert_weights_equal(reference, sharded, rtol=1e-4, atol=1e-6)

    run_ranks(check, 2)


def test_adafactor_is_refused_vectors_that_are_cut() -> None:
    """torch scales their updates by norms of each rank's own rows, without an error."""

    def check() -> None:
        _, sharded = twins(Short, fully_shard)
        with pytest.raises(NotImplementedError, match=r"parameters that are not cut.* shape \(2,\) "):
            _step(sharded, torch.optim.Adafactor([sharded.get_parameter("two.bias")]))

    run_ranks(check, 2)


def test_a_fused_optimizer_does_not_touch_the_rows_of_neighbours() -> None:
    """Fused kernels with an empty shard have been seen to update the memory behind the shard."""

    def check() -> None:
        _, sharded = twins(Short, fully_shard)
        optimizer = torch.optim.AdamW([sharded.get_parameter("one.bias")], lr=0.5, fused=True)
        before = [parameter.to_local().clone() for parameter in sharded.parameters()]  # type: ignore[attr-defined]
        LOSS(sharded).backward()
        optimizer.step()
        for (name, parameter), value in zip(sharded.named_parameters(), before, strict=True):
            assert isinstance(parameter, DTensor)
            changed = not torch.equal(parameter.to_local(), value)
            assert changed == (name == "one.bias" and dist.get_rank() == 0)

    run_ranks(check, 4)
