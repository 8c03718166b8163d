"""Mamba2 in the adapter's units trains as the unsharded model does."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import Mamba2Config, Mamba2ForCausalLM

from lamella_engine import fully_shard, fully_shard_model
from lamella_mamba import declare_direct_reads, sharding_units
from lamella_testing import assert_trains_as_unsharded

VOCAB_SIZE = 64
BATCH = torch.randint(VOCAB_SIZE, (4, 33), generator=torch.Generator().manual_seed(1))


def make_model() -> Mamba2ForCausalLM:
    torch.manual_seed(0)
    config = Mamba2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        num_hidden_layers=2,
        num_heads=8,
        head_dim=8,
        state_size=8,
        n_groups=2,
        chunk_size=16,
    )
    return Mamba2ForCausalLM(config)


def shard(model: nn.Module) -> None:
    for unit in sharding_units(model):
        fully_shard(unit)
    fully_shard(model)


def mean_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def test_two_ranks_train_as_the_unsharded_model_does() -> None:
    assert_trains_as_unsharded(make_model, shard, mean_loss, BATCH)


def test_the_units_are_the_blocks_and_hold_all_that_is_read_directly() -> None:
    model = make_model()
    units = sharding_units(model)
    assert [type(unit).__name__ for unit in units] == ["Mamba2Block"] * 2
    for unit in units:
        names = {name for name, _ in unit.named_parameters()}
        children = {"conv1d.weight", "conv1d.bias", "norm.weight", "out_proj.weight"}
        assert {f"mixer.{name}" for name in children | {"A_log", "D", "dt_bias"}} <= names


def test_children_that_are_units_train_as_part_of_whatever_reads_them() -> None:
    def shard_children(model: nn.Module) -> None:
        declare_direct_reads(model)
        for unit in sharding_units(model):
            for name in ("mixer.conv1d", "mixer.norm", "mixer.out_proj", "mixer", "norm"):
                fully_shard(unit.get_submodule(name))
        shard(model)

    assert_trains_as_unsharded(make_model, shard_children, mean_loss, BATCH)


def test_the_smallest_units_train_as_the_unsharded_model_does() -> None:
    def shard_leaves(model: nn.Module) -> None:
        declare_direct_reads(model)
        fully_shard_model(model, units=1, verbose=False)

    assert_trains_as_unsharded(make_model, shard_leaves, mean_loss, BATCH)


def test_a_model_of_another_family_is_refused() -> None:
    with pytest.raises(ValueError, match="Expected a Mamba2 model .* got Linear"):
        sharding_units(nn.Linear(2, 2))
