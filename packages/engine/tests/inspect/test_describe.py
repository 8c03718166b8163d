"""The report of a unit lists the unit's parameters and settings."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from engine_models import Net, fsdp, shard
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from lamella_engine import MixedPrecisionPolicy, describe, fully_shard, fully_shard_model
from lamella_testing import run_ranks


def test_describe_lists_every_parameter_with_this_ranks_part() -> None:
    def check() -> None:
        text = describe(shard(Net()))
        lines = [line.split() for line in text.splitlines()]
        assert ["gain", "(1,)", "S(0)", *_part(["[0:1]"], ["nothing"]), *_part(["4"], ["0"])] in lines
        rows = _part(["[0:7,", "0:7]", "196"], ["[7:13,", "0:7]", "168"])
        assert ["up.weight", "(13,", "7)", "S(0)", *rows] in lines

    run_ranks(check, 2)


def _part(first: list[str], second: list[str]) -> list[str]:
    return second if dist.get_rank() else first


def test_equal_units_are_described_once_and_with_a_picture() -> None:
    def check() -> None:
        text = describe(shard(Net()))
        assert text.count("layers.0 ... layers.2: FSDPResidual, 1 group, sharded now") == 1
        assert text.count("EvenLayout of") == 2, "one for the blocks, one for the model"
        assert "unsharded |" in text

    run_ranks(check, 2)


def test_dtypes_frozen_groups_and_states_are_told() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, main_dtype=torch.float64)

    def check() -> None:
        model = nn.Sequential(nn.Linear(512, 4), nn.Linear(512, 4))
        model[0].requires_grad_(False)
        fully_shard(model, mp_policy=policy)
        text = describe(model)
        assert "2 groups, sharded now" in text
        # Half of four rows of 512, and half of the bias behind; unsharded all rows.
        assert text.count("at rest     float64, 8.0 KiB a rank with padding") == 2
        assert text.count("unsharded   bfloat16, 4.0 KiB with padding") == 2
        assert "gradients   none: frozen" in text
        assert "gradients   reduced in float32" in text
        fsdp(model).unshard()
        unsharded = describe(model)
        assert unsharded.replace("unsharded now", "sharded now") == text

    run_ranks(check, 2)


def test_a_model_on_meta_is_described() -> None:
    def check() -> None:
        with torch.device("meta"):
            model = Net()
        fully_shard_model(model, units="layers.*", verbose=False)
        assert describe(model.to_empty(device="cpu")) == describe(shard(Net()))

    run_ranks(check, 2)


def test_names_are_the_models_own() -> None:
    def check() -> None:
        model = Net()
        model.layers[0] = checkpoint_wrapper(model.layers[0])
        fully_shard(model.get_submodule("layers.0._checkpoint_wrapped_module"))
        fully_shard(model)
        text = describe(model)
        assert "layers.0: FSDPResidual" in text
        assert "_checkpoint_wrapped_module" not in text

    run_ranks(check, 1)


def test_describe_refuses_a_model_without_units() -> None:
    with pytest.raises(ValueError, match="units in it, got Net"):
        describe(Net())


def test_describing_changes_nothing() -> None:
    def check() -> None:
        model = shard(Net())
        before = {name: (id(p), p._version) for name, p in model.named_parameters()}
        describe(fsdp(model))  # type: ignore[arg-type]
        assert before == {name: (id(p), p._version) for name, p in model.named_parameters()}

    run_ranks(check, 1)
