"""Ranks as threads of a single process, as in torch's own tests: each rank has process groups and units."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp2_models import (
    Api,
    Stack,
    Where,
    assert_all_sharded,
    assert_close,
    assert_trains_as,
    gradient_of,
    inputs,
    shard,
    units,
)  # fmt: skip
from torch import nn
from torch._C._distributed_c10d import _set_thread_isolation_mode  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.multi_threaded_pg import ProcessLocalGroup, _install_threaded_pg

from lamella_testing import run_ranks


@pytest.fixture(autouse=True)
def _orders_of_streams(api: Api) -> None:
    """Skip the runs on GPUs, in which FSDP2 and lamella have other losses than one rank."""
    if Where.device == "cuda":
        pytest.skip("torch's threaded group copies other threads' tensors without waiting for their streams")


def on_threads(scenario: Callable[[], object], num_ranks: int = 2) -> None:
    """Run a scenario on ranks that are threads of a forked process."""
    failures: list[BaseException] = []

    def be_a_rank(rank: int, store: Any) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=num_ranks, store=store)
        try:
            scenario()
        except BaseException as error:  # noqa: BLE001 - the host raises the error
            failures.append(error)
            ProcessLocalGroup.exception_handle(error)  # type: ignore[no-untyped-call]
        finally:
            dist.destroy_process_group()

    def host() -> None:
        dist.destroy_process_group()
        _set_thread_isolation_mode(True)
        _install_threaded_pg()  # type: ignore[no-untyped-call]
        store = dist.HashStore()  # type: ignore[attr-defined]
        ranks = [threading.Thread(target=be_a_rank, args=(rank, store)) for rank in range(num_ranks)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        if failures:
            raise failures[0]

    run_ranks(host, 1, timeout_s=120.0)


def _twins() -> tuple[Any, Any]:
    """Make model and twin before starting threads: threads share a random number generator."""
    torch.manual_seed(0)
    model = Stack()
    return model, copy.deepcopy(model)


@pytest.mark.parametrize("reshard_after_forward", [True, False, 2, None])
def test_threads_train_as_data_parallelism(api: Api, reshard_after_forward: bool | int | None) -> None:
    twins = _twins()

    def scenario() -> None:
        expected, model = map(copy.deepcopy, twins)
        shard(api, model, reshard_after_forward=reshard_after_forward)
        assert_trains_as(expected, model)

    on_threads(scenario, 4)


def test_threads_replicate_and_shard(api: Api) -> None:
    twins = _twins()

    def scenario() -> None:
        expected, model = map(copy.deepcopy, twins)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        shard(api, model, mesh=mesh)
        assert_trains_as(expected, model, mesh=mesh)

    on_threads(scenario, 4)


def test_threads_keep_weights_over_microbatches_and_step_each_by_itself(api: Api) -> None:
    twins = _twins()

    def scenario() -> None:
        expected, model = map(copy.deepcopy, twins)
        shard(api, model, reshard_after_forward=False)
        model.set_reshard_after_backward(False)
        optimizers = [torch.optim.SGD(twin.parameters(), lr=0.1) for twin in (expected, model)]
        for step in range(4):
            for microbatch in range(2):
                is_last = microbatch == 1
                model.set_requires_gradient_sync(is_last)
                model.set_reshard_after_backward(is_last)
                x = inputs(seed=2 * step + microbatch)
                a, b = expected(x).square().sum(), model(x).square().sum()
                assert_close(b, a)
                a.backward()
                b.backward()
            for parameter in expected.parameters():
                dist.all_reduce(gradient_of(parameter))
                gradient_of(parameter).div_(dist.get_world_size())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert_all_sharded(model.parameters())
        for a, b in zip(expected.parameters(), model.parameters(), strict=True):
            assert_close(b, a)

    on_threads(scenario, 3)


def test_threads_materialise_a_model_that_was_built_on_meta(api: Api) -> None:
    def scenario() -> None:
        with torch.device("meta"):
            model = Stack()
            shard(api, model)
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            nn.init.ones_(parameter)
        model(inputs()).sum().backward()
        assert len(units(api, model)) == 4
        assert all(parameter.grad is not None for parameter in model.parameters())

    on_threads(scenario)
