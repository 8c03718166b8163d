"""Blocks and mixers with mamba-ssm's structure, in the adapter's units and in the smallest, train as unsharded.

The modules are stand-ins in plain torch (`mamba_ssm_like`): they show that the table's rows fit the structure and the
reads of mamba-ssm's modules. Its own kernels run on GPUs only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from mamba_ssm_like import BATCH, MHA, Mamba, Mamba2, Mamba2Simple, Mamba3, MambaLMHeadModel, mean_loss
from torch import nn

from lamella_engine import MixedPrecisionPolicy, fully_shard, fully_shard_model, plan_units
from lamella_mamba import declare_direct_reads, sharding_units
from lamella_testing import assert_trains_as_unsharded, run_ranks

MODELS: dict[str, Callable[[], nn.Module]] = {
    "Mamba": partial(MambaLMHeadModel, Mamba, Mamba),
    "Mamba, no fused path, no bias": partial(MambaLMHeadModel, partial(Mamba, use_fast_path=False, bias=False), Mamba),
    "Mamba2": partial(MambaLMHeadModel, Mamba2, Mamba2),
    "Mamba2, no fused path": partial(MambaLMHeadModel, partial(Mamba2, use_mem_eff_path=False), Mamba2),
    "Mamba2, no norm": partial(MambaLMHeadModel, partial(Mamba2, rmsnorm=False), Mamba2),
    "Mamba2Simple": partial(MambaLMHeadModel, Mamba2Simple, Mamba2Simple),
    "Mamba3": partial(MambaLMHeadModel, Mamba3, Mamba3),
    "Mamba2 and attention": partial(MambaLMHeadModel, Mamba2, MHA),
    "Mamba2, LayerNorm": partial(MambaLMHeadModel, Mamba2, Mamba2, norm=nn.LayerNorm),
    "Mamba2, norms called": partial(MambaLMHeadModel, Mamba2, Mamba2, fused_add_norm=False),
}


@pytest.mark.parametrize("function", [sharding_units, declare_direct_reads])
def test_older_kernels_are_refused_for_mamba_ssms_models_alone(
    monkeypatch: pytest.MonkeyPatch, function: Callable[[nn.Module], object]
) -> None:
    versions = {"mamba-ssm": "2.3.2.post1", "causal-conv1d": "1.5.4"}
    monkeypatch.setattr("lamella_precision._vendor_versions._installed", versions.get)
    function(MODELS["Mamba2"]())
    model = MODELS["Mamba2"]()
    monkeypatch.setattr(Mamba2, "__module__", "mamba_ssm.modules.mamba2")
    message = r"Expected causal-conv1d 1\.7 or newer, as lamella-mamba\[ssm\] needs, got 1\.5\.4\. Install"
    with pytest.raises(ImportError, match=message):
        function(model)


def _shard_blocks(model: nn.Module) -> None:
    for unit in sharding_units(model):
        fully_shard(unit)
    fully_shard(model)


def _shard_leaves(model: nn.Module) -> None:
    declare_direct_reads(model)
    fully_shard_model(model, units=1, verbose=False)


# Blocks differ by their classes alone, which five of the models have; reads differ by each option.
BLOCKS = {"Mamba", "Mamba2", "Mamba2Simple", "Mamba3", "Mamba2 and attention"}
CASES = [
    *(pytest.param(make_model, _shard_leaves, id=f"{name}, leaves") for name, make_model in MODELS.items()),
    *(
        pytest.param(make_model, _shard_blocks, id=f"{name}, blocks", marks=() if name in BLOCKS else pytest.mark.slow)
        for name, make_model in MODELS.items()
    ),
]


@pytest.mark.parametrize(("make_model", "shard"), CASES)
def test_two_ranks_train_as_the_unsharded_model_does(
    make_model: Callable[[], nn.Module], shard: Callable[[nn.Module], None]
) -> None:
    assert_trains_as_unsharded(make_model, shard, mean_loss, BATCH, num_steps=3, eps=1e-6)


def test_the_smallest_units_hold_all_that_no_other_module_reads() -> None:
    model = MODELS["Mamba2 and attention"]()
    declare_direct_reads(model)
    names = {unit.name.removeprefix("backbone.layers.") for unit in plan_units(model, units=1).units}
    calls = {"0.mixer.in_proj", "0.mlp.fc1", "0.mlp.fc2", "1.mixer.in_proj", "1.mixer.out_proj", "1.mlp.fc1"}
    assert names == calls | {"1.mlp.fc2", ""}


def test_a_class_of_the_same_name_in_another_library_is_no_block() -> None:
    class Block(nn.Linear):
        pass

    with pytest.raises(ValueError, match="Expected a Mamba model .* got Sequential"):
        sharding_units(nn.Sequential(Block(2, 2)))
    declare_direct_reads(nn.Sequential(Block(2, 2)))


def test_a_block_returns_its_residual_in_fp32_under_a_bf16_policy() -> None:
    def check() -> None:
        model = MODELS["Mamba2"]()
        seen: list[torch.dtype] = []
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        for unit in sharding_units(model):
            unit.register_forward_hook(lambda *hook: seen.extend(t.dtype for t in hook[2]))
            fully_shard(unit, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        mean_loss(model, BATCH).backward()  # type: ignore[no-untyped-call]
        assert seen == 2 * [torch.bfloat16, torch.float32]
        assert all(parameter.grad is not None for parameter in model.parameters())

    run_ranks(check, 2)
