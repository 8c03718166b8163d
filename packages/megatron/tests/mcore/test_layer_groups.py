"""Groups of a hybrid model's layers are units, and names, forward and training stay as they are."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import pytest
import torch
from resuming import assert_equal, read
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.tensor import DTensor

import lamella_optim
from lamella_convert import open_checkpoint
from lamella_engine import FSDPModule
from lamella_engine.extending import unit_of
from lamella_megatron import fully_shard_model, load_checkpoint, save_checkpoint, sharding_units
from lamella_megatron._model.patterns import parse_pattern
from lamella_testing import run_ranks
from lamella_testing.megatron import tiny_config, tiny_hybrid, token_losses
from lamella_testing.megatron_parity import BATCH, Layout, assert_trains_as_on_one_rank, make_model

Form = Literal["fsdp_dtensor", "torch_dist"]


@pytest.mark.parametrize("groups", ["[*E][*E]", "*[E]*E", "*E[*E]", "[*E]*E"])
def test_groups_train_as_on_one_rank(groups: str) -> None:
    shard = partial(fully_shard_model, layer_groups=groups)
    assert_trains_as_on_one_rank("*E*E", Layout(num_ranks=2, ep=2), shard)


def test_mamba_layers_are_bound_in_groups() -> None:
    shard = partial(fully_shard_model, layer_groups="[M*][M*]")
    assert_trains_as_on_one_rank("M*M*", Layout(num_ranks=2), shard)


def test_a_group_is_one_unit() -> None:
    def on_each_rank() -> None:
        layout = Layout(num_ranks=2)
        model = make_model("*E*E", layout)
        before = [name for name, _ in model.named_parameters()]
        fully_shard_model(model, layer_groups="[*E]*E")
        units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        layers = list(model.decoder.layers)  # type: ignore[union-attr, arg-type]
        assert units == [model, *layers]
        assert unit_of(layers[0]) is unit_of(layers[1])
        assert len({unit_of(unit) for unit in units}) == 4
        assert [name for name, _ in model.named_parameters()] == before

    run_ranks(on_each_rank, 2)


def _weights_after_three_steps(groups: str | None) -> list[torch.Tensor]:
    model = make_model("*E*E", Layout(num_ranks=2))
    fully_shard_model(model, layer_groups=groups)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for _ in range(3):
        token_losses(model, BATCH).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().full_tensor() for parameter in model.parameters()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("groups", ["[*E][*E]", "[*E]*E"])
def test_units_of_layer_groups_train_to_the_bits_of_a_unit_per_layer(groups: str) -> None:
    alone, together = (run_ranks(_weights_after_three_steps, 2, pattern)[0] for pattern in (None, groups))
    assert all(torch.equal(*pair) for pair in zip(alone, together, strict=True))


def _sharded(layout: Layout, kind: str, groups: str | None) -> nn.Module:
    return fully_shard_model(make_model(kind, layout), layer_groups=groups)


def _saved(kind: str, path: Path, of_units: str | None, groups: str | None, *forms: Form) -> dict[str, torch.Tensor]:
    """Checkpoints in the path, by form, with the names of some groups, of a model with units of others; the weights."""
    model = _sharded(Layout(num_ranks=2, ep=2 if "E" in kind else 1), kind, of_units)
    lamella_optim.install()
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.cos(100 * parameter.detach())
    optimizer.step()
    for form in forms:
        save_checkpoint(path / form, model=model, optimizer=optimizer, format=form, layer_groups=groups)
    return _tensors(model, optimizer)


def _loaded(
    kind: str, path: Path, of_units: str | None, groups: str | None, *forms: Form
) -> list[dict[str, torch.Tensor]]:
    """What each of the forms holds."""
    model = _sharded(Layout(num_ranks=2, ep=2 if "E" in kind else 1), kind, of_units)
    loaded = []
    for form in forms:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        optimizer = torch.optim.AdamW(model.parameters())
        load_checkpoint(path / form, model=model, optimizer=optimizer, layer_groups=groups)
        loaded.append({name: tensor.clone() for name, tensor in _tensors(model, optimizer).items()})
    return loaded


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """This rank's weights and moments, whole over the sharing ranks: units of other groups cut elsewhere."""
    tensors = {}
    for name, parameter in model.named_parameters():
        for slot, value in {"": parameter, **optimizer.state[parameter]}.items():
            tensors[f"{name}.{slot}"] = (value.full_tensor() if isinstance(value, DTensor) else value).detach()
    return tensors


@pytest.mark.parametrize(
    ("kind", "of_units", "groups", "of_other_units"),
    [
        pytest.param("*E*E", "[*E][*E]", None, None, marks=pytest.mark.slow),
        ("*E*E", "[*E][*E]", None, "*E[*E]"),
        pytest.param("*E*E", None, None, "[*E][*E]", marks=pytest.mark.slow),
        ("*E*E", "[*E]*E", "[*E][*E]", "*E[*E]"),
        ("M*M*", None, "M[*M]*", "[M*]M*"),
    ],
)
def test_checkpoints_of_layer_groups_load_into_units_of_other_groups(
    tmp_path: Path, kind: str, of_units: str | None, groups: str | None, of_other_units: str | None
) -> None:
    forms = get_args(Form)
    expected = run_ranks(_saved, 2, kind, tmp_path, of_units, groups, *forms)
    _assert_same(run_ranks(_loaded, 2, kind, tmp_path, of_other_units, groups, *forms), expected)
    for form in forms:
        stored = open_checkpoint(tmp_path / form).tensors
        numbers = {int(match[1]) for name in stored if (match := re.search(r"decoder\.layers\.(\d+)\.", name))}
        assert numbers == set(range(len(parse_pattern(groups or kind).groups)))


def _assert_same(loaded: list[list[dict[str, torch.Tensor]]], expected: list[dict[str, torch.Tensor]]) -> None:
    for of_forms, of_rank in zip(loaded, expected, strict=True):
        assert all(tensor.any() for name, tensor in of_rank.items() if name.endswith("exp_avg"))
        for tensors in of_forms:
            assert tensors.keys() == of_rank.keys()
            assert all(torch.equal(tensors[name], of_rank[name]) for name in tensors)


def _stored_names(path: Path) -> list[str]:
    metadata = FileSystemReader(str(path)).read_metadata()
    return [name for name in metadata.state_dict_metadata if name.startswith("model.")]


def test_checkpoints_for_stacks_of_stacks_have_their_names(tmp_path: Path) -> None:
    run_ranks(_saved, 2, "*E*E", tmp_path, None, "[*E][*E]", "fsdp_dtensor")
    names = _stored_names(tmp_path / "fsdp_dtensor")
    assert any(".decoder.layers.1.layers.0.self_attention." in name for name in names)
    assert any(".decoder.layers.1.layers.1.mlp." in name for name in names)
    assert not any(re.search(r"decoder\.layers\.[23]\.", name) for name in names)


def test_a_group_with_two_layers_of_a_kind_has_nested_names(tmp_path: Path) -> None:
    expected = run_ranks(_saved, 2, "M*M*", tmp_path, None, "[M*M]*", "fsdp_dtensor")
    assert any(".decoder.layers.0.layers.2.mixer." in name for name in _stored_names(tmp_path / "fsdp_dtensor"))
    _assert_same(run_ranks(_loaded, 2, "M*M*", tmp_path, "M[*M]*", "[M*M]*", "fsdp_dtensor"), expected)


def test_keys_of_torch_dist_have_a_groups_number_alone(tmp_path: Path) -> None:
    def on_each_rank() -> None:
        model = _sharded(Layout(num_ranks=1), "M*M*", None)
        with pytest.raises(ValueError, match=r"one layer of a kind, got '\[M\*M\]' in '\[M\*M\]\*'"):
            save_checkpoint(tmp_path / "no", model=model, format="torch_dist", layer_groups="[M*M]*")
        for groups in ("M*M", "M*M*M", "M**M"):
            with pytest.raises(
                ValueError, match=rf"the model's pattern 'M\*M\*' with brackets, got '{re.escape(groups)}'"
            ):
                save_checkpoint(tmp_path / "no", model=model, layer_groups=groups)

    run_ranks(on_each_rank, 1)
    assert not any(tmp_path.iterdir())


def _saved_by_stages(num_stages: int, origin: Path | None, path: Path, groups: str) -> None:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=num_stages)
    config = tiny_config(num_layers=4, pipeline_model_parallel_size=num_stages, pipeline_dtype=torch.float32)
    module = tiny_hybrid(
        config,
        {1: "*-*-", 2: "*|-*-"}[num_stages],
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    model = fully_shard_model(module)
    if origin is not None:
        load_checkpoint(origin, model=model, layer_groups=groups)
    save_checkpoint(path, model=model, layer_groups=groups)


def test_stages_number_the_groups_of_all_stages(tmp_path: Path) -> None:
    run_ranks(_saved_by_stages, 2, 2, None, tmp_path / "stages", "*[-*]-")
    names = _stored_names(tmp_path / "stages")
    assert any(".decoder.layers.1.layers.1.self_attention." in name for name in names)
    run_ranks(_saved_by_stages, 1, 1, tmp_path / "stages", tmp_path / "whole", "*[-*]-")
    assert sorted(_stored_names(tmp_path / "whole")) == sorted(names)
    assert_equal(read(tmp_path / "whole"), read(tmp_path / "stages"))


class _Group(nn.Sequential):
    """A group as a branch of megatron-core builds it: a stack of its own."""

    is_layer_group_stack = True


def test_a_stack_of_its_own_is_the_unit() -> None:
    def on_one_rank() -> None:
        model = make_model("*E*E", Layout(num_ranks=1))
        layers = model.decoder.layers  # type: ignore[union-attr]
        first, second, *further_layers = list(layers)  # type: ignore[arg-type]
        model.decoder.layers = nn.ModuleList([_Group(first, second), *further_layers])  # type: ignore[union-attr]
        assert sharding_units(model) == list(model.decoder.layers)  # type: ignore[union-attr]

    run_ranks(on_one_rank, 1)


@pytest.mark.parametrize(
    ("kind", "groups", "words"),
    [
        ("*E*E", "[*E]", r"the model's pattern '\*E\*E' with brackets, got '\[\*E\]', a pattern of '\*E'"),
        ("gpt", "[*E]", "Expected a HybridModel for `layer_groups`, got GPTModel"),
        ("*E*E", "[*E][*E", "at position 7 of the pattern"),
    ],
)
def test_groups_of_other_layers_are_refused(kind: str, groups: str, words: str) -> None:
    def on_one_rank() -> None:
        model = make_model(kind, Layout(num_ranks=1))
        with pytest.raises(ValueError, match=words):
            fully_shard_model(model, layer_groups=groups)
        assert not any(isinstance(module, FSDPModule) for module in model.modules())

    run_ranks(on_one_rank, 1)
