"""Published weights are read by transformers' own table, checked before a run, and told apart."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_model, make_spec

from lamella_transformers import (
    ModelError,
    as_published,
    build_without_parameters,
    check_weights,
    correspondences,
    fingerprint_of_weights,
    load_weights,
    materialise,
    outline,
)

CPU = torch.device("cpu")


def test_experts_are_stacked_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    make_model("mixtral").save_pretrained(tmp_path)  # type: ignore[operator]
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    stacked = [
        correspondence
        for correspondence in correspondences(outline(make_spec("mixtral")), shapes)
        if "model.layers.1.mlp.experts.gate_up_proj" in correspondence.right
    ]
    # Behind the second in the alphabet, and its part of the join is the later one.
    [tenth] = [piece.right.chunk for piece in stacked[0].pieces if ".experts.10.w3." in piece.left.name]
    assert (tenth.offsets, tenth.sizes) == ((10, 24, 0), (1, 24, 16))


@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
def test_weights_are_read_into_a_model_without_parameters(model_type: str, tmp_path: Path) -> None:
    published, spec = make_model(model_type), make_spec(model_type)
    published.save_pretrained(tmp_path)  # type: ignore[operator]
    assert check_weights(tmp_path, outline(spec), spec) == ()
    model = build_without_parameters(spec, CPU)
    materialise(model, CPU)
    load_weights(tmp_path, model, spec)
    expected = published.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


def test_weights_that_vanish_after_the_check_are_missed(tmp_path: Path) -> None:
    spec = make_spec("llama")
    make_model("llama").save_pretrained(tmp_path)  # type: ignore[operator]
    assert check_weights(tmp_path, outline(spec), spec) == ()
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"to be the model's, got model\.model\.norm\.weight"):
        check_weights(tmp_path, outline(spec), spec)
    with pytest.raises(RuntimeError, match=r"to stay as they were, got model\.model\.norm\.weight: absent"):
        load_weights(tmp_path, make_model("llama"), spec)


def test_tensors_that_the_model_lacks_are_named_as_files_name_them(tmp_path: Path) -> None:
    spec = make_spec("llama")
    make_model("llama").save_pretrained(tmp_path)  # type: ignore[operator]
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"mtp.norm.weight": torch.ones(16)}, file)
    assert check_weights(tmp_path, outline(spec), spec) == ("mtp.norm.weight",)


def test_weights_are_told_apart_by_their_values_and_not_by_their_files(tmp_path: Path) -> None:
    model = make_model("llama")
    model.save_pretrained(tmp_path / "one")  # type: ignore[operator]
    model.save_pretrained(tmp_path / "several", max_shard_size="20KB")  # type: ignore[operator]
    fingerprint = fingerprint_of_weights(tmp_path / "one")
    assert fingerprint is not None and fingerprint == fingerprint_of_weights(tmp_path / "several")
    file = tmp_path / "one" / "model.safetensors"
    weights = load_file(file)
    save_file(weights | {"model.norm.weight": weights["model.norm.weight"] * 2}, file)
    assert fingerprint_of_weights(tmp_path / "one") not in (None, fingerprint)
    file.write_bytes(file.read_bytes()[:-10])
    assert fingerprint_of_weights(tmp_path / "one") is None


def test_a_folder_that_publishes_nothing_has_no_names_to_give_back(tmp_path: Path) -> None:
    assert as_published(tmp_path, make_spec("llama")) is None
