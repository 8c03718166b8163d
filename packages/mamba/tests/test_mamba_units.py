"""Units of a Mamba2 model: blocks, children of blocks by hand, and a refusal of other models."""

from functools import partial

import pytest
from mamba_tiny import BATCH, make_model, mean_loss
from torch import nn

from lamella_engine import fully_shard
from lamella_mamba import declare_direct_reads, sharding_units
from lamella_testing import assert_trains_as_unsharded


def test_the_units_are_the_blocks_and_hold_all_that_is_read_directly() -> None:
    units = sharding_units(make_model("mamba2"))
    assert [type(unit).__name__ for unit in units] == ["Mamba2Block"] * 2
    for unit in units:
        names = {name for name, _ in unit.named_parameters()}
        children = {"conv1d.weight", "conv1d.bias", "norm.weight", "out_proj.weight"}
        assert {f"mixer.{name}" for name in children | {"A_log", "D", "dt_bias"}} <= names


def test_child_units_of_mamba2_blocks_train_as_unsharded() -> None:
    def shard_children(model: nn.Module) -> None:
        declare_direct_reads(model)
        for unit in sharding_units(model):
            for name in ("mixer.conv1d", "mixer.norm", "mixer.out_proj", "mixer", "norm"):
                fully_shard(unit.get_submodule(name))
            fully_shard(unit)
        fully_shard(model)

    assert_trains_as_unsharded(partial(make_model, "mamba2"), shard_children, mean_loss, BATCH, num_steps=2)


def test_a_model_of_another_family_is_refused() -> None:
    with pytest.raises(ValueError, match="Expected a Mamba model with blocks among .*'Mamba2Block'.*, got Linear"):
        sharding_units(nn.Linear(2, 2))
