"""Blocks compiled without graph breaks, and models of such blocks, train as FSDP2 does without a compiler."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as fsdp2
from fsdp2_models import Api, Stack, descend, inputs, on_ranks, shard
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from lamella_testing import load_compiler

# The compiler reads `.grad` of every tensor.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture(autouse=True, scope="module")
def _loaded() -> None:
    load_compiler()


Backend = str | Callable[..., object]
Prepare = Callable[[Api, Any, Backend], Any]


def _compile_blocks(model: Any, backend: Backend) -> None:
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)


def _wrap_blocks(model: Any, wrap: Callable[[nn.Module], Any]) -> None:
    model.blocks = nn.ModuleList(wrap(block) for block in model.blocks)


def _not_at_all(api: Api, model: Any, _: Backend) -> Any:
    return shard(api, model)


def _in_place_then_sharded(api: Api, model: Any, backend: Backend) -> Any:
    _compile_blocks(model, backend)
    return shard(api, model)


def _sharded_then_in_place(api: Api, model: Any, backend: Backend) -> Any:
    shard(api, model)
    _compile_blocks(model, backend)
    return model


def _wrapped_then_sharded(api: Api, model: Any, backend: Backend) -> Any:
    _wrap_blocks(model, lambda block: torch.compile(block, backend=backend, fullgraph=True))
    return shard(api, model)


def _sharded_then_wrapped(api: Api, model: Any, backend: Backend) -> Any:
    shard(api, model)
    _wrap_blocks(model, lambda block: torch.compile(block, backend=backend, fullgraph=True))
    return model


def _recomputed_compiled_and_sharded(api: Api, model: Any, backend: Backend) -> Any:
    _wrap_blocks(model, checkpoint_wrapper)
    return _in_place_then_sharded(api, model, backend)


def _recomputed_sharded_and_compiled(api: Api, model: Any, backend: Backend) -> Any:
    _wrap_blocks(model, checkpoint_wrapper)
    return _sharded_then_in_place(api, model, backend)


def _compiled_recomputed_and_sharded(api: Api, model: Any, backend: Backend) -> Any:
    _compile_blocks(model, backend)
    _wrap_blocks(model, checkpoint_wrapper)
    return shard(api, model)


def _whole_then_sharded(api: Api, model: Any, backend: Backend) -> Any:
    model.compile(backend=backend)
    return shard(api, model)


def _sharded_then_whole(api: Api, model: Any, backend: Backend) -> Any:
    shard(api, model).compile(backend=backend)
    return model


def _sharded_then_whole_wrapped(api: Api, model: Any, backend: Backend) -> Any:
    return torch.compile(shard(api, model), backend=backend)


def _losses(api: Api, prepare: Prepare, backend: Backend = "") -> list[float]:
    torch.manual_seed(0)
    model = prepare(api, Stack(num_blocks=2), backend)
    losses = []
    for step in range(3):
        loss = model(inputs(seed=step)).square().mean()
        loss.backward()
        losses.append(loss.item())
        descend(model)
    return losses


def _assert_losses_of_eager_fsdp2(api: Api, prepare: Prepare) -> None:
    torch._dynamo.reset()
    backend = CompileCounterWithBackend("aot_eager")
    assert _losses(api, prepare, backend) == _losses(fsdp2, _not_at_all)
    assert backend.frame_count > 0


BLOCKS = [_in_place_then_sharded, _sharded_then_in_place, _wrapped_then_sharded, _sharded_then_wrapped]
RECOMPUTED = [_recomputed_compiled_and_sharded, _recomputed_sharded_and_compiled, _compiled_recomputed_and_sharded]
WHOLE = [_whole_then_sharded, _sharded_then_whole, _sharded_then_whole_wrapped]


@pytest.mark.parametrize("cases", [BLOCKS, RECOMPUTED, WHOLE], ids=["blocks", "recomputed", "whole"])
def test_compiled_blocks_have_the_losses_of_eager_fsdp2(api: Api, cases: list[Prepare]) -> None:
    on_ranks(partial(_assert_losses_of_eager_fsdp2, api), cases=cases)


@pytest.mark.slow
def test_blocks_compiled_by_inductor_have_the_losses_of_eager_fsdp2(api: Api) -> None:
    def scenario() -> None:
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")  # in ranks that outlive the test's own filters
        losses = _losses(api, _in_place_then_sharded, "inductor")
        assert losses == pytest.approx(_losses(fsdp2, _not_at_all), rel=1e-5)

    on_ranks(scenario)
