"""`A_log`, `D` and `dt_bias` stay in fp32 under a bf16 policy, and keep their marks."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import mamba_ssm_like
import pytest
import torch
from mamba_ssm_like import Mamba, Mamba2, Mamba3, MambaLMHeadModel
from mamba_tiny import BATCH, make_model, mean_loss
from torch import nn

from lamella_engine import MixedPrecisionPolicy, fully_shard
from lamella_mamba import keep_fp32, sharding_units
from lamella_testing import run_ranks

FP32_NAMES = {"A_log", "D", "dt_bias"}


def _shard(model: nn.Module) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, param_dtype_override_fn=keep_fp32(model))
    for unit in sharding_units(model):
        fully_shard(unit, mp_policy=policy)
    fully_shard(model, mp_policy=policy)


def _dtypes_in_forward(model: nn.Module) -> dict[str, torch.dtype]:
    """The dtypes that the parameters of mixers compute in, by own name."""
    seen: dict[str, torch.dtype] = {}
    for mixer in [module for module in model.modules() if hasattr(module, "A_log") or hasattr(module, "B_bias")]:
        mixer.register_forward_pre_hook(
            lambda module, _: seen.update({name: p.dtype for name, p in module.named_parameters()})
        )
    return seen


@pytest.mark.parametrize("family", ["mamba", "mamba2", "bamba", "qwen3_next"])
def test_mambas_fp32_parameters_compute_in_fp32_and_other_parameters_in_bf16(family: str) -> None:
    def check() -> None:
        model = make_model(family)
        _shard(model)
        seen = _dtypes_in_forward(model)
        losses = []
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(3):
            loss = mean_loss(model, BATCH)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        names = FP32_NAMES & set(seen)
        assert len(names) > 1
        assert seen == {name: torch.float32 if name in FP32_NAMES else torch.bfloat16 for name in seen}
        assert losses[-1] < losses[0] - 0.1

    run_ranks(check, 2)


@pytest.mark.parametrize("mixer", [Mamba, Mamba2, Mamba3], ids=lambda cls: cls.__name__)
def test_marks_survive_sharding(mixer: Callable[[int], nn.Module]) -> None:
    def marks(model: nn.Module) -> dict[str, list[str]]:
        mark_names = ("_no_weight_decay", "_no_reinit")
        return {name: [mark for mark in mark_names if getattr(p, mark, False)] for name, p in model.named_parameters()}

    def check() -> None:
        model = MambaLMHeadModel(mixer)
        before = marks(model)
        assert sum(map(len, before.values())) > 1
        _shard(model)
        assert marks(model) == before
        with torch.no_grad():
            mamba_ssm_like.mean_loss(model, mamba_ssm_like.BATCH)
        assert marks(model) == before

    run_ranks(check, 2)


def test_a_parameter_in_another_dtype_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"Expected 'backbone\.layers\.0\.mixer\.\w+' in torch.float32, got torch.bf"):
        keep_fp32(MambaLMHeadModel(Mamba2).bfloat16())


def test_a_layer_with_one_such_name_is_no_state_space_layer() -> None:
    skip = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    assert keep_fp32(nn.ParameterDict({"D": skip}))(skip) is None


def test_the_function_holds_no_parameter_and_knows_no_later_one() -> None:
    model = MambaLMHeadModel(Mamba2)
    override = keep_fp32(model)
    a_log = model.get_parameter("backbone.layers.0.mixer.A_log")
    assert override(a_log) == torch.float32 and override(model.get_parameter("lm_head.weight")) is None
    freed = weakref.ref(a_log)
    del a_log, model
    gc.collect()
    assert freed() is None


def test_keep_fp32_knows_parameters_that_to_empty_has_replaced() -> None:
    """Without that, `to_empty` before `fully_shard` would let them compute in bf16, and nothing would tell."""
    with torch.device("meta"):
        model = MambaLMHeadModel(Mamba2)
    override = keep_fp32(model)
    model.to_empty(device="cpu")
    fp32_names = [name for name, p in model.named_parameters() if override(p) == torch.float32]
    assert fp32_names == [name for name, _ in model.named_parameters() if name.rpartition(".")[2] in FP32_NAMES]


def test_a_model_that_was_cast_in_between_is_refused_by_name() -> None:
    model = MambaLMHeadModel(Mamba2)
    override = keep_fp32(model)
    model.bfloat16()
    with pytest.raises(
        ValueError, match=r"Expected 'backbone\.layers\.0\.mixer\.A_log' in torch.float32, got torch.bf"
    ):
        override(model.get_parameter("backbone.layers.0.mixer.A_log"))
