"""Kernels replace what a model shares with the process, and give it back."""

import sys
from types import ModuleType
from typing import Any

import pytest
import transformers.integrations.liger
from tiny_models import make_model
from torch import nn
from transformers.models.llama import modeling_llama

from lamella_transformers import has_kernels, has_liger, use_kernels


@pytest.mark.parametrize(
    ("scales", "options"),
    [
        ({}, {"cross_entropy": False, "fused_linear_cross_entropy": False}),
        ({"logits_scaling": 1.0}, {"cross_entropy": False, "fused_linear_cross_entropy": False}),
        ({"final_logit_softcapping": 30.0}, None),
    ],
)
def test_replaced_functions_and_methods_are_put_back(
    monkeypatch: pytest.MonkeyPatch, scales: dict[str, float], options: dict[str, bool] | None
) -> None:
    def rotate(*args: Any) -> None: ...

    def normalise(*args: Any) -> None: ...

    calls: list[dict[str, bool] | None] = []

    def apply(model: nn.Module, options: dict[str, bool] | None) -> None:
        calls.append(options)
        modeling_llama.apply_rotary_pos_emb = rotate
        modeling_llama.LlamaRMSNorm.forward = normalise  # type: ignore[method-assign,assignment]

    originals = modeling_llama.apply_rotary_pos_emb, modeling_llama.LlamaRMSNorm.forward
    monkeypatch.setattr(transformers.integrations.liger, "apply_liger_kernel", apply)
    model = make_model("llama")
    for name, scale in scales.items():
        setattr(model.config, name, scale)
    replacements = use_kernels(model, "liger")
    try:
        assert modeling_llama.apply_rotary_pos_emb is rotate
    finally:
        replacements.undo()
    assert (modeling_llama.apply_rotary_pos_emb, modeling_llama.LlamaRMSNorm.forward) == originals
    assert calls == [options]


def test_a_run_without_kernels_replaces_nothing() -> None:
    forward = modeling_llama.LlamaRMSNorm.forward
    use_kernels(make_model("llama"), "none").undo()
    assert modeling_llama.LlamaRMSNorm.forward is forward


def test_model_types_with_kernels_are_those_of_ligers_table(monkeypatch: pytest.MonkeyPatch) -> None:
    table = ModuleType("liger_kernel.transformers.monkey_patch")
    table.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": None}  # type: ignore[attr-defined]
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", table)
    assert has_kernels("llama") and not has_kernels("mamba2")


def test_has_liger_is_false_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not has_liger()
