"""Ctrl-C between any two lines of the engine: after a reset the model trains on as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from engine_models import BF16, Net, fsdp, inputs, local, mesh_of, no_gradient_sync, rows_of_this_rank, shard
from fused_models import FusedNet, fuse
from torch import nn
from torch.distributed.tensor import DTensor

import lamella_buffers
import lamella_engine
from lamella_buffers import PoolAllocator
from lamella_engine import DDP, HFSDP, HSDP, ZERO1, ZERO2, ZERO3, ShardingOptions
from lamella_engine.testing import assert_at_rest
from lamella_testing import run_ranks
from lamella_testing.interrupts import Interrupt

pytestmark = pytest.mark.usefixtures("steps_on_shards")

_PACKAGES = (lamella_engine, lamella_buffers)
Build = Callable[[], nn.Module]


def _backward(model: nn.Module, step: int) -> None:
    """Two microbatches, the first without synchronisation."""
    x = rows_of_this_rank(inputs(seed=step))
    with no_gradient_sync(model):
        model(x).float().square().mean().backward()
    model(x.flip(0)).float().square().mean().backward()


def _update(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    _backward(model, step)
    optimizer.step()
    optimizer.zero_grad()


def _assert_same_bits(expected: nn.Module, got: nn.Module, place: str) -> None:
    saved = got.state_dict()
    for name, value in expected.state_dict().items():
        assert isinstance(saved[name], DTensor), f"after an interrupt at {place}: {name} is {type(saved[name])}"
        assert torch.equal(local(value), local(saved[name])), f"after an interrupt at {place}: {name} differs"


def _trains_on(build: Build, *, every: int, first: int) -> None:
    """Interrupt successive steps, each at a later line, and compare with an undisturbed twin after each.

    Args:
        build: Makes and shards the model.
        every: Lines from one interrupt to the next.
        first: Lines before the first interrupt.
    """
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(build())
    expected, got = models
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    for step in range(3):  # prefetch is learned
        for model, optimizer in zip(models, optimizers, strict=True):
            _update(model, optimizer, step)
    counter = Interrupt(_PACKAGES)
    counter.during(lambda: _backward(got, 3))
    got.zero_grad()
    for step, at in enumerate(range(first, counter.num_lines, every), start=3):
        interrupt = Interrupt(_PACKAGES, at)
        interrupt.during(partial(_backward, got, step))
        try:
            fsdp(got).reset_iter_state()
            got.zero_grad()
            assert_at_rest(got)
            _assert_same_bits(expected, got, interrupt.place)
            for model, optimizer in zip(models, optimizers, strict=True):
                _update(model, optimizer, step)
            _assert_same_bits(expected, got, interrupt.place)
        except BaseException as error:
            error.add_note(f"After an interrupt at {interrupt.place}, line {at} of {counter.num_lines} of a step.")
            raise


def _fused() -> nn.Module:
    model = FusedNet()
    shard(model)
    for layer in model.layers:
        fuse(layer)
    return model


def _with(shape: tuple[int, ...] = (2,), **options: Any) -> Build:
    return lambda: shard(Net(num_layers=2), mesh=mesh_of(shape), **options)


KINDS: dict[str, tuple[int, Build]] = {
    "one rank": (1, _with((1,))),
    "two ranks": (2, _with()),
    "bf16": (2, _with(mp_policy=BF16)),
    "ZERO1": (2, _with(options=ShardingOptions(placements=ZERO1), mp_policy=BF16)),
    "ZERO2": (2, _with(options=ShardingOptions(placements=ZERO2))),
    "DDP": (2, _with(options=ShardingOptions(placements=DDP), mp_policy=BF16)),
    "HSDP": (2, _with((2, 1), options=ShardingOptions(placements=(HSDP, ZERO3)))),
    "HFSDP": (2, _with((2, 1), options=ShardingOptions(placements=(HFSDP, ZERO3)), mp_policy=BF16)),
    "pool": (2, lambda: _with(options=ShardingOptions(allocator=PoolAllocator()))()),
    "stays": (2, _with(reshard_after_forward=False)),
    "main grads": (2, _fused),
}


@pytest.mark.parametrize("kind", KINDS)
def test_after_an_interrupt_at_some_lines_and_a_reset_training_goes_on(kind: str) -> None:
    num_ranks, build = KINDS[kind]
    every = {"one rank": 83, "two ranks": 443}.get(kind, 997)
    run_ranks(lambda: _trains_on(build, every=every, first=50 * list(KINDS).index(kind)), num_ranks)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_after_an_interrupt_at_any_line_and_a_reset_training_goes_on(kind: str) -> None:
    """Every line of a gather, its end and a reduction; of the other kinds every fifth."""
    num_ranks, build = KINDS[kind]
    every = 1 if kind in ("one rank", "two ranks") else 5
    run_ranks(lambda: _trains_on(build, every=every, first=0), num_ranks, timeout_s=3600.0)
