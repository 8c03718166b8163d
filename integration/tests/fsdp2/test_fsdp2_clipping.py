"""Gradient norms and scaling: torch's own tools work on sharded gradients, and mean the global norm."""

import math

import torch
import torch.distributed as dist
from fsdp2_models import (
    Api,
    Stack,
    Where,
    assert_close,
    assert_equal_models,
    average,
    count,
    inputs,
    local,
    on_ranks,
    shard,
    twins,
)
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor


def test_clipping_uses_the_norm_of_the_whole_gradient(api: Api) -> None:
    def scenario(norm_type: float) -> None:
        expected, model = twins()
        shard(api, model)
        for network in (expected, model):
            (100 * network(inputs()).square().sum()).backward()
        average(expected)
        norm = torch.nn.utils.clip_grad_norm_(expected.parameters(), 1.0, norm_type)
        assert norm > 1.0
        counts, got = count(lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type, foreach=True))
        assert isinstance(got, DTensor)
        assert sum(counts.values()) <= 1
        assert_close(got.full_tensor(), norm)
        assert_equal_models(expected, model)

    on_ranks(scenario, cases=(1.0, 2.0, 3.0, math.inf))


def test_a_scaled_step_is_skipped_on_every_rank_if_one_finds_infinity(api: Api) -> None:
    def scenario(finds: bool) -> None:
        _, model = twins(Stack)
        shard(api, model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = GradScaler(Where.device, init_scale=4.0)
        scaler.scale(model(inputs()).square().sum()).backward()
        before = [local(parameter).clone() for parameter in model.parameters()]
        gradient = local(model.stem.weight.grad)
        if finds and dist.get_rank() == 1:
            gradient[0, 0] = math.inf
        unscaled = gradient / 4
        scaler.unscale_(optimizer)
        torch.testing.assert_close(local(model.stem.weight.grad), unscaled)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (2.0 if finds else 4.0)
        after = [local(parameter) for parameter in model.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)) == finds

    on_ranks(scenario, cases=(False, True))
