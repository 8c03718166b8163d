"""A model compiled before sharding, after, or as a whole trains like a plain model: graphs end at hooks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from engine_models import Net, assert_trains_alike, fsdp, inputs, mean_square, shard, twins
from torch._dynamo.testing import CompileCounter

from lamella_testing import load_compiler, run_ranks

# The compiler looks for `.grad` on every object in a graph.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture(autouse=True, scope="module")
def _loaded() -> None:
    load_compiler()


X = inputs()
NUM_LAYERS = 2


def _blocks_first(model: Net, backend: Callable[..., object]) -> None:
    for layer in model.layers:
        layer.compile(backend=backend)
    shard(model)


def _blocks_last(model: Net, backend: Callable[..., object]) -> None:
    shard(model)
    for layer in model.layers:
        layer.compile(backend=backend)


def _all_of_it(model: Net, backend: Callable[..., object]) -> None:
    shard(model)
    model.compile(backend=backend)


@pytest.mark.parametrize("compile_and_shard", [_blocks_first, _blocks_last, _all_of_it])
def test_a_compiled_model_trains_as_a_plain_one(compile_and_shard: Callable[..., None]) -> None:
    def on_each_rank() -> None:
        counter = CompileCounter()
        reference, sharded = twins(
            lambda: Net(num_layers=NUM_LAYERS), lambda model: compile_and_shard(model, counter), seed=1
        )
        assert_trains_alike(reference, sharded, mean_square(lambda model: model(X)))
        assert counter.frame_count > 0

    run_ranks(on_each_rank, 2)


def test_compiled_autograd_is_refused_where_the_backward_begins() -> None:
    def on_each_rank() -> None:
        reference, sharded = twins(lambda: Net(num_layers=NUM_LAYERS))
        loss_of = mean_square(lambda model: model(X))
        loss = loss_of(sharded)
        compiled_autograd = torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager"))
        with compiled_autograd, pytest.raises(NotImplementedError, match="got one of compiled autograd"):
            loss.backward()
        fsdp(sharded).reset_iter_state()
        assert_trains_alike(reference, sharded, loss_of)

    run_ranks(on_each_rank, 2)


def test_compiled_graphs_hold_no_collectives_of_hooks() -> None:
    def on_each_rank() -> None:
        seen: list[str] = []

        def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
            seen.extend(str(node.target) for node in graph.graph.nodes)
            return graph.forward

        model = Net(num_layers=NUM_LAYERS)
        _all_of_it(model, backend)
        model(X).square().mean().backward()
        assert seen
        assert not any("c10d" in target or "all_gather" in target for target in seen)

    run_ranks(on_each_rank, 2)
