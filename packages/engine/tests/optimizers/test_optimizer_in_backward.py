"""An optimizer may step while backward goes on: hooks on sharded parameters fire when their gradient is reduced."""

from __future__ import annotations

import pytest
import torch
from engine_models import BF16, Net, assert_weights_equal, inputs, mean_square, no_gradient_sync, twins
from torch import nn
from torch.distributed.tensor import DTensor

from lamella_engine import MixedPrecisionPolicy, fully_shard
from lamella_engine.testing import assert_at_rest, record
from lamella_testing import run_ranks

LOSS = mean_square(lambda model: model(inputs()))


def _step_in_backward(model: nn.Module) -> list[torch.Tensor]:
    """Give each parameter a separate optimizer.

    Returns:
        The updated parameters, in order; a growing list.
    """
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.2) for parameter in model.parameters()}
    updated: list[torch.Tensor] = []

    def step(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        assert type(parameter.grad) is type(parameter.detach())
        updated.append(parameter)
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)  # type: ignore[no-untyped-call]
    return updated


def test_an_optimizer_in_backward_trains_as_unsharded_and_keeps_no_gradients() -> None:
    def check() -> None:
        reference, sharded = twins()
        updated = [_step_in_backward(model) for model in (reference, sharded)]
        for _ in range(3):
            for model in (reference, sharded):
                LOSS(model).backward()
            assert_weights_equal(reference, sharded)
            assert all(parameter.grad is None for parameter in sharded.parameters())
        assert len(updated[0]) == len(updated[1]) == 3 * len(list(sharded.parameters()))
        assert all(isinstance(parameter, DTensor) for parameter in updated[1])
        assert_at_rest(sharded)

    run_ranks(check, 2)


@pytest.mark.parametrize("policy", [None, BF16])
def test_hooks_wait_for_the_reduction(policy: MixedPrecisionPolicy | None) -> None:
    def check() -> None:
        model = Net()
        for layer in model.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        updated = _step_in_backward(model)
        with no_gradient_sync(model):
            LOSS(model).backward()
        assert updated == []
        log = record(model)
        LOSS(model).backward()
        assert len(updated) == len(list(model.parameters()))
        assert len(log.units_of("reduce")) == 4

    run_ranks(check, 2)
