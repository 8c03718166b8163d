"""Shards that rest on the CPU. On a CPU mesh there is nothing to move, and all else holds."""

import pytest
import torch
from fsdp2_models import (
    Api,
    Stack,
    assert_equal_models,
    assert_trains_as,
    average,
    descend,
    inputs,
    on_ranks,
    shard,
    twins,
)


def test_offloaded_shards_train_as_data_parallelism(api: Api) -> None:
    def scenario(policy: dict[str, torch.dtype]) -> None:
        expected, model = twins()
        offload = api.CPUOffloadPolicy(pin_memory=False)
        shard(api, model, offload_policy=offload, mp_policy=api.MixedPrecisionPolicy(**policy))
        assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
        assert_trains_as(expected, model)
        model(inputs()).sum().backward()
        assert {parameter.grad.device.type for parameter in model.parameters()} == {"cpu"}
        assert {tensor.device.type for tensor in model.state_dict().values()} == {"cpu"}

    on_ranks(scenario, cases=({}, {"reduce_dtype": torch.float32}))


def test_offloaded_gradients_accumulate_over_microbatches(api: Api) -> None:
    def scenario() -> None:
        expected, model = twins()
        shard(api, model, offload_policy=api.CPUOffloadPolicy(pin_memory=False), reshard_after_forward=True)
        for step in range(2):
            for microbatch in range(3):
                model.set_requires_gradient_sync(microbatch != 0)
                for each in (expected, model):
                    each(inputs(seed=10 * step + microbatch)).square().sum().backward()
            average(expected)
            assert_equal_models(expected, model)
            for each in (expected, model):
                descend(each)

    on_ranks(scenario)


def test_the_default_policy_offloads_nothing(api: Api) -> None:
    def scenario() -> None:
        expected, model = twins()
        shard(api, model, offload_policy=api.OffloadPolicy())
        assert_trains_as(expected, model, num_steps=1)

    on_ranks(scenario)


def test_an_offloaded_model_on_meta_is_asked_for_on_the_cpu(api: Api) -> None:
    def scenario() -> None:
        with torch.device("meta"):
            model = Stack()
        shard(api, model, offload_policy=api.CPUOffloadPolicy(pin_memory=False))
        with pytest.raises(RuntimeError, match="materialized"):
            model(inputs())

    on_ranks(scenario)
