"""A megatron-core GPTModel in the adapter's units trains as the unsharded model does, on CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lamella_engine import fully_shard
from lamella_megatron import sharding_units
from lamella_testing import assert_trains_as_unsharded, run_ranks
from lamella_testing.megatron import LENGTH, VOCAB_SIZE, tiny_config, tiny_gpt, token_losses

BATCH = torch.randint(VOCAB_SIZE, (4, LENGTH + 1), generator=torch.Generator().manual_seed(1))


def make_model() -> nn.Module:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    torch.manual_seed(0)
    return tiny_gpt(tiny_config(add_bias_linear=True))


def shard(model: nn.Module) -> None:
    for unit in sharding_units(model):
        fully_shard(unit)
    fully_shard(model)


def test_two_ranks_train_as_the_unsharded_model_does() -> None:
    assert_trains_as_unsharded(make_model, shard, lambda model, batch: token_losses(model, batch).mean(), BATCH)


def test_the_units_are_the_layers() -> None:
    [names] = run_ranks(lambda: [type(unit).__name__ for unit in sharding_units(make_model())], 1)
    assert names == ["TransformerLayer"] * 2


def test_a_model_of_another_family_is_refused() -> None:
    with pytest.raises(ValueError, match="Expected a megatron-core model .* got Linear"):
        sharding_units(nn.Linear(2, 2))
