"""Neighbouring layers are one unit until they hold enough parameters, and train as alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from lamella_engine import ZERO1, ZERO3, AxisPlacement, ShardingOptions
from lamella_engine.extending import unit_of
from lamella_megatron import build_sharded_model, fully_shard_model
from lamella_megatron._model.configuration import min_unit_size_of
from lamella_megatron._model.units import unit_classes
from lamella_testing import run_ranks
from lamella_testing.megatron import ddp_config, seed_random_states, tiny_config, tiny_gpt, token_losses
from lamella_testing.megatron_parity import BATCH, Layout, assert_trains_as_on_one_rank, make_model

MORE_THAN_A_MODEL = 10**6
FULL_RECOMPUTATION = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _unit_lengths(layers: Any) -> list[int]:
    """The number of layers of each unit, in order."""
    units = [unit_of(layer) for layer in layers]
    return [units.count(unit) for unit in dict.fromkeys(units)]


@pytest.mark.parametrize(
    ("num_layers", "unit_lengths"), [(0.5, [1, 1, 1, 1, 1]), (1, [1, 1, 1, 1, 1]), (1.1, [2, 2, 1]), (9, [5])]
)
def test_a_unit_is_closed_once_it_holds_enough_parameters(num_layers: float, unit_lengths: list[int]) -> None:
    def on_each_rank() -> list[int]:
        model: Any = make_model("gpt", Layout(num_ranks=2), num_layers=5)
        names = [name for name, _ in model.named_parameters()]
        layer_size = sum(parameter.numel() for parameter in model.decoder.layers[0].parameters())
        fully_shard_model(model, min_unit_size=int(num_layers * layer_size))
        assert [name for name, _ in model.named_parameters()] == names
        assert unit_of(model) is not unit_of(model.decoder.layers[0])
        return _unit_lengths(model.decoder.layers)

    assert run_ranks(on_each_rank, 2) == [unit_lengths] * 2


def test_layers_of_two_lists_and_layers_around_a_unit_stay_alone() -> None:
    def on_each_rank() -> None:
        model: Any = make_model("moe-mtp", Layout(num_ranks=1))
        fully_shard_model(model, min_unit_size=MORE_THAN_A_MODEL)
        assert _unit_lengths(model.decoder.layers) == [len(model.decoder.layers)]
        predictions = [*model.mtp.layers, *(layer.mtp_model_layer for layer in model.mtp.layers)]
        assert len(predictions) == 4
        assert len({unit_of(module) for module in (model, model.decoder.layers[0], *predictions)}) == 6

    run_ranks(on_each_rank, 1)


@pytest.mark.parametrize("kind", ["moe", "mtp", "*E*E", "M*M*"])
def test_joined_layers_train_as_on_one_rank(kind: str) -> None:
    layout = Layout(num_ranks=2, ep=2 if kind in ("moe", "*E*E") else 1)
    assert_trains_as_on_one_rank(kind, layout, lambda model: fully_shard_model(model, min_unit_size=MORE_THAN_A_MODEL))


def _trained_with_recomputation(
    min_unit_size: int | None, placements: AxisPlacement, recomputation: Mapping[str, object]
) -> tuple[list[torch.Tensor], int]:
    """The weights after two steps, and the number of calls of a layer."""
    from megatron.core.tensor_parallel import random

    # Full recomputation keeps the random states of CUDA.
    vars(random).update(
        _get_cuda_rng_state=lambda **_: torch.get_rng_state(), _set_cuda_rng_state=lambda *_, **__: None
    )
    model: Any = make_model("gpt", Layout(num_ranks=2), num_layers=4)
    vars(model.config).update(recomputation)
    calls: list[nn.Module] = []
    model.decoder.layers[1].register_forward_pre_hook(lambda layer, _: calls.append(layer))
    fully_shard_model(model, min_unit_size=min_unit_size, options=ShardingOptions(placements=placements))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for _ in range(2):
        token_losses(model, BATCH).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().full_tensor() for parameter in model.parameters()], len(calls)


@pytest.mark.parametrize("placements", [ZERO1, ZERO3], ids=["ZeRO-1", "ZeRO-3"])
def test_joined_layers_that_are_recomputed_one_by_one_train_to_the_bits_of_a_unit_a_layer(
    placements: AxisPlacement,
) -> None:
    alone, _ = run_ranks(_trained_with_recomputation, 2, None, placements, {})[0]
    joined, num_calls = run_ranks(_trained_with_recomputation, 2, MORE_THAN_A_MODEL, placements, FULL_RECOMPUTATION)[0]
    assert num_calls == 4
    assert all(torch.equal(*pair) for pair in zip(alone, joined, strict=True))


def _lengths_in_wrapper(
    bucket_size: int | None, fields: Mapping[str, object] | None = None, **kwargs: Any
) -> list[int]:
    from megatron.core import parallel_state

    from lamella_megatron.training import ShardedModel

    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel()
    seed_random_states(0)
    config = tiny_config(num_layers=3)
    module: Any = tiny_gpt(config)
    vars(config).update(fields or {})
    ShardedModel(config, ddp_config(bucket_size=bucket_size), module, **kwargs)
    return _unit_lengths(module.decoder.layers)


def test_the_wrapper_joins_layers_smaller_than_a_bucket() -> None:
    def on_each_rank() -> None:
        assert _lengths_in_wrapper(None) == [3]
        assert _lengths_in_wrapper(10**9) == [3]
        assert _lengths_in_wrapper(1) == [1, 1, 1]

    run_ranks(on_each_rank, 1)


def test_the_wrapper_joins_no_layers_whose_units_the_caller_or_an_order_chooses() -> None:
    def on_each_rank() -> None:
        assert _lengths_in_wrapper(None, min_unit_size=1) == [1, 1, 1]
        assert _lengths_in_wrapper(None, unit_classes=unit_classes()) == [1, 1, 1]
        assert _lengths_in_wrapper(None, {"overlap_moe_expert_parallel_comm": True}) == [1, 1, 1]
        assert _lengths_in_wrapper(None, FULL_RECOMPUTATION) == [1, 1, 1]
        assert _lengths_in_wrapper(None, {"recompute_granularity": "selective"}) == [3]

    run_ranks(on_each_rank, 1)


def test_a_bucket_of_many_ranks_joins_no_more_layers_than_one_of_few() -> None:
    sizes = {size: min_unit_size_of(ddp_config(bucket_size=size)) for size in (None, 7, 1_000_000_000)}
    assert sizes == {None: 40_000_000, 7: 7, 1_000_000_000: 40_000_000}


def test_sizes_that_do_not_fit_are_refused() -> None:
    def on_each_rank() -> None:
        model = make_model("*E*E", Layout(num_ranks=1))
        with pytest.raises(ValueError, match="`ddp_config.bucket_size` of at least 1 parameter, or None, got 0"):
            min_unit_size_of(ddp_config(bucket_size=0))
        with pytest.raises(ValueError, match="`min_unit_size` of at least 1 parameter, got 0"):
            fully_shard_model(model, min_unit_size=0)
        with pytest.raises(ValueError, match=r"`min_unit_size` or `layer_groups`.* got 5 and '\[\*E\]\[\*E\]'"):
            fully_shard_model(model, min_unit_size=5, layer_groups="[*E][*E]")
        with pytest.raises(TypeError, match="Expected no `min_unit_size`, got one. A layer that is being built"):
            build_sharded_model(lambda: model, min_unit_size=5)

    run_ranks(on_each_rank, 1)
