"""Who keeps what alive, and in which order hooks see it."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from engine_models import Net, adamw, case, fsdp, inputs, shard
from torch import nn
from torch.distributed.tensor import DTensor

from lamella_buffers import PoolAllocator
from lamella_engine import MixedPrecisionPolicy, ShardingOptions, fully_shard, fully_shard_model
from lamella_engine.testing import named_units
from lamella_testing import run_ranks

X = inputs()


@contextmanager
def _without_cycle_collector() -> Iterator[None]:
    gc.collect()
    gc.freeze()  # earlier objects are not visited again, as long as this rank lives
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _watch(model: nn.Module) -> dict[str, weakref.ref[torch.UntypedStorage]]:
    """The storages of a sharded model: what must be gone when it is."""
    storages = {}
    for name, unit in named_units(model):
        for group in unit.parameters.groups:
            storages[f"{name} shards"] = weakref.ref(group.main_weight.flat.untyped_storage())
            storages[f"{name} unsharded"] = weakref.ref(group.unsharded_weight.flat.untyped_storage())
    return storages


def _alive(storages: dict[str, weakref.ref[torch.UntypedStorage]]) -> set[str]:
    """Which of them still exist. gloo's thread lets go of its last call a moment after it was waited for."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        alive = {name for name, storage in storages.items() if storage() is not None}
        if not alive:
            break
        time.sleep(0.01)
    return alive


def _rests(model: nn.Module) -> None:
    """Nothing happens."""


def _runs_forward(model: nn.Module) -> None:
    model(X)


def _validates(model: nn.Module) -> None:
    with torch.no_grad():
        model(X)


def _runs_backward(model: nn.Module) -> None:
    model(X).mean().backward()


def _is_cast(model: nn.Module) -> None:
    model(X).mean().backward()
    model.double()


def _is_loaded(model: nn.Module) -> None:
    model.load_state_dict(model.state_dict(), assign=True)


def _is_reset(model: nn.Module) -> None:
    model(X)
    fsdp(model).reset_iter_state()


@pytest.mark.parametrize("policy", [None, MixedPrecisionPolicy(param_dtype=torch.bfloat16)])
def test_a_deleted_model_is_freed_without_the_cyclic_collector(policy: MixedPrecisionPolicy | None) -> None:
    def check() -> None:
        for happens in (_rests, _runs_forward, _validates, _runs_backward, _is_cast, _is_loaded, _is_reset):
            with case(happens.__name__), _without_cycle_collector():
                model = Net()
                for layer in model.layers:
                    fully_shard(layer, mp_policy=policy)
                fully_shard(model, mp_policy=policy)
                happens(model)
                storages = _watch(model)
                del model, layer
                assert not _alive(storages)

    run_ranks(check, 2)


def test_a_model_that_was_sharded_in_one_call_is_freed_without_the_cyclic_collector() -> None:
    def check() -> None:
        with _without_cycle_collector():
            model = fully_shard_model(Net(), units="layers.*", verbose=False)
            _runs_backward(model)
            storages = _watch(model)
            del model
            assert not _alive(storages)

    run_ranks(check, 2)


@pytest.mark.parametrize("keeps_pool", [True, False])
def test_a_deleted_model_frees_its_pool_without_the_cyclic_collector(keeps_pool: bool) -> None:
    def check() -> None:
        for happens in (_rests, _runs_forward, _validates, _is_cast, _is_reset):
            with case(happens.__name__), _without_cycle_collector():
                pool = PoolAllocator()
                model = Net()
                for layer in model.layers:
                    fully_shard(layer, options=ShardingOptions(allocator=pool))
                fully_shard(model, options=ShardingOptions(allocator=pool))
                for _ in range(4):
                    _runs_backward(model)
                chunks = {f"chunk {i}": chunk.memory for i, chunk in enumerate(pool._plan._chunks)}
                storages = {name: weakref.ref(memory) for name, memory in chunks.items() if memory is not None}
                assert len(storages) == 3  # the outermost unit's, and two for layers in turn
                del chunks
                happens(model)
                storages |= _watch(model)
                if not keeps_pool:
                    del pool
                del model, layer
                assert not _alive(storages)

    run_ranks(check, 2)


def test_the_graph_of_a_deleted_model_runs_backward_and_then_frees_all_storage() -> None:
    def check() -> None:
        with _without_cycle_collector():
            model = shard(Net())
            loss = model(X).square().mean()
            parameters = list(model.parameters())
            storages = _watch(model)
            del model
            loss.backward()
            del loss, parameters
            assert not _alive(storages)

    run_ranks(check, 2)


def test_an_optimizer_keeps_shards_and_nothing_else() -> None:
    def check() -> None:
        with _without_cycle_collector():
            model = shard(Net())
            optimizer = adamw(list(model.parameters()))
            model(X).mean().backward()
            optimizer.step()
            storages = _watch(model)
            del model
            assert not _alive({name: storage for name, storage in storages.items() if "unsharded" in name})
            assert all(storage() is not None for name, storage in storages.items() if "unsharded" not in name)

    run_ranks(check, 2)


def test_fully_shard_frees_the_storage_of_the_original_parameters() -> None:
    def check() -> None:
        model = Net()
        with _without_cycle_collector():
            originals = [weakref.ref(parameter.untyped_storage()) for parameter in model.parameters()]
            shard(model)
            assert [storage() for storage in originals if storage() is not None] == []

    run_ranks(check, 2)


def test_only_forward_hooks_registered_after_sharding_see_shards_after_forward() -> None:
    def check() -> None:
        model = Net()
        layer = model.layers[1]
        seen: list[tuple[str, bool]] = []

        def note(moment: str, module: nn.Module) -> None:
            seen.append((moment, isinstance(module.get_submodule("up").weight, DTensor)))

        layer.register_forward_pre_hook(lambda module, _: note("before, registered first", module))
        layer.register_forward_hook(lambda module, *_: note("after, registered first", module))
        shard(model)
        layer.register_forward_pre_hook(lambda module, _: note("before, registered last", module))
        layer.register_forward_hook(lambda module, *_: note("after, registered last", module))
        model(X)
        assert seen == [
            ("before, registered first", False),
            ("before, registered last", False),
            ("after, registered first", False),
            ("after, registered last", True),
        ]

    run_ranks(check, 2)


def test_hooks_on_gradients_of_the_unsharded_form_fire_once_a_backward() -> None:
    def check() -> None:
        model = shard(Net())
        seen: list[tuple[int, ...]] = []
        fsdp(model).unshard()
        weight: Any = model.head.weight
        weight.register_hook(lambda gradient: seen.append(tuple(gradient.shape)))
        del weight
        fsdp(model).reshard()
        for num_steps in (1, 2):
            model(X).mean().backward()
            assert seen == [(5, 7)] * num_steps

    run_ranks(check, 2)


def test_repeated_steps_leave_nothing_behind() -> None:
    """Hooks on outputs, graphs and views all go with the step."""

    def check() -> None:
        model = shard(Net())
        optimizer = adamw(list(model.parameters()))

        def step() -> int:
            model(X).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

        with _without_cycle_collector():
            counts = [step() for _ in range(5)]
        assert counts[-1] == counts[1]

    run_ranks(check, 2)
