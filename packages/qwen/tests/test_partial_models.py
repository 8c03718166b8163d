"""Checkpoints that lack tensors of a Qwen3.5 are refused to and from Megatron, and unknown tensors are listed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from lamella_checkpoint import Source
from lamella_convert import MegatronOptions, convert, diff, inspect, open_both
from lamella_files import rename
from lamella_testing.qwen import make_model

BRIDGE = MegatronOptions(dialect="bridge")


def saved(path: Path, kind: Any, *, is_absent: Callable[[str], bool] = lambda name: False) -> Path:
    """Hugging Face's files of a tiny model, without some tensors."""
    make_model(kind).save_pretrained(path)
    weights = load_file(path / "model.safetensors")
    kept_weights = {name: weight for name, weight in weights.items() if not is_absent(name)}
    save_file(kept_weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize(
    ("kind", "absent", "problem"),
    [
        ("dense", ".layers.3.self_attn.k_proj.", r"Expected '.*k_proj.weight' beside '.*q_proj.weight'.* not whole"),
        ("dense", ".layers.3.self_attn.q_proj.", r"Expected '.*q_proj.weight' beside '.*input_layernorm.weight'"),
        ("moe", ".layers.0.mlp.experts.3.", r"Expected experts \(4\) to stack, got 3. Needed for"),
        ("moe", ".layers.3.", r"Expected tensors of 4 layers.* got none of 'model.layers.3.'"),
    ],
)
def test_files_without_tensors_of_the_model_are_refused(tmp_path: Path, kind: str, absent: str, problem: str) -> None:
    files = saved(tmp_path / "hf", kind, is_absent=lambda name: absent in name)
    with pytest.raises(ValueError, match=problem):
        convert(files, tmp_path / "megatron", to="fsdp_dtensor", megatron=BRIDGE)
    assert not (tmp_path / "megatron").exists()


@pytest.mark.parametrize(
    ("absent", "problem"),
    [
        ("layers.0.mlp.experts.linear_fc1.weight3", r"Expected experts \(4\) to stack, got 3"),
        (".layers.2.", r"Expected tensors of 4 layers.* got none of 'model.layers.2.'"),
    ],
)
def test_megatrons_checkpoints_without_tensors_of_the_model_are_refused(
    tmp_path: Path, absent: str, problem: str
) -> None:
    convert(saved(tmp_path / "hf", "moe"), tmp_path / "whole", to="fsdp_dtensor", megatron=BRIDGE)

    def without(source: Source) -> Source:
        return rename(source, lambda name: None if absent in name else name)

    convert(tmp_path / "whole", tmp_path / "part", to="fsdp_dtensor", translate=without, megatron=BRIDGE)
    with pytest.raises(ValueError, match=problem):
        convert(tmp_path / "part", tmp_path / "back", to="hf")


def test_a_comparison_lists_the_experts_and_layers_that_a_model_lacks(tmp_path: Path) -> None:
    files = saved(tmp_path / "hf", "moe")
    convert(files, tmp_path / "megatron", to="fsdp_dtensor", megatron=BRIDGE)
    part = saved(tmp_path / "part", "moe", is_absent=lambda name: ".layers.0.mlp.experts.3." in name)
    for other in (files, tmp_path / "megatron"):
        lines = str(diff(*open_both(other, part))).splitlines()
        assert "model.model.layers.0.mlp.experts.down_proj: shape: [4, 32, 16] in a, [3, 32, 16] in b" in lines


def test_a_tensor_that_no_rule_names_is_left_out_and_listed(tmp_path: Path) -> None:
    """A trained output projection beside a configuration that ties it: Megatron's model has no place for it."""
    files = saved(tmp_path / "hf", "dense")
    config = json.loads((files / "config.json").read_text())
    (files / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    conversion = convert(files, tmp_path / "megatron", to="fsdp_dtensor", megatron=BRIDGE)
    assert conversion.left == ("model.lm_head.weight",)
    names = [entry.name for entry in inspect(tmp_path / "megatron").entries]
    assert not any("lm_head" in name or "output_layer" in name for name in names)
