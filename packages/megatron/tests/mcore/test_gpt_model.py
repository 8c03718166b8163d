"""A megatron-core GPTModel in the adapter's units trains as the unsharded model does, on CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lamella_engine import fully_shard
from lamella_megatron import sharding_units
from lamella_testing import assert_trains_as_unsharded, run_ranks
from lamella_testing.megatron import LENGTH, VOCAB_SIZE, seed_random_states, tiny_config, tiny_gpt, token_losses

BATCH = torch.randint(VOCAB_SIZE, (4, LENGTH + 1), generator=torch.Generator().manual_seed(1))


def make_model() -> nn.Module:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    seed_random_states(0)
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


def test_a_program_that_forgets_to_seed_the_random_states_fails_on_a_cpu_as_on_a_gpu() -> None:
    def on_each_rank() -> None:
        from megatron.core import parallel_state

        parallel_state.initialize_model_parallel()
        model = tiny_gpt(tiny_config(attention_dropout=0.1))
        with pytest.raises(Exception, match="cuda rng state model-parallel-rng is not added"):
            token_losses(model, BATCH)
        seed_random_states(0)
        assert token_losses(model, BATCH).isfinite().all()

    run_ranks(on_each_rank, 1)
