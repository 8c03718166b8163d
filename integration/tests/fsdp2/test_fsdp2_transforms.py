"""Units inside the transforms of `torch.func`."""

import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from fsdp2_models import Api, assert_close, assert_equal_models, average, descend, inputs, on_ranks, shard, twins
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import torch._decomp.decompositions_for_jvp  # the first tangent would import the module, which scripts functions

RESHARD = (True, False)


def test_a_forward_carries_tangents(api: Api) -> None:
    def scenario(reshard: bool) -> None:
        expected, model = twins()
        shard(api, model, reshard_after_forward=reshard)
        x, v = inputs(seed=1).requires_grad_(), inputs(seed=2)
        for got, expected_output in zip(
            torch.func.jvp(model, (x,), (v,)), torch.func.jvp(expected, (x,), (v,)), strict=True
        ):
            assert_close(got, expected_output)

    on_ranks(scenario, cases=RESHARD)


def test_a_backward_goes_through_tangents(api: Api) -> None:
    def scenario(reshard: bool) -> None:
        expected, model = twins()
        shard(api, model, reshard_after_forward=reshard)
        x = inputs(seed=1)
        for network in (expected, model):
            tangent = torch.func.jvp(network, (x,), (torch.ones_like(x),))[1]
            tangent.square().mean().backward()
        average(expected)
        assert_equal_models(expected, model)

    on_ranks(scenario, cases=RESHARD)


def _output_of_first_input(model: nn.Module, x: torch.Tensor, _: torch.Tensor) -> Any:
    return model(x)


def test_an_input_that_does_not_vary_has_no_tangent(api: Api) -> None:
    def scenario(reshard: bool) -> None:
        expected, model = twins()
        shard(api, model, reshard_after_forward=reshard)
        x = inputs(seed=1).requires_grad_()
        for network in (expected, model):
            output, tangent = torch.func.jvp(partial(_output_of_first_input, network, x), (inputs(),), (inputs(),))[:2]
            assert_close(tangent, torch.zeros_like(output))

    on_ranks(scenario, cases=RESHARD)


def test_gradients_go_through_a_batched_model(api: Api) -> None:
    def scenario(reshard: bool) -> None:
        expected, model = twins()
        shard(api, model, reshard_after_forward=reshard)
        for step in range(2):
            x = torch.stack([inputs(seed=3 * step + i) for i in range(3)])
            for network in (expected, model):
                torch.vmap(network)(x).square().mean().backward()
            average(expected)
            assert_equal_models(expected, model)
            for network in (expected, model):
                descend(network)

    on_ranks(scenario, cases=RESHARD)


def _gradient(model: nn.Module, x: torch.Tensor) -> Any:
    return torch.func.grad(lambda values: model(values).square().sum())(x)


def _pulled_back(model: nn.Module, x: torch.Tensor) -> Any:
    output, pull = torch.func.vjp(model, x)[:2]
    return pull(torch.ones_like(output))[0]


def _jacobian(model: nn.Module, x: torch.Tensor) -> Any:
    return torch.func.jacrev(model)(x[0])


def _hessian(model: nn.Module, x: torch.Tensor) -> Any:
    return torch.func.hessian(lambda values: model(values).square().sum())(x[0])


def test_transforms_differentiate_by_an_input(api: Api) -> None:
    def scenario(derivative: Callable[[nn.Module, torch.Tensor], Any], reshard: bool) -> None:
        expected, model = twins()
        shard(api, model, reshard_after_forward=reshard)
        for step in range(2):
            x = inputs(seed=step)
            assert_close(derivative(model, x), derivative(expected, x))
            for network in (expected, model):
                network(x).square().mean().backward()
            average(expected)
            assert_equal_models(expected, model)
            for network in (expected, model):
                descend(network)

    derivatives = (_gradient, _pulled_back, _jacobian, _hessian)
    on_ranks(scenario, cases=list(product(derivatives, RESHARD)))
