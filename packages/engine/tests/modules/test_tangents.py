"""Tangents of forward-mode differentiation go through units, and a backward may follow."""

import warnings
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from engine_models import Net, assert_gradients_equal, inputs, shard, shard_on, twins

from lamella_engine import DDP, ZERO3, ShardingOptions
from lamella_testing import run_ranks

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import torch._decomp.decompositions_for_jvp  # the first tangent would import the module, which scripts at import


def test_a_dual_input_gives_the_unsharded_tangents_and_gradients() -> None:
    def on_each_rank() -> None:
        models, tangents = twins(Net, shard), []
        for model in models:
            with forward_ad.dual_level():
                x = inputs().clone().requires_grad_()
                output, tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x))))  # type: ignore[no-untyped-call]
            assert tangent is not None
            tangents.append(tangent.detach())
            (output.square().mean() + tangent.square().mean()).backward()
        torch.testing.assert_close(*tangents)
        assert_gradients_equal(*models)

    run_ranks(on_each_rank, 2)


@pytest.mark.parametrize(("num_ranks", "placements"), [(1, ZERO3), (2, DDP)])
def test_a_gather_that_is_a_copy_may_begin_inside_a_transform(num_ranks: int, placements: Any) -> None:
    def on_each_rank() -> None:
        models = twins(Net, shard_on((num_ranks,), options=ShardingOptions(placements=placements)))
        x = inputs()
        outputs = [torch.func.jvp(model, (x,), (torch.ones_like(x),)) for model in models]
        torch.testing.assert_close(*outputs)

    run_ranks(on_each_rank, num_ranks)
