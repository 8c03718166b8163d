"""Two axes of data parallelism: sharded over the inner, replicated over the outer."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from fsdp2_models import (
    DIM,
    Api,
    Stack,
    Where,
    assert_all_sharded,
    assert_equal_models,
    assert_trains_as,
    average,
    count,
    descend,
    grid,
    inputs,
    local,
    on_ranks,
    shard,
    twins,
)  # fmt: skip
from torch import nn
from torch.distributed._composable import checkpoint as composable_checkpoint  # type: ignore[attr-defined]
from torch.distributed.tensor import Replicate, Shard

pytestmark = pytest.mark.four_ranks
NUM_UNITS = 4


def test_parameters_are_replicated_over_the_outer_axis_and_sharded_over_the_inner(api: Api) -> None:
    def scenario() -> None:
        mesh = grid("outer", "inner")
        expected, model = twins()
        shard(api, model, mesh=mesh)
        assert_all_sharded(model.parameters())
        for name, parameter in model.named_parameters():
            assert parameter.placements == (Replicate(), Shard(0))
            assert parameter.device_mesh == mesh
            chunks = expected.get_parameter(name).chunk(2)
            assert torch.equal(local(parameter), chunks[mesh.get_local_rank("inner")])
            assert torch.equal(parameter.full_tensor(), expected.get_parameter(name))
        assert list(model.state_dict()) == list(expected.state_dict())

    on_ranks(scenario, 4)


def test_training_is_data_parallelism_over_both_axes(api: Api) -> None:
    def scenario(reshard: bool | None, recompute: bool) -> None:
        expected, model = twins()
        if recompute:
            for block in model.blocks:
                composable_checkpoint(block)
        shard(api, model, mesh=grid("outer", "inner"), reshard_after_forward=reshard)
        assert_trains_as(expected, model, num_steps=2)

    on_ranks(scenario, 4, cases=((True, False), (False, False), (None, True)))


def test_a_step_reduces_each_unit_once_on_each_axis(api: Api) -> None:
    def scenario() -> None:
        _, model = twins()
        shard(api, model, mesh=grid("outer", "inner"))
        forward, loss = count(lambda: model(inputs()).sum())
        backward, _ = count(loss.backward)
        assert forward == {"all_gather": NUM_UNITS}
        assert backward == {"all_gather": NUM_UNITS - 1, "reduce_scatter": NUM_UNITS, "all_reduce": NUM_UNITS}

    on_ranks(scenario, 4)


def _backward(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().sum().backward()


def test_microbatches_may_wait_for_the_outer_axis_or_for_both(api: Api) -> None:
    def scenario(waits_for_both: bool) -> None:
        expected, model = twins()
        shard(api, model, mesh=grid("outer", "inner"))
        for step in range(2):
            totals = {"reduce_scatter": 0, "all_reduce": 0}
            for microbatch in range(3):
                is_last = microbatch == 2
                (model.set_requires_gradient_sync if waits_for_both else model.set_requires_all_reduce)(is_last)
                x = inputs(seed=10 * step + microbatch)
                counts, _ = count(partial(_backward, model, x))
                expected(x).square().sum().backward()
                totals = {kind: number + counts.get(kind, 0) for kind, number in totals.items()}
            assert totals == {"reduce_scatter": NUM_UNITS * (1 if waits_for_both else 3), "all_reduce": NUM_UNITS}
            average(expected)
            assert_equal_models(expected, model)
            for network in (expected, model):
                descend(network)

    on_ranks(scenario, 4, cases=(True, False))


def test_low_precision_is_reduced_on_both_axes(api: Api) -> None:
    def scenario() -> None:
        expected, model = twins()
        policy = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        shard(api, model, mesh=grid("outer", "inner"), mp_policy=policy)
        expected.to(torch.bfloat16)
        for network in (expected, model):
            network(inputs().to(torch.bfloat16)).sum().backward()
        expected.float()
        average(expected)
        for a, b in zip(expected.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(b.grad.full_tensor(), a.grad.float(), rtol=2e-2, atol=2e-2)

    on_ranks(scenario, 4)


def test_replicas_that_differ_are_made_equal_by_a_broadcast_of_local_shards(api: Api) -> None:
    def scenario() -> None:
        mesh = grid("outer", "inner")
        expected, model = twins()
        shard(api, model, mesh=mesh)
        if mesh.get_local_rank("outer"):
            for parameter in model.parameters():
                parameter.detach().fill_(1337)
        group = mesh.get_group("outer")
        for parameter in model.parameters():
            dist.broadcast(local(parameter.detach()), src=dist.get_process_group_ranks(group)[0], group=group)
        assert_trains_as(expected, model, num_steps=1)

    on_ranks(scenario, 4)


def test_a_hook_takes_the_place_of_the_outer_axis(api: Api) -> None:
    """With one sharded axis the user reduces over the outer axis; with two the hook sees the engine's reduction."""

    def scenario(native: bool) -> None:
        mesh = grid("outer", "inner")
        expected, model = twins()
        shard(api, model, mesh=mesh if native else mesh["inner"])
        seen = []

        def reduce(output: torch.Tensor) -> None:
            seen.append(output.numel())
            if not native:
                dist.all_reduce(output, group=mesh.get_group("outer"))
                output /= 2

        for module in (*model.blocks, model):
            module.set_all_reduce_hook(reduce)
        for network in (expected, model):
            network(inputs()).square().sum().backward()
        average(expected)
        assert_equal_models(expected, model)
        assert len(seen) == NUM_UNITS

    on_ranks(scenario, 4, cases=(False, True))


def test_a_hook_has_a_stream_of_its_own_over_one_axis_only(api: Api) -> None:
    def scenario() -> None:
        model = api.fully_shard(Stack(), mesh=grid("outer", "inner"))
        with pytest.raises(ValueError, match="stream cannot be set when using native HSDP"):
            model.set_all_reduce_hook(lambda output: None, stream=torch.get_device_module(Where.device).Stream())
        model = api.fully_shard(Stack(), mesh=grid("outer", "inner")["inner"])
        model.set_all_reduce_hook(lambda output: None, stream=torch.get_device_module(Where.device).Stream())
        model(inputs(4, DIM)).sum().backward()

    on_ranks(scenario, 4)


def test_gradients_are_divided_by_the_ranks_of_both_axes_or_by_the_factor(api: Api) -> None:
    def scenario(factor: float) -> None:
        expected, model = twins()
        shard(api, model, mesh=grid("outer", "inner"))
        model.set_gradient_divide_factor(factor)
        model.set_force_sum_reduction_for_comms(True)  # gloo has no other
        for network in (expected, model):
            network(inputs()).square().sum().backward()
        average(expected)
        root_parameters = [*expected.stem.parameters(), *expected.head.parameters()]
        for parameter in root_parameters:
            parameter.grad *= 4 / factor
        assert_equal_models(expected, model)

    on_ranks(scenario, 4, cases=(4.0, 8.0))
