"""Placement of a parameter: along a dim of the user's choice, and after forward over fewer ranks."""

import pytest
import torch
from fsdp2_models import (
    DIM,
    Api,
    Block,
    Stack,
    assert_all_sharded,
    assert_equal_models,
    assert_trains_as,
    average,
    count,
    grid,
    inputs,
    local,
    on_ranks,
    shard,
    twins,
)  # fmt: skip
from torch import nn
from torch.distributed.tensor import Shard


def _largest_dim(parameter: nn.Parameter) -> Shard:
    return Shard(parameter.shape.index(max(parameter.shape)))


def _last_dim(parameter: nn.Parameter) -> Shard:
    return Shard(-1)


def _columns_of_some(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.shape[-1] == DIM and parameter.ndim > 1 else None


def test_parameters_are_cut_along_the_dim_that_is_asked_for(api: Api) -> None:
    def scenario(place: object) -> None:
        expected, model = twins(lambda: Stack(hidden=8))
        shard(api, model, shard_placement_fn=place)
        dims = set()
        for parameter in model.parameters():
            [placement] = parameter.placements
            assert isinstance(placement, Shard) and placement.dim >= 0
            dims.add(placement.dim)
            assert parameter.is_contiguous() and local(parameter).is_contiguous()
        assert dims == {0, 1}
        for (name, a), b in zip(expected.named_parameters(), model.parameters(), strict=True):
            assert torch.equal(b.full_tensor(), a), name
        model.blocks[0].register_forward_pre_hook(check_parameters)
        model(inputs()).square().sum().backward()
        for parameter in model.parameters():
            assert parameter.grad.is_contiguous() and local(parameter.grad).is_contiguous()
            assert parameter.grad.placements == parameter.placements
        model.zero_grad()
        assert_trains_as(expected, model, num_steps=2)

    def check_parameters(module: nn.Module, args: object) -> None:
        assert all(parameter.is_contiguous() for parameter in module.parameters())

    on_ranks(scenario, cases=(_largest_dim, _last_dim, _columns_of_some))


def test_a_dim_other_than_0_goes_with_low_precision_and_accumulation(api: Api) -> None:
    def scenario() -> None:
        policy = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        expected, model = twins(lambda: Stack(hidden=8))
        shard(api, model, shard_placement_fn=_last_dim, mp_policy=policy)
        expected.to(torch.bfloat16)
        for microbatch in range(2):
            model.set_requires_gradient_sync(microbatch == 1)
            for network in (expected, model):
                network(inputs(seed=microbatch).to(torch.bfloat16)).sum().backward()
        expected.float()
        average(expected)
        for a, b in zip(expected.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(b.grad.full_tensor(), a.grad.float(), rtol=3e-2, atol=5e-2)

    on_ranks(scenario)


@pytest.mark.four_ranks
def test_two_axes_cut_along_the_dim_that_is_asked_for(api: Api) -> None:
    def scenario() -> None:
        expected, model = twins(lambda: Stack(hidden=8))
        shard(api, model, mesh=grid("outer", "inner"), shard_placement_fn=_largest_dim)
        assert {parameter.placements[1].dim for parameter in model.parameters()} == {0, 1}
        assert_trains_as(expected, model, num_steps=2)

    on_ranks(scenario, 4)


# -- reshard_after_forward=int ----------------------------------------------------------------------------------------


@pytest.mark.four_ranks
def test_after_forward_each_pair_of_ranks_may_hold_the_whole(api: Api) -> None:
    def scenario() -> None:
        expected, model = twins(lambda: Stack(hidden=8, dim=8))
        shard(api, model, reshard_after_forward=2)
        before = [parameter.to_local().numel() for parameter in model.parameters()]
        x = inputs(4, 8)
        forward, loss = count(lambda: model(x).square().sum())
        assert forward == {"all_gather": 4}
        for parameter in model.blocks.parameters():
            assert_all_sharded([parameter])
            assert parameter.to_local().numel() == parameter.numel() // 2
        backward, _ = count(loss.backward)
        assert backward == {"all_gather": 4, "reduce_scatter": 4}
        assert [parameter.to_local().numel() for parameter in model.parameters()] == before
        expected(x).square().sum().backward()
        average(expected)
        assert_equal_models(expected, model)

    on_ranks(scenario, 4)


@pytest.mark.four_ranks
def test_resharding_to_fewer_ranks_trains_as_data_parallelism(api: Api) -> None:
    def scenario() -> None:
        expected, model = twins()
        shard(api, model, reshard_after_forward=2)
        assert_trains_as(expected, model)
        loss = lambda m, x: (m(x).mean() - m(x + 1).square().mean()).pow(2)  # noqa: E731
        assert_trains_as(expected, model, loss_of=loss)

    on_ranks(scenario, 4)


def test_resharding_to_all_ranks_or_to_one_equals_true_and_false(api: Api) -> None:
    def scenario(size: int, num_gathers_in_backward: int) -> None:
        model = api.fully_shard(Block(), reshard_after_forward=size)
        loss = model(inputs()).sum()
        counts, _ = count(loss.backward)
        assert counts.get("all_gather", 0) == num_gathers_in_backward

    on_ranks(scenario, 2, cases=((2, 1), (1, 0)))
