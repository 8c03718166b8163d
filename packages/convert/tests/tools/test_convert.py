"""Conversions between formats: bit-equal there and back, whole or not at all, in a bounded amount of memory."""

import errno
import json
import os
import signal
import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from lamella_checkpoint import CheckpointDamaged, load, save
from lamella_checkpoint.extending import Manifest
from lamella_checkpoint.testing import read_tensor
from lamella_convert import Target, convert, diff, open_both, open_checkpoint, save_safetensors
from lamella_convert._formats.safetensors import SafetensorsSource
from lamella_convert._formats.safetensors_header import DTYPES
from lamella_convert._tools.published import SIDE_FILES
from lamella_files import rename
from lamella_testing import run_ranks
from lamella_testing.bits import all_same_bits, random_bits, same_bits

STORED = [dtype for dtype in DTYPES.values() if dtype is not torch.float8_e8m0fnu]


def published(path: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    """A Hugging Face directory."""
    path.mkdir()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps({"model_type": "tiny", "dtype": "float32", **config}))
    (path / "tokenizer.json").write_text("{}")
    return path


def opened(path: Path) -> dict[str, torch.Tensor]:
    source = SafetensorsSource(path)
    return {name: read_tensor(source, name) for name in source.tensors}


names = st.from_regex(r"[a-z]{1,3}(\.[a-z0-9_]{1,4}){0,3}", fullmatch=True).filter(lambda name: "__" not in name)
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@settings(max_examples=25, deadline=None)
@given(
    st.dictionaries(names, st.tuples(shapes, st.sampled_from(STORED)), min_size=1, max_size=6),
    st.integers(0, 100),
    st.integers(1, 500),
    st.integers(1, 500),
)
def test_conversions_through_every_format_and_back_are_bit_equal(
    tmp_path_factory: pytest.TempPathFactory,
    blanks: dict[str, tuple[tuple[int, ...], torch.dtype]],
    seed: int,
    buffer: int,
    shard: int,
) -> None:
    torch.manual_seed(seed)
    root = tmp_path_factory.mktemp("legs")
    tensors = {name: random_bits(shape, dtype) for name, (shape, dtype) in blanks.items()}
    convert(published(root / "a", tensors), root / "b", to="dcp", buffer_nbytes=buffer, max_shard_nbytes=shard)
    convert(root / "b", root / "c", to="hf", buffer_nbytes=buffer, max_shard_nbytes=shard)
    convert(root / "c", root / "d", to="torch", buffer_nbytes=buffer)
    assert all_same_bits(opened(root / "c"), tensors)
    assert all_same_bits(torch.load(root / "d", weights_only=True), tensors)
    assert (root / "c" / "config.json").exists() and (root / "c" / "tokenizer.json").exists()
    convert(root / "d", root / "e", to="dcp", buffer_nbytes=buffer, max_shard_nbytes=shard)
    convert(root / "e", root / "f", to="hf", buffer_nbytes=buffer)
    assert all_same_bits(opened(root / "f"), tensors)


def test_a_conversion_reports_counts_side_files_and_progress(tmp_path: Path) -> None:
    tensors = {"a": torch.rand(3, 4), "b": torch.ones(5, dtype=torch.int64)}
    steps: list[tuple[int, int]] = []
    source = published(tmp_path / "a", tensors)
    report = convert(source, tmp_path / "b", to="dcp", on_progress=lambda *step: steps.append(step), buffer_nbytes=64)
    assert (report.source, report.target, report.to) == (source, tmp_path / "b", "dcp")
    assert (report.num_tensors, report.nbytes, report.left) == (2, 88, ())
    assert report.side_files == ("config.json", "tokenizer.json")
    assert steps[-1] == (88, 88) and len(steps) > 4 and steps == sorted(steps)


def build(seed: int = 0) -> tuple[nn.ModuleDict, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.ModuleDict({"embed": nn.Embedding(6, 4), "hidden": nn.Linear(4, 4), "head": nn.Linear(4, 6, bias=False)})
    model["head"].weight = model["embed"].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model["head"](model["hidden"](model["embed"](torch.tensor([1, 2])))).sum().backward()
    optimizer.step()
    return model, optimizer


def test_a_saved_checkpoint_becomes_weights_and_says_that_the_optimizer_stayed(tmp_path: Path) -> None:
    model, optimizer = build()
    save(tmp_path / "a", model=model, optimizer=optimizer)
    report = convert(tmp_path / "a", tmp_path / "b", to="hf")
    tensors = opened(tmp_path / "b")
    assert set(tensors) == {"embed.weight", "hidden.weight", "hidden.bias"}  # A tied tensor once.
    assert all(torch.equal(tensors[name], model.state_dict()[name]) for name in tensors)
    assert "optimizer.state.hidden.bias.exp_avg" in report.left
    assert "optimizer.param_groups.hidden.bias.lr" in report.left


def test_of_tied_names_the_published_one_is_given_back(tmp_path: Path) -> None:
    model, _ = build()
    like = published(tmp_path / "like", {name: model.state_dict()[name] for name in ("head.weight", "hidden.weight")})
    save(tmp_path / "a", model=model)
    convert(tmp_path / "a", tmp_path / "b", to="hf", like=like)
    assert set(opened(tmp_path / "b")) == {"head.weight", "hidden.weight", "hidden.bias"}


def test_a_saved_checkpoint_is_copied_with_its_optimizer_its_extra_and_its_ties(tmp_path: Path) -> None:
    model, optimizer = build()
    save(tmp_path / "a", model=model, optimizer=optimizer, extra={"step": 3})
    convert(tmp_path / "a", tmp_path / "b", to="dcp", buffer_nbytes=64)
    fresh, its_optimizer = build(seed=1)
    assert load(tmp_path / "b", model=fresh, optimizer=its_optimizer) == {"step": 3}
    assert all(torch.equal(one, other) for one, other in zip(fresh.parameters(), model.parameters(), strict=True))
    slots = its_optimizer.state[fresh.get_parameter("hidden.weight")]
    expected = optimizer.state[model.get_parameter("hidden.weight")]
    assert all(torch.equal(value, expected[slot]) for slot, value in slots.items())
    assert Manifest.read(tmp_path / "b").optimizer == Manifest.read(tmp_path / "a").optimizer


def test_a_converted_torch_file_keeps_ties_and_options(tmp_path: Path) -> None:
    model, optimizer = build()
    save(tmp_path / "a", model=model, optimizer=optimizer)
    convert(tmp_path / "a", tmp_path / "b.pt", to="torch")
    loaded = torch.load(tmp_path / "b.pt", weights_only=True)
    assert loaded["model"]["head.weight"].data_ptr() == loaded["model"]["embed.weight"].data_ptr()
    fresh, _ = build(seed=1)
    fresh.load_state_dict(loaded["model"])
    assert torch.equal(fresh.get_parameter("hidden.weight"), model.get_parameter("hidden.weight"))
    assert loaded["optimizer"]["param_groups"][0]["lr"] == 0.25
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("b")] == ["b.pt"]


@pytest.mark.parametrize("is_archive", [True, False])
def test_tied_tensors_stay_tied_through_every_conversion(tmp_path: Path, is_archive: bool) -> None:
    model, _ = build()
    empty = {"one": torch.empty(0), "other": torch.empty(0)}  # Nothing that lies nowhere twice.
    weights = {**model.state_dict(), "view": model.get_parameter("embed.weight")[1:], **empty}
    torch.save({"model": weights}, tmp_path / "a.pt", _use_new_zipfile_serialization=is_archive)
    convert(tmp_path / "a.pt", tmp_path / "b", to="dcp")
    convert(tmp_path / "b", tmp_path / "c.pt", to="torch")
    convert(tmp_path / "a.pt", tmp_path / "d.pt", to="torch")
    for path in (tmp_path / "c.pt", tmp_path / "d.pt"):
        loaded = torch.load(path, weights_only=True)
        assert loaded.keys() == weights.keys() and all(torch.equal(loaded[name], weights[name]) for name in weights)
        assert loaded["head.weight"].data_ptr() == loaded["embed.weight"].data_ptr() != loaded["view"].data_ptr()
    convert(tmp_path / "a.pt", tmp_path / "e", to="hf")
    assert len(opened(tmp_path / "e")) == len(weights) - 1
    convert(tmp_path / "b", tmp_path / "f", to="hf")
    assert len(opened(tmp_path / "f")) == len(weights) - 1


def test_training_resumes_from_a_checkpoint_that_was_one_file_in_between(tmp_path: Path) -> None:
    model, optimizer = build()
    save(tmp_path / "a", model=model, optimizer=optimizer)
    convert(tmp_path / "a", tmp_path / "b.pt", to="torch")
    convert(tmp_path / "b.pt", tmp_path / "c", to="dcp", buffer_nbytes=64)
    fresh, its_optimizer = build(seed=1)
    load(tmp_path / "c", model=fresh, optimizer=its_optimizer)
    assert all(torch.equal(one, other) for one, other in zip(fresh.parameters(), model.parameters(), strict=True))
    assert its_optimizer.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    for one, other in zip(fresh.parameters(), model.parameters(), strict=True):
        slots = optimizer.state[other]
        assert all(torch.equal(its_optimizer.state[one][slot], value) for slot, value in slots.items())


def resumed(path: Path) -> dict[str, Any]:
    """The state of an optimizer of two groups, loaded by position from a checkpoint."""
    model, _ = build(seed=1)
    optimizer = in_two_groups(model)
    load(open_checkpoint(path), model=model, optimizer=optimizer)
    return optimizer.state_dict()


def in_two_groups(model: nn.ModuleDict) -> torch.optim.Optimizer:
    biases = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    groups: list[dict[str, Any]] = [{"params": biases, "lr": 0.5}, {"params": matrices}]
    return torch.optim.SGD(groups, lr=0.25, momentum=0.9)


@pytest.mark.parametrize("to", ["dcp", "torch"])
def test_optimizers_that_counted_their_parameters_resume_from_a_conversion(tmp_path: Path, to: Target) -> None:
    model, _ = build()
    optimizer = in_two_groups(model)
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    report = convert(tmp_path / "a.pt", tmp_path / "b", to=to)
    assert not report.left
    for state in (resumed(tmp_path / "a.pt"), resumed(tmp_path / "b")):
        assert state["param_groups"] == optimizer.state_dict()["param_groups"]
        for number, slots in optimizer.state_dict()["state"].items():
            assert torch.equal(state["state"][number]["momentum_buffer"], slots["momentum_buffer"])
    if to == "torch":
        in_two_groups(model).load_state_dict(torch.load(tmp_path / "b", weights_only=True)["optimizer"])


def test_a_torch_file_of_an_optimizer_without_state_loads_into_torch(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    save(tmp_path / "a", model=model, optimizer=optimizer)
    convert(tmp_path / "a", tmp_path / "b.pt", to="torch")
    live = torch.optim.SGD(model.parameters(), lr=9.0)
    live.load_state_dict(torch.load(tmp_path / "b.pt", weights_only=True)["optimizer"])
    assert live.param_groups[0]["lr"] == 0.5


def test_counted_parameters_of_alternating_groups_keep_their_places_in_a_torch_file(tmp_path: Path) -> None:
    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        groups = [{"params": [p], "lr": lr} for p, lr in zip(model.parameters(), (0.5, 0.25, 0.5, 0.25), strict=True)]
        return torch.optim.SGD(groups, momentum=0.9)

    models = [nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2)]
    optimizer, live = map(optimizer_of, models)
    for number, parameter in enumerate(models[0].parameters()):
        parameter.grad = torch.full_like(parameter, number)
    optimizer.step()
    torch.save({"model": models[0].state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "b.pt", to="torch")
    load(open_checkpoint(tmp_path / "b.pt"), model=models[1], optimizer=live)
    assert [group["lr"] for group in live.param_groups] == [0.5, 0.25, 0.5, 0.25]
    momenta = [live.state[parameter]["momentum_buffer"].unique().tolist() for parameter in models[1].parameters()]
    assert momenta == [[0.0], [1.0], [2.0], [3.0]]
    optimizer_of(models[1]).load_state_dict(torch.load(tmp_path / "b.pt", weights_only=True)["optimizer"])


def test_slots_and_options_in_a_torch_file_may_have_dots(tmp_path: Path) -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD([{"params": model.parameters(), "muon.lr": 0.5}], lr=0.25)
    optimizer.state[model.weight]["muon.momentum"] = torch.ones(1, 2)
    save(tmp_path / "a", model=model, optimizer=optimizer)
    convert(tmp_path / "a", tmp_path / "b.pt", to="torch")
    stored = torch.load(tmp_path / "b.pt", weights_only=True)["optimizer"]
    assert stored["state"].keys() == {"weight"} and stored["state"]["weight"].keys() == {"muon.momentum"}
    [group] = stored["param_groups"]
    assert group["params"] == ["weight"] and group["muon.lr"] == 0.5


def test_extra_without_a_place_in_the_target_is_listed(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save(tmp_path / "a", model=model, extra={"step": 3})
    torch.save({"model": model.state_dict(), "epoch": 3}, tmp_path / "b.pt")
    for source, name in ((tmp_path / "a", "step"), (tmp_path / "b.pt", "epoch")):
        assert [convert(source, tmp_path / f"{name}.{to}", to=to).left for to in ("dcp", "torch", "hf")] == [
            (),
            (name,),
            (name,),
        ]


def test_each_rank_gets_its_own_extra_back_after_a_conversion(tmp_path: Path) -> None:
    def save_of_rank() -> None:
        rank = torch.distributed.get_rank()
        extra = {"step": 3, "position": {0: 100, 1: 101, 2: 101}[rank], **({"seed": 7} if rank == 1 else {})}
        save(tmp_path / "a", model=nn.Linear(2, 2), extra=extra)

    run_ranks(save_of_rank, 3)
    convert(tmp_path / "a", tmp_path / "b", to="dcp")
    zero, one, two = run_ranks(lambda: load(tmp_path / "b", model=nn.Linear(2, 2)), 3)
    assert (zero["position"], one["position"], two["position"], one["seed"]) == (100, 101, 101, 7)
    assert convert(tmp_path / "a", tmp_path / "c", to="hf").left == ("step", "position", "seed")


def test_weights_are_cast_and_their_optimizers_state_is_not(tmp_path: Path) -> None:
    model, optimizer = build()
    save(tmp_path / "a", model=model, optimizer=optimizer)
    convert(tmp_path / "a", tmp_path / "b.pt", to="torch", dtype=torch.bfloat16)
    loaded = torch.load(tmp_path / "b.pt", weights_only=True)
    assert loaded["model"]["hidden.weight"].dtype == torch.bfloat16
    assert loaded["optimizer"]["state"]["hidden.weight"]["exp_avg"].dtype == torch.float32
    assert torch.equal(loaded["model"]["hidden.weight"], model.get_parameter("hidden.weight").detach().bfloat16())


@pytest.mark.parametrize("to", ["hf", "torch"])
def test_weights_of_a_submodule_called_optimizer_are_cast(tmp_path: Path, to: Target) -> None:
    save(tmp_path / "a", model=nn.ModuleDict({"encoder": nn.Linear(2, 2), "optimizer": nn.Linear(2, 2)}))
    convert(tmp_path / "a", tmp_path / "b", to=to, dtype=torch.bfloat16)
    assert {info.dtype for info in open_checkpoint(tmp_path / "b").tensors.values()} == {torch.bfloat16}


def test_a_configuration_says_the_dtype_that_was_written(tmp_path: Path) -> None:
    source = published(tmp_path / "a", {"a": torch.ones(2)}, text_config={"torch_dtype": "float32"})
    convert(source, tmp_path / "b", to="hf", dtype=torch.bfloat16)
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and config["text_config"]["torch_dtype"] == "bfloat16"
    convert(source, tmp_path / "c", to="hf")
    assert (tmp_path / "c" / "config.json").read_text() == (source / "config.json").read_text()


@pytest.mark.parametrize("to", ["hf", "dcp", "torch"])
def test_finite_values_that_become_infinite_are_reported(tmp_path: Path, to: Target) -> None:
    values = torch.tensor([1e5, -7e4, 3.0, torch.inf, torch.nan], dtype=torch.bfloat16)
    source = published(tmp_path / "a", {"wide": values, "narrow": torch.ones(2)})
    report = convert(source, tmp_path / "b", to=to, dtype=torch.float16)
    assert list(report.inexact.values()) == ["2 finite values are infinite in float16"]
    assert next(iter(report.inexact)).endswith("wide")
    assert convert(source, tmp_path / "c", to=to, dtype=torch.float32).inexact == {}


class TestSideFiles:
    def test_are_kept_in_a_checkpoint_that_says_so(self, tmp_path: Path) -> None:
        convert(published(tmp_path / "a", {"a": torch.ones(2)}), tmp_path / "b", to="dcp")
        names = {"config.json", "tokenizer.json", "lamella_published.json"}
        assert {file.name for file in (tmp_path / "b" / SIDE_FILES).iterdir()} == names
        assert Manifest.read(tmp_path / "b").side_files == SIDE_FILES

    def test_of_another_directory_take_their_place(self, tmp_path: Path) -> None:
        like = published(tmp_path / "like", {"other": torch.ones(1)}, mark=1)
        convert(published(tmp_path / "a", {"a": torch.ones(2)}), tmp_path / "b", to="hf", like=like)
        assert json.loads((tmp_path / "b" / "config.json").read_text())["mark"] == 1
        assert set(opened(tmp_path / "b")) == {"a"}

    def test_chat_templates_with_names_come_along(self, tmp_path: Path) -> None:
        source = published(tmp_path / "a", {"a": torch.ones(2)})
        (source / "additional_chat_templates").mkdir()
        (source / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
        (source / "additional_chat_templates" / "notes.txt").write_text("mine")
        convert(source, tmp_path / "dcp", to="dcp")
        report = convert(tmp_path / "dcp", tmp_path / "b", to="hf")
        assert report.side_files == ("config.json", "tokenizer.json", "additional_chat_templates/tool_use.jinja")
        convert(source, tmp_path / "b", to="hf", replace=True)
        (template,) = (tmp_path / "b" / "additional_chat_templates").iterdir()
        assert template.name == "tool_use.jinja" and template.read_text() == "{{ tools }}"

    def test_chat_templates_that_lead_outside_are_not_copied(self, tmp_path: Path) -> None:
        source = published(tmp_path / "a", {"a": torch.ones(2)})
        (tmp_path / "templates").mkdir()
        (tmp_path / "templates" / "tool_use.jinja").write_text("mine")
        (source / "additional_chat_templates").symlink_to(tmp_path / "templates")
        with pytest.raises(CheckpointDamaged, match="tool_use.jinja.*leads outside"):
            convert(source, tmp_path / "b", to="hf")

    def test_of_a_lone_file_are_not_looked_for(self, tmp_path: Path) -> None:
        source = published(tmp_path / "a", {"a": torch.ones(2)})
        assert convert(source / "model.safetensors", tmp_path / "b", to="hf").side_files == ()

    def test_are_found_through_the_links_of_the_hubs_cache(self, tmp_path: Path) -> None:
        blobs, snapshot = tmp_path / "model" / "blobs", tmp_path / "model" / "snapshots" / "main"
        snapshot.mkdir(parents=True)
        published(blobs, {"a": torch.ones(2)})
        for file in blobs.iterdir():
            (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
        assert convert(snapshot, tmp_path / "b", to="hf").side_files == ("config.json", "tokenizer.json")
        assert not (tmp_path / "b" / "config.json").is_symlink()

    @pytest.mark.parametrize("of", ["hf", "dcp"])
    def test_side_files_that_lead_outside_are_not_copied(self, tmp_path: Path, of: str) -> None:
        (tmp_path / "secret").write_text("mine")
        source = published(tmp_path / "a", {"a": torch.ones(2)})
        if of == "dcp":
            convert(source, tmp_path / "dcp", to="dcp")
            source = tmp_path / "dcp"
        link = (source / SIDE_FILES if of == "dcp" else source) / "vocab.txt"
        link.symlink_to(tmp_path / "secret")
        with pytest.raises(CheckpointDamaged, match="vocab.txt.*leads outside.*secret"):
            convert(source, tmp_path / "b", to="hf")
        assert not (tmp_path / "b").exists()

    def test_in_a_folder_that_leads_outside_are_not_copied(self, tmp_path: Path) -> None:
        source = published(tmp_path / "a", {"a": torch.ones(2)})
        convert(source / "model.safetensors", tmp_path / "dcp", to="dcp")
        (tmp_path / "dcp" / SIDE_FILES).symlink_to(source)
        with pytest.raises(CheckpointDamaged, match="leads outside"):
            convert(tmp_path / "dcp", tmp_path / "b", to="hf")

    def test_a_configuration_that_is_none_is_damage(self, tmp_path: Path) -> None:
        source = published(tmp_path / "a", {"a": torch.ones(2)})
        (source / "config.json").write_text("[")
        with pytest.raises(CheckpointDamaged, match="config.json"):
            convert(source, tmp_path / "b", to="hf")


MATRICES = {
    "layers.0.q_proj.weight": torch.randn(256, 384).bfloat16(),
    "layers.0.norm.weight": torch.randn(256).bfloat16(),
    "embed_tokens.weight": torch.randn(256, 256).bfloat16(),
}


def test_two_checkpoints_are_opened_under_names_that_both_have(tmp_path: Path) -> None:
    weight = torch.randn(128, 128)
    source = published(tmp_path / "a", {"layer.weight": weight})
    convert(source, tmp_path / "b", to="hf", float8=True)
    convert(source, tmp_path / "c", to="dcp")
    numbers, quantised = open_both(source, tmp_path / "b")
    assert list(numbers.tensors) == list(quantised.tensors) == ["model.layer.weight"]
    assert not diff(*open_both(source, tmp_path / "c"))
    report = diff(numbers, quantised, rtol=1 / 15, atol=1e-2)
    assert [difference.what for difference in report.differences] == ["dtype"]
    assert len(open_both(tmp_path / "b", tmp_path / "b")[0].tensors) == 2  # As they are stored.


class TestFloat8:
    @pytest.fixture
    def quantised(self, tmp_path: Path) -> Path:
        source = published(tmp_path / "a", MATRICES)
        convert(source, tmp_path / "quantised", to="hf", float8=True, buffer_nbytes=10_000)
        return tmp_path / "quantised"

    def test_is_written_with_scales_and_a_configuration_that_says_so(self, quantised: Path) -> None:
        tensors = opened(quantised)
        assert tensors["layers.0.q_proj.weight"].dtype == torch.float8_e4m3fn
        assert tensors["layers.0.q_proj.weight_scale_inv"].shape == (2, 3)
        assert same_bits(tensors["embed_tokens.weight"], MATRICES["embed_tokens.weight"])
        config = json.loads((quantised / "config.json").read_text())["quantization_config"]
        assert config["weight_block_size"] == [128, 128] and config["modules_to_not_convert"] == ["embed_tokens"]

    def test_becomes_numbers_elsewhere(self, quantised: Path, tmp_path: Path) -> None:
        convert(quantised, tmp_path / "b", to="dcp")
        convert(tmp_path / "b", tmp_path / "c", to="hf")
        tensors = opened(tmp_path / "c")
        assert set(tensors) == set(MATRICES)
        weight = MATRICES["layers.0.q_proj.weight"]
        torch.testing.assert_close(tensors["layers.0.q_proj.weight"], weight, rtol=1 / 15, atol=1e-3)
        assert "quantization_config" not in json.loads((tmp_path / "c" / "config.json").read_text())

    def test_float8_between_directories_stays_unchanged_and_its_scales_are_not_cast(
        self, quantised: Path, tmp_path: Path
    ) -> None:
        convert(quantised, tmp_path / "b", to="hf", dtype=torch.float16)
        before, after = opened(quantised), opened(tmp_path / "b")
        for name in ("layers.0.q_proj.weight", "layers.0.q_proj.weight_scale_inv"):
            assert same_bits(before[name], after[name])
        assert after["embed_tokens.weight"].dtype == torch.float16
        assert "quantization_config" in json.loads((tmp_path / "b" / "config.json").read_text())

    def test_becomes_numbers_where_asked(self, quantised: Path, tmp_path: Path) -> None:
        convert(quantised, tmp_path / "b", to="hf", float8=False)
        assert set(opened(tmp_path / "b")) == set(MATRICES)

    def test_is_written_where_asked(self, tmp_path: Path) -> None:
        source = published(tmp_path / "a", MATRICES)
        convert(source, tmp_path / "b", to="hf", float8=lambda name, _: name == "embed_tokens.weight")
        names = {name for name, tensor in opened(tmp_path / "b").items() if tensor.dtype == torch.float8_e4m3fn}
        assert names == {"embed_tokens.weight"}

    @pytest.mark.parametrize("float8", [True, lambda name, info: False], ids=["linear", "none"])
    def test_that_no_weight_can_have_is_refused(self, tmp_path: Path, float8: Any) -> None:
        source = published(tmp_path / "a", {"proj.weight": torch.ones(6, 5)})
        with pytest.raises(ValueError, match=r"blocks of 128 by 128\), got none among 1 tensors.*Leave `float8` out"):
            convert(source, tmp_path / "b", to="hf", float8=float8)

    def test_is_for_safetensors_alone(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="to='dcp'"):
            convert(tmp_path, tmp_path / "b", to="dcp", float8=True)


def test_names_are_translated_on_the_way(tmp_path: Path) -> None:
    source = published(tmp_path / "a", {"old": torch.ones(2)})
    convert(source, tmp_path / "b", to="hf", translate=lambda original: rename(original, lambda _: "model.new"))
    assert set(opened(tmp_path / "b")) == {"new"}


def test_a_live_model_goes_to_hugging_face_and_back_into_a_live_model(tmp_path: Path) -> None:
    model, _ = build()
    save_safetensors(tmp_path / "a", model=model)
    convert(tmp_path / "a", tmp_path / "b", to="dcp")
    fresh, _ = build(seed=1)
    load(tmp_path / "b", model=fresh)
    assert all(torch.equal(one, other) for one, other in zip(fresh.parameters(), model.parameters(), strict=True))


class TestBadInput:
    def test_an_unknown_format_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="'gguf'"):
            convert(tmp_path, tmp_path / "b", to="gguf")  # type: ignore[arg-type]

    def test_a_source_that_is_absent_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match="absent"):
            convert(tmp_path / "absent", tmp_path / "b", to="hf")

    def test_a_target_that_exists_is_named_and_stays(self, tmp_path: Path) -> None:
        source = published(tmp_path / "a", {"a": torch.ones(2)})
        for to in ("hf", "dcp", "torch"):
            with pytest.raises(FileExistsError, match=str(source)):
                convert(source, source, to=to)
        assert set(opened(source)) == {"a"}

    def test_only_a_checkpoint_gives_way_and_only_when_told_to(self, tmp_path: Path) -> None:
        source = published(tmp_path / "a", {"a": torch.ones(2)})
        for to in ("hf", "dcp", "torch"):
            convert(published(tmp_path / f"old{to}", {"b": torch.ones(2)}), tmp_path / to, to=to)
            convert(source, tmp_path / to, to=to, replace=True)
            convert(tmp_path / to, tmp_path / f"{to}.again", to="hf")
            assert set(opened(tmp_path / f"{to}.again")) == {"a"}
        with pytest.raises(FileExistsError, match="got a file"):
            convert(source, tmp_path / "torch", to="dcp", replace=True)
        with pytest.raises(FileExistsError, match="got a directory"):
            convert(source, tmp_path / "dcp", to="torch", replace=True)
        with pytest.raises(FileExistsError, match="got the source"):
            convert(source, tmp_path, to="dcp", replace=True)
        (tmp_path / "hf" / "runs").mkdir()
        with pytest.raises(FileExistsError, match="folders: runs"):
            convert(source, tmp_path / "hf", to="hf", replace=True)
        assert set(opened(source)) == {"a"} and (tmp_path / "hf" / "runs").is_dir()

    def test_a_dtype_that_the_format_lacks_is_named_with_the_tensor(self, tmp_path: Path) -> None:
        model = nn.Module()
        model.register_buffer("wave", torch.ones(1, dtype=torch.complex128))
        save(tmp_path / "a", model=model)
        with pytest.raises(TypeError, match="'wave'"):
            convert(tmp_path / "a", tmp_path / "b", to="hf")
        assert [path.name for path in tmp_path.iterdir()] == ["a"]

    def test_a_conversion_with_no_tensors_left_is_refused(self, tmp_path: Path) -> None:
        source = published(tmp_path / "a", {"a": torch.ones(2)})
        with pytest.raises(ValueError, match=r"got none in '.*/a'"):
            convert(source, tmp_path / "b", to="hf", translate=lambda original: rename(original, lambda _: None))

    def test_megatrons_names_need_a_configuration_or_rules(self, tmp_path: Path) -> None:
        source = published(tmp_path / "a", {"a": torch.ones(2)})
        with pytest.raises(ValueError, match="'tiny'.*Pass `translate`"):
            convert(source, tmp_path / "b", to="fsdp_dtensor")
        (source / "config.json").unlink()
        with pytest.raises(
            ValueError, match=r"config.json.*Pass `like` \(on the command line --config\), or `translate`"
        ):
            convert(source, tmp_path / "b", to="fsdp_dtensor")

    @pytest.mark.parametrize("of", ["dcp", "torch"])
    def test_a_flipped_bit_is_found_and_nothing_is_written(self, tmp_path: Path, of: str) -> None:
        weight = torch.arange(10_000.0)
        source = tmp_path / "a"
        if of == "dcp":
            model = nn.Module()
            model.register_buffer("weight", weight)
            save(source, model=model)
            file = source / "__0_0.distcp"
        else:
            torch.save({"weight": weight}, source)
            file = source
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        with pytest.raises(CheckpointDamaged, match=file.name):
            convert(source, tmp_path / "b", to="hf", buffer_nbytes=100)
        assert not (tmp_path / "b").exists()
        convert(source, tmp_path / "b", to="hf", verify=False)
        assert not torch.equal(opened(tmp_path / "b")["weight"], weight)

    def test_damage_that_shows_on_the_way_leaves_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        source = published(tmp_path / "a", {"a": torch.ones(200)})
        preadv = os.preadv
        monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: 0 if at > 500 else preadv(fd, buffers, at))
        for to in ("hf", "dcp", "torch"):
            with pytest.raises(CheckpointDamaged, match="model.safetensors.*'a'"):
                convert(source, tmp_path / "b", to=to, buffer_nbytes=64)
        assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("to", ["hf", "dcp", "torch"])
def test_a_killed_conversion_leaves_nothing_by_that_name_and_the_next_cleans_up(tmp_path: Path, to: Target) -> None:
    source = published(tmp_path / "a", {"a": torch.ones(2000)})

    def die(done: int, total: int) -> None:
        if done > total // 2:
            os.kill(os.getpid(), signal.SIGKILL)

    process = get_context("fork").Process(
        target=convert, args=(source, tmp_path / "b"), kwargs={"to": to, "on_progress": die, "buffer_nbytes": 1000}
    )
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert not (tmp_path / "b").exists() and len(list(tmp_path.iterdir())) == 2
    convert(source, tmp_path / "b", to=to)
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


def test_files_of_the_caller_appear_with_the_target(tmp_path: Path) -> None:
    source, target = published(tmp_path / "a", {"a": torch.ones(2)}), tmp_path / "b"

    def complete(folder: Path) -> None:
        assert not target.exists() and (folder / "model.safetensors").is_file()
        (folder / "README.md").write_text("a card")

    def fail(folder: Path) -> None:
        complete(folder)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left on device: '.*/b'"):
        convert(source, target, to="hf", complete=fail)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    convert(source, target, to="hf", complete=complete)
    assert (target / "README.md").read_text() == "a card"
    with pytest.raises(ValueError, match="Expected `complete` with a directory as the target, got to='torch'"):
        convert(source, tmp_path / "c", to="torch", complete=complete)


PEAKS = """
import os, sys, torch
from lamella_convert import convert
from lamella_files._archives import items as _items

def peak(label):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(label))

os.fsync = lambda _: None  # Memory is measured, and not the disk.
_items._PIECE_BYTES = 1 << 20  # What a thread that reads holds, however large the model is.
torch.set_num_threads(1)  # A fork lacks threads of OpenMP.
folder, targets, buffer, *ways = sys.argv[1:]
ways = [way.split(" to ") for way in ways]

def convert_small(source, to, number):
    convert(f"{folder}/{source}.small", f"{targets}/{source}.{to}.small{number}", to=to, buffer_nbytes=int(buffer))

for source, to in ways:  # Imports the modules on the way.
    convert_small(source, to, 1)
for source, to in ways:
    if os.fork() == 0:
        convert_small(source, to, 2)  # A fork has no pages of libraries, which would count as the conversion's.
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        before = peak("VmRSS")
        convert(f"{folder}/{source}", f"{targets}/{source}.{to}", to=to, buffer_nbytes=int(buffer))
        print(f"{source} to {to}", (peak("VmHWM") - before) / 1024, sep=":", flush=True)
        os._exit(0)
    os.wait()
"""
NUM_MEBIBYTES, BUFFER_MEBIBYTES = 128, 8


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tensors, each much larger than the buffer, and a small model, in two formats."""
    root = tmp_path_factory.mktemp("large")
    model = nn.Module()
    for index in range(2):
        model.register_buffer(f"weight{index}", torch.zeros(NUM_MEBIBYTES // 2, 1 << 18))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        for name, module in (("", model), (".small", nn.Linear(2, 2))):
            save_safetensors(root / f"hf{name}", model=module)
            save(root / f"dcp{name}", model=module)
    return root


WAYS = ["hf to hf", "hf to dcp", "hf to torch", "dcp to hf", "dcp to torch"]


@pytest.fixture(scope="module")
def peaks(large: Path) -> dict[str, float]:
    """By way, the mebibytes added by a conversion. A fork each, since torch takes two seconds of each process."""
    with TemporaryDirectory() as targets:  # Of a large model each: pytest would keep them for three runs.
        command = [sys.executable, "-c", PEAKS, str(large), targets, str(BUFFER_MEBIBYTES << 20), *WAYS]
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return {way: float(mebibytes) for way, mebibytes in (line.split(":") for line in run.stdout.splitlines())}


@pytest.mark.parametrize("way", WAYS)
def test_a_conversion_holds_a_buffer_and_not_the_model(peaks: dict[str, float], way: str) -> None:
    # The buffer, and memory of threads and the allocator: together less than a tensor.
    assert peaks[way] < 4 * BUFFER_MEBIBYTES < NUM_MEBIBYTES / 2, peaks


def test_every_shard_is_a_file_that_the_library_opens(tmp_path: Path) -> None:
    tensors = {f"layer{index}.weight": torch.rand(10, 10) for index in range(5)}
    convert(published(tmp_path / "a", tensors), tmp_path / "b", to="hf", max_shard_nbytes=1000)
    shards = [load_file(file) for file in sorted((tmp_path / "b").glob("model-*-of-00003.safetensors"))]
    assert [len(shard) for shard in shards] == [2, 2, 1]
    assert all_same_bits({name: tensor for shard in shards for name, tensor in shard.items()}, tensors)


@pytest.mark.parametrize(
    ("method", "tensors"),
    [
        ("gptq", {"l.qweight": torch.ones(2, 4, dtype=torch.int32), "l.scales": torch.ones(1, 4)}),
        ("fp8", {"l.weight": torch.ones(2, 4).to(torch.float8_e4m3fn), "l.weight_scale": torch.ones(())}),
    ],
)
def test_weights_of_other_quantisation_methods_stay_unchanged_and_are_never_cast(
    tmp_path: Path, method: str, tensors: dict[str, torch.Tensor]
) -> None:
    source = published(tmp_path / "a", tensors, quantization_config={"quant_method": method})
    convert(source, tmp_path / "b", to="hf")
    assert json.loads((tmp_path / "b" / "config.json").read_text())["quantization_config"] == {"quant_method": method}
    assert all_same_bits(opened(tmp_path / "b"), tensors)
    for wish in ({"dtype": torch.bfloat16}, {"float8": True}):
        with pytest.raises(NotImplementedError, match=f"got weights quantised by '{method}'"):
            convert(source, tmp_path / "c", to="hf", **wish)
