"""Gradients that are no plain contiguous tensors reach the optimizer with the values of an unsharded model's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_models import assert_gradients_equal, case, fsdp, inputs, no_gradient_sync, twins, whole
from fused_models import FusedLinear, fuse
from schedule_models import LateLinear
from torch import nn
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor

from lamella_engine import ZERO1, MixedPrecisionPolicy, Rows, ShardingOptions, delay_gradient, fully_shard
from lamella_engine.testing import named_units
from lamella_testing import run_ranks

X = inputs()


def _pair(values: torch.Tensor) -> TwoTensor:
    return TwoTensor(values, values.clone())  # type: ignore[no-untyped-call]


def _train_on_pairs(reference: nn.Module, sharded: nn.Module) -> None:
    """The input is a tensor subclass, so gradients are; autograd adds up those of two microbatches."""
    for model in (reference, sharded):
        for i in range(2):
            model(_pair(X * (i + 1))).square().mean().backward()
    for parameter in reference.parameters():
        assert isinstance(parameter.grad, TwoTensor)
        parameter.grad = parameter.grad.a
    assert_gradients_equal(reference, sharded, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"options": ShardingOptions(placements=ZERO1)},
        {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64)},
        {"options": ShardingOptions(keep_together=Rows(1))},
    ],
    ids=str,
)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_gradients_that_are_tensor_subclasses_train_as_unsharded(options: dict[str, Any], num_ranks: int) -> None:
    def on_each_rank() -> None:
        for make in (lambda: nn.Linear(3, 4), lambda: nn.Linear(3, 5)):  # sent from where they lie, and staged
            with case(make()):  # type: ignore[no-untyped-call]
                _train_on_pairs(*twins(make, lambda model: fully_shard(model, **options)))

    run_ranks(on_each_rank, num_ranks)


def test_a_gradient_of_a_tensor_subclass_is_added_once_to_the_main_grad() -> None:
    def on_each_rank() -> None:
        model = FusedLinear(4, 6)
        fuse(fully_shard(model))
        ((_, unit),) = named_units(model)
        with no_gradient_sync(model):
            model(torch.ones(3, 4)).sum().backward()
        (weight,) = (p for group in unit.parameters.groups for p in group.parameters if p.name == "weight")
        weight.unsharded.grad = _pair(torch.ones(6, 4))
        fsdp(model).reduce_gradients()
        assert model.weight.grad is not None
        assert torch.equal(whole(model.weight.grad), torch.full((6, 4), 3.0 + 1.0))

    run_ranks(on_each_rank, 2)


KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "pair": _pair,
    "transposed": lambda gradient: gradient.t().contiguous().t(),
    "strided": lambda gradient: torch.stack([gradient, gradient], -1)[..., 0],
    "expanded": lambda gradient: gradient[:1].expand_as(gradient),
    "overlapping": lambda gradient: gradient.flatten().as_strided(gradient.shape, (1, 1)),
    "sparse": lambda gradient: gradient.to_sparse(),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"options": ShardingOptions(keep_together=Rows(1))}], ids=str)
def test_a_delayed_gradient_may_have_any_strides_or_tensor_class(kind: str, options: dict[str, Any]) -> None:
    def on_each_rank() -> None:
        for num_rows in (6, 7):
            with case(num_rows):
                layer = LateLinear(4, num_rows)
                done = delay_gradient(fully_shard(layer, **options), layer.get_parameter("weight"))
                values = torch.arange(4.0 * num_rows).view(num_rows, 4)
                layer(torch.ones(2, 4, requires_grad=True)).sum().backward()
                gradient = KINDS[kind](values)
                expected = gradient.a if isinstance(gradient, TwoTensor) else gradient.to_dense()
                layer.weight.grad = gradient
                done()
                assert layer.weight.grad is not None
                assert torch.equal(whole(layer.weight.grad), expected)

    run_ranks(on_each_rank, 2)


class _Lookup(nn.Module):
    """No `nn.Embedding(sparse=True)`, which is refused: nothing says beforehand that its gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(7, 4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens, self.table, sparse=True)


def test_a_sparse_gradient_is_reduced_as_a_dense_one() -> None:
    def on_each_rank() -> None:
        reference, sharded = twins(_Lookup, fully_shard)
        for model in (reference, sharded):
            for _ in range(2):
                model(torch.tensor([1, 5, 5])).square().sum().backward()
        assert reference.table.grad is not None and reference.table.grad.is_sparse
        reference.table.grad = reference.table.grad.to_dense()  # type: ignore[operator]
        assert_gradients_equal(reference, sharded)

    run_ranks(on_each_rank, 2)
