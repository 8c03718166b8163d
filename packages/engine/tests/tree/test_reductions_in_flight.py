"""The number of reductions beside backward, their communicator, and streams shared between trees."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from engine_models import (
    Net,
    assert_gradients_equal,
    assert_trains_alike,
    fsdp,
    inputs,
    mean_square,
    mesh_of,
    shard,
    twins,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lamella_engine import fully_shard, share_comm_ctx
from lamella_engine._streams.streams import Reduction
from lamella_engine.testing import (
    FakeWork,
    assert_at_rest,
    fake_streams,
    gradient_installs_watched,
    named_units,
    streams_of,
)
from lamella_testing import run_ranks

X = inputs()
LOSS = mean_square(lambda model: model(X))


def _most_in_flight(model: nn.Module) -> int:
    streams, most = streams_of(model), 0
    hold = streams.hold

    def count(reduction: Reduction) -> None:
        nonlocal most
        hold(reduction)
        most = max(most, len(streams._reductions))

    streams.hold = count  # type: ignore[method-assign]
    LOSS(model).backward()
    streams.hold = hold  # type: ignore[method-assign]
    return most


@pytest.mark.parametrize("num", [1, 2, 3, 9])
def test_as_many_are_in_flight_as_asked_for_and_none_after_backward(num: int) -> None:
    def check() -> None:
        reference, model = twins()
        fsdp(model).set_reduce_scatter_max_input_buffers(num)
        assert _most_in_flight(model) == min(num, 4), "three blocks and the rest"
        assert not streams_of(model)._reductions
        model.zero_grad()
        assert_trains_alike(reference, model, LOSS)

    run_ranks(check, 2)


@pytest.mark.parametrize("num_axes", [1, 2])
def test_the_optimizer_waits_for_the_install_of_reduced_gradients(num_axes: int) -> None:
    """Gradients are divided, cast and added to after the reduction, on the reduction's stream."""
    installed: list[FakeWork] = []

    def check() -> None:
        mesh = mesh_of((2,) * num_axes)
        _, model = twins(apply=lambda model: fully_shard(model.layers[0], mesh=mesh) and fully_shard(model, mesh=mesh))
        streams = fake_streams(model)

        with gradient_installs_watched(lambda _: installed.append(streams.work())):
            LOSS(model).backward()
        assert len(installed) == 2
        assert all(work.is_before(streams.compute.seen) for work in installed)

    run_ranks(check, 2**num_axes)


def test_the_largest_number_in_the_tree_counts() -> None:
    def check() -> None:
        model = Net()
        fsdp(fully_shard(model.layers[0])).set_reduce_scatter_max_input_buffers(3)
        shard_rest(model)
        assert _most_in_flight(model) == 3
        fsdp(model).set_reduce_scatter_max_input_buffers(2)
        assert _most_in_flight(model) == 2
        fsdp(model.layers[1]).set_reduce_scatter_max_input_buffers(4, recurse=False)
        assert _most_in_flight(model) == 4

    def shard_rest(model: Net) -> None:
        for layer in model.layers[1:]:
            fully_shard(layer)
        fully_shard(model)

    run_ranks(check, 2)


def test_reductions_stay_in_flight_between_backwards_until_the_last() -> None:
    def check() -> None:
        reference, model = twins()
        fsdp(model).set_reduce_scatter_max_input_buffers(8)
        for is_last in (False, True):
            fsdp(model).set_is_last_backward(is_last)
            LOSS(model).backward()
            assert len(streams_of(model)._reductions) == (0 if is_last else 4)
            LOSS(reference).backward()
        assert_gradients_equal(reference, model)

    run_ranks(check, 2)


def test_reductions_may_have_a_communicator_of_their_own() -> None:
    def check() -> None:
        reference, model = twins()
        num_groups = len(dist.distributed_c10d._world.pg_map)
        fsdp(model).set_separate_reduce_scatter_group()
        fsdp(model).set_separate_reduce_scatter_group(True)
        assert len(dist.distributed_c10d._world.pg_map) == num_groups + 1, "units on the same ranks share one, once"
        assert (
            len({id(group.transports.reduce) for _, unit in named_units(model) for group in unit.parameters.groups})
            == 1
        )
        assert_trains_alike(reference, model, LOSS)
        fsdp(model).set_separate_reduce_scatter_group(False, recurse=False)
        assert [unit.parameters.groups[0].transports.reduce is None for _, unit in named_units(model)] == [
            True,
            False,
            False,
            False,
        ]
        assert_trains_alike(reference, model, LOSS)

    run_ranks(check, 2)


def test_a_communicator_for_a_part_of_the_ranks_is_made_by_that_part_alone() -> None:
    def check() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "shard"))["shard"]
        model = fully_shard(Net(), mesh=mesh)
        if dist.get_rank() < 2:
            fsdp(model).set_separate_reduce_scatter_group()
        LOSS(model).backward()
        assert_at_rest(model)

    run_ranks(check, 4)


def test_trees_that_share_streams_train_as_they_would_alone() -> None:
    def check() -> None:
        references, models = zip(*(twins(seed=seed) for seed in range(2)), strict=True)
        LOSS(models[1]).backward()
        models[1].zero_grad()
        share_comm_ctx([fsdp(model) for model in models])
        first, second = (streams_of(model) for model in models)
        assert first.all_gather_stream is second.all_gather_stream
        assert first.reduce_scatter_stream is second.reduce_scatter_stream
        assert first is not second, "each stays the outermost unit of its own tree"
        for reference, model in zip(references, models, strict=True):
            assert_trains_alike(reference, model, LOSS)
            fsdp(model).reset_iter_state()

    run_ranks(check, 2)


def test_trees_that_share_streams_keep_no_more_reductions_in_flight_than_one() -> None:
    def check() -> None:
        models = [shard(Net()) for _ in range(2)]
        share_comm_ctx([fsdp(model) for model in models])
        fsdp(models[0]).set_is_last_backward(False)
        LOSS(models[0]).backward()
        assert len(streams_of(models[0])._reductions) == 1
        assert _most_in_flight(models[1]) == 1
        assert not streams_of(models[0])._reductions

    run_ranks(check, 2)


def test_a_deleted_tree_with_shared_streams_is_freed() -> None:
    def check() -> None:
        models = [shard(Net()) for _ in range(2)]
        share_comm_ctx([fsdp(model) for model in models])
        ref = weakref.ref(models[0])
        gc.disable()
        del models[0]
        assert ref() is None
        LOSS(models[0]).backward()

    run_ranks(check, 1)


def test_share_comm_ctx_refuses_non_units_and_units_on_several_devices() -> None:
    def check() -> None:
        model = shard(Net())
        share_comm_ctx([])
        share_comm_ctx([fsdp(model)])
        share_comm_ctx([fsdp(model), fsdp(model.layers[0])])
        with pytest.raises(ValueError, match=r"`modules` to be a list of units, got Linear"):
            share_comm_ctx([fsdp(model), model.stem])  # type: ignore[list-item]
        other = shard(Net())
        streams_of(other).device = torch.device("meta")
        with pytest.raises(ValueError, match=r"units on one device, got cpu and meta"):
            share_comm_ctx([fsdp(model), fsdp(other)])

    run_ranks(check, 1)
