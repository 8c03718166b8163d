"""Packages announce rules for their models by entry points; other models are sharded by transformers' names."""

import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tiny_models import make_model
from torch import nn

from lamella_testing import write_entry_points
from lamella_transformers import GROUP, ModelError, choose_units, find_adapter, fp32_parameters, sharding_units

RULES = """\
    import torch

    NAMED_CONFIGS = {"llama-tiny": {"model_type": "llama"}}

    def sharding_units(model):
        return [module for module in model.modules() if type(module).__name__ == "LlamaMLP"]

    def keep_fp32(model):
        kept = set(map(id, model.model.norm.parameters()))
        return lambda parameter: torch.float32 if id(parameter) in kept else None
"""

Announce = Callable[[str, Mapping[str, str]], None]


@pytest.fixture
def announce(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Announce:
    """Install distributions that announce adapters, and the module `llama_rules`."""
    (tmp_path / "llama_rules.py").write_text(textwrap.dedent(RULES))
    (tmp_path / "no_rules.py").write_text("units = []\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "llama_rules", raising=False)

    def write(distribution: str, entry_points: Mapping[str, str]) -> None:
        write_entry_points(tmp_path, distribution, GROUP, dict(entry_points))

    return write


def test_an_announced_adapter_decides_on_units_dtypes_and_named_models(announce: Announce) -> None:
    announce("llama-rules", {"llama": "llama_rules"})
    adapter = find_adapter("llama")
    assert adapter is not None and adapter.named_configs == {"llama-tiny": {"model_type": "llama"}}
    model = make_model("llama")
    assert {type(unit).__name__ for unit in sharding_units(model)} == {"LlamaMLP"}
    rule = fp32_parameters(model)
    assert rule is not None
    in_fp32 = [name for name, parameter in model.named_parameters() if rule(parameter) == torch.float32]
    assert in_fp32 == ["model.norm.weight"]


def test_an_adapter_of_another_model_type_is_not_imported(announce: Announce) -> None:
    announce("llama-rules", {"llama": "llama_rules"})
    assert find_adapter("mixtral") is None
    assert "llama_rules" not in sys.modules


def test_a_model_without_an_adapter_is_sharded_at_the_layers_that_transformers_names() -> None:
    model = make_model("mixtral")
    assert {type(unit).__name__ for unit in sharding_units(model)} == {"MixtralDecoderLayer"}
    assert fp32_parameters(model) is None
    assert choose_units(model).note is None


def test_a_model_whose_layers_transformers_does_not_name_is_sharded_at_its_longest_list() -> None:
    model = make_model("mixtral")
    for module in (model, cast(Any, model).model):
        module._no_split_modules = None
    choice = choose_units(model)
    assert choice.modules == [*cast(Any, model).model.layers]
    assert choice.note == "the 2 modules of the longest list (MixtralDecoderLayer)"
    cast(Any, model).model.layers = nn.Sequential(*cast(Any, model).model.layers)
    with pytest.raises(ModelError, match="Expected a model with a list of layers, got 'mixtral', which has none"):
        choose_units(model)


def test_layers_cut_in_several_lists_and_layers_named_in_part_are_units() -> None:
    xlm = make_model("xlm")
    assert [type(unit).__name__ for unit in sharding_units(xlm)] == ["MultiHeadAttention"] * 2 + ["TransformerFFN"] * 2
    named_in_part = make_model("roberta-prelayernorm", is_decoder=True)
    assert {type(unit).__name__ for unit in sharding_units(named_in_part)} == {"RobertaPreLayerNormLayer"}


def test_a_unit_holds_no_tied_parameter_and_no_other_unit() -> None:
    model = make_model("bert", is_decoder=True)  # It names its embeddings, which the head is tied to.
    assert {type(unit).__name__ for unit in sharding_units(model)} == {"BertLayer"}


def test_two_packages_with_one_model_type_are_refused(announce: Announce) -> None:
    announce("llama-rules", {"llama": "llama_rules"})
    announce("other-rules", {"llama": "other_rules"})
    with pytest.raises(ValueError, match=r"one package with an adapter for 'llama', got \['llama_rules', 'other_"):
        find_adapter("llama")


def test_an_object_without_units_is_refused(announce: Announce) -> None:
    announce("llama-rules", {"llama": "no_rules"})
    with pytest.raises(TypeError, match="Expected 'no_rules' to have a function sharding_units, got <module"):
        find_adapter("llama")


def test_the_package_imports_transformers_at_first_use() -> None:
    program = "import sys, lamella_transformers; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_rule_without_fp32_parameters_is_none(announce: Announce, tmp_path: Path) -> None:
    (tmp_path / "units_alone.py").write_text("def sharding_units(model):\n    return [model.model]\n")
    announce("llama-units", {"llama": "units_alone"})
    model = make_model("llama")
    assert fp32_parameters(model) is None
    [unit] = sharding_units(model)
    assert isinstance(unit, nn.Module)
