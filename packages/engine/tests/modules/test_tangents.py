"""Tangents of forward-mode differentiation go through units, and a backward may follow."""

import warnings

import torch
import torch.autograd.forward_ad as forward_ad
from engine_models import Net, assert_gradients_equal, inputs, shard, twins

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
            output.square().mean().backward()
        torch.testing.assert_close(*tangents)
        assert_gradients_equal(*models)

    run_ranks(on_each_rank, 2)
