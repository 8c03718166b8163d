"""Qwen3.5 in the adapter's units trains as the unsharded model does."""

import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from lamella_engine import fully_shard, fully_shard_model, plan_units
from lamella_qwen import NAMED_CONFIGS, declare_direct_reads, sharding_units
from lamella_testing import assert_trains_as_unsharded

BATCH = torch.randint(1024, (4, 33), generator=torch.Generator().manual_seed(1))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    config: dict[str, Any] = {**NAMED_CONFIGS["qwen3.5-tiny"]}
    model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))  # type: ignore[no-untyped-call]
    return model


def shard(model: nn.Module) -> None:
    for unit in sharding_units(model):
        fully_shard(unit)
    fully_shard(model)


def mean_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def test_two_ranks_train_as_the_unsharded_model_does() -> None:
    assert_trains_as_unsharded(make_model, shard, mean_loss, BATCH)


def test_the_units_are_the_decoder_layers_and_none_is_inside_another() -> None:
    model = make_model()
    units = sharding_units(model)
    assert [type(unit).__name__ for unit in units] == ["Qwen3_5DecoderLayer"] * 4
    inner_modules = {id(module) for unit in units for module in unit.modules() if module is not unit}
    assert not inner_modules & {id(unit) for unit in units}


def test_a_convolution_that_is_read_directly_lies_in_its_layers_unit() -> None:
    model = make_model()
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv1d)]
    inner_modules = {id(module) for unit in sharding_units(model) for module in unit.modules() if module is not unit}
    assert len(convolutions) == 3
    assert all(id(convolution) in inner_modules for convolution in convolutions)


def test_convolution_units_of_qwen_train_as_unsharded() -> None:
    def shard_convolutions(model: nn.Module) -> None:
        declare_direct_reads(model)
        for module in model.modules():
            if isinstance(module, nn.Conv1d):
                fully_shard(module)
        shard(model)

    assert_trains_as_unsharded(make_model, shard_convolutions, mean_loss, BATCH)


def test_the_smallest_units_train_as_the_unsharded_model_does() -> None:
    def shard_leaves(model: nn.Module) -> None:
        declare_direct_reads(model)
        plan = plan_units(model, units=1)
        assert any("conv1d.weight without calling its module" in note for note in plan.notes)
        fully_shard_model(model, units=1, verbose=False)

    assert_trains_as_unsharded(make_model, shard_leaves, mean_loss, BATCH, num_steps=2)


def test_a_model_of_another_family_is_refused() -> None:
    with pytest.raises(ValueError, match="Expected a Qwen3.5 model .* got Linear"):
        sharding_units(nn.Linear(2, 2))
