"""The family is declared for all its model types, and its rules turn files of every spelling into modules."""

import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from qwen_tiny import MemorySource, config_of, read_all, translated
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lamella_checkpoint import Source
from lamella_qwen import FAMILY, sharding_units
from lamella_qwen._sizes import MODEL_TYPES
from lamella_testing.qwen import KINDS, Kind, make_model


def test_the_package_declares_every_model_type_of_the_family() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    declared = project["entry-points"]["lamella.families"]
    assert set(declared) == MODEL_TYPES
    for name, value in declared.items():
        assert EntryPoint(name, value, "lamella.families").load() is FAMILY


def as_saved(model: Any, directory: Path) -> MemorySource:
    model.save_pretrained(directory)
    return MemorySource(
        {f"model.{name}": tensor for name, tensor in load_file(directory / "model.safetensors").items()}
    )


def assert_loads(source: Source, model: Any) -> None:
    """Every parameter of the model is there, under its name, with its values."""
    tensors = read_all(source)
    for name, parameter in model.named_parameters():
        assert torch.equal(tensors[f"model.{name}"], parameter), name


@pytest.mark.parametrize("kind", KINDS)
def test_files_of_save_pretrained_become_the_modules_that_were_saved(kind: Kind, tmp_path: Path) -> None:
    model = make_model(kind)
    source = translated(as_saved(model, tmp_path), FAMILY.modules(config_of(kind)), "right")
    assert_loads(source, model)
    assert set(source.tensors) == {f"model.{name}" for name, _ in model.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_model_is_found_in_files_of_any_model(kind: Kind, tmp_path: Path) -> None:
    model = make_model(kind)
    saved = as_saved(model, tmp_path)
    text = AutoModelForCausalLM.from_pretrained(tmp_path)
    source = translated(saved, FAMILY.modules(text.config.to_dict()), "right")
    assert_loads(source, text)
    assert any(".visual." in name for name in source.tensors) == ("vision" in kind)


def test_files_of_a_text_model_that_came_out_of_one_with_vision_are_read_too(tmp_path: Path) -> None:
    make_model("vision").save_pretrained(tmp_path / "whole")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    saved = as_saved(model, tmp_path / "text")
    assert "model.model.language_model.norm.weight" in saved.tensors
    assert_loads(translated(saved, FAMILY.modules(model.config.to_dict()), "right"), model)


def test_packed_qwen_experts_are_translated_unchanged() -> None:
    model = make_model("moe")
    weights = MemorySource({f"model.{name}": tensor.detach() for name, tensor in model.named_parameters()})
    assert_loads(translated(weights, FAMILY.modules(config_of("moe")), "right"), model)


def test_the_package_is_announced_to_lamella_transformers_for_the_same_model_types() -> None:
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    declared = project["entry-points"]["lamella.adapters"]
    assert declared.keys() == project["entry-points"]["lamella.families"].keys()
    for name, target in declared.items():
        adapter = EntryPoint(name, target, "lamella.adapters").load()
        assert adapter.sharding_units is sharding_units and "qwen3.5-tiny" in adapter.NAMED_CONFIGS
