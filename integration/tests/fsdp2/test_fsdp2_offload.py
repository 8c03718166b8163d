"""Shards at rest on the CPU, for a mesh on any device. Pinned for GPUs; on a CPU mesh torch has nothing to pin for."""

import copy
from typing import Any

import pytest
import torch
from fsdp2_models import (
    DIM,
    Api,
    Stack,
    Where,
    assert_close,
    assert_equal_models,
    assert_trains_as,
    average,
    descend,
    grid,
    inputs,
    local,
    on_ranks,
    shard,
    twins,
)
from torch import nn
from torch.distributed.tensor import DTensor


def _offloaded(api: Api, model: Stack, **kwargs: Any) -> Any:
    return shard(api, model, offload_policy=api.CPUOffloadPolicy(pin_memory=Where.device != "cpu"), **kwargs)


def test_offloaded_shards_train_as_data_parallelism(api: Api) -> None:
    def scenario(policy: dict[str, torch.dtype]) -> None:
        expected, model = twins()
        _offloaded(api, model, mp_policy=api.MixedPrecisionPolicy(**policy))
        assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
        assert_trains_as(expected, model)
        model(inputs()).sum().backward()
        assert {parameter.grad.device.type for parameter in model.parameters()} == {"cpu"}
        assert {tensor.device.type for tensor in model.state_dict().values()} == {"cpu"}

    on_ranks(scenario, cases=({}, {"reduce_dtype": torch.float32}))


def test_an_offloaded_shard_is_a_dtensor_on_the_mesh_over_a_tensor_on_the_cpu(api: Api) -> None:
    def scenario() -> None:
        model = _offloaded(api, Stack())
        model(inputs()).sum().backward()
        for parameter in model.parameters():
            for tensor in (parameter, parameter.grad):
                assert isinstance(tensor, DTensor)
                assert tensor.device_mesh.device_type == Where.device
                assert tensor.device.type == local(tensor).device.type == "cpu"
            assert local(parameter).is_pinned() == local(parameter.grad).is_pinned() == (Where.device == "cuda")

    on_ranks(scenario)


@pytest.mark.parametrize("reduces_each", [True, False])
def test_offloaded_gradients_accumulate_over_microbatches(api: Api, reduces_each: bool) -> None:
    def scenario() -> None:
        expected, model = twins()
        _offloaded(api, model, reshard_after_forward=True)
        for step in range(2):
            for microbatch in range(3):
                model.set_requires_gradient_sync(reduces_each or microbatch != 0)
                model.set_is_last_backward(microbatch == 2)
                for network in (expected, model):
                    network(inputs(seed=10 * step + microbatch)).square().mean().backward()
            average(expected)
            assert_equal_models(expected, model)
            for network in (expected, model):
                descend(network, set_to_none=step == 0)

    on_ranks(scenario)


@pytest.mark.four_ranks
def test_offloaded_shards_may_have_replicas(api: Api) -> None:
    def scenario() -> None:
        mesh = grid("replicate", "shard")
        expected, model = twins()
        _offloaded(api, model, mesh=mesh)
        assert_trains_as(expected, model)
        for microbatch in range(2):
            model.set_requires_all_reduce(microbatch == 1)
            for network in (expected, model):
                network(inputs(seed=microbatch)).square().sum().backward()
        average(expected)
        assert_equal_models(expected, model)

    on_ranks(scenario, 4)


def test_an_optimizer_may_step_in_backward_on_offloaded_gradients(api: Api) -> None:
    def scenario() -> None:
        expected, model = twins()
        _offloaded(api, model)
        optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

        def step(parameter: nn.Parameter) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        for i in range(2):
            for network in (expected, model):
                network(inputs(seed=i)).square().mean().backward()
            average(expected)
            descend(expected)
            assert_equal_models(expected, model)

    on_ranks(scenario)


def test_buffers_stay_on_the_mesh_and_inputs_may_come_from_the_cpu(api: Api) -> None:
    class Shifted(Stack):
        shift: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("shift", torch.ones(DIM))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert x.device.type == Where.device
            return super().forward(x + self.shift)

    def scenario() -> None:
        expected, model = twins(Shifted)
        _offloaded(api, model)
        assert model.shift.device.type == Where.device
        assert_close(model(inputs().cpu()), expected(inputs()))

    on_ranks(scenario)


def test_weights_are_saved_and_loaded_on_the_cpu(api: Api) -> None:
    def scenario() -> None:
        expected, model = twins()
        _offloaded(api, model)
        saved = copy.deepcopy(model.state_dict())
        with torch.no_grad():
            for parameter in model.parameters():
                local(parameter).zero_()
        model.load_state_dict(saved)
        assert_close(model(inputs()), expected(inputs()))
        model.load_state_dict({name: tensor * 0 for name, tensor in saved.items()}, assign=True)
        assert not model(inputs()).any()

    on_ranks(scenario)


def test_the_default_policy_offloads_nothing(api: Api) -> None:
    def scenario() -> None:
        expected, model = twins()
        shard(api, model, offload_policy=api.OffloadPolicy())
        assert_trains_as(expected, model, num_steps=1)
        assert {parameter.device.type for parameter in model.parameters()} == {Where.device}

    on_ranks(scenario)


def test_an_offloaded_model_on_meta_is_asked_for_on_the_cpu(api: Api) -> None:
    def scenario() -> None:
        with torch.device("meta"):
            model = Stack()
        _offloaded(api, model)
        with pytest.raises(RuntimeError, match="materialized"):
            model(inputs())

    on_ranks(scenario)


def test_an_offloaded_model_is_materialised_on_the_cpu(api: Api) -> None:
    def scenario() -> None:
        expected = Stack()
        with torch.device("meta"):
            model = Stack()
        _offloaded(api, model)
        model.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in (*model.parameters(), *expected.parameters()):
                local(parameter).fill_(0.1)
        assert_trains_as(expected, model)

    on_ranks(scenario)
