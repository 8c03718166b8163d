"""Published weights are read by transformers' own table, checked before a run, and told apart."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_model, make_spec
from transformers import core_model_loading as table

from lamella_checkpoint import Place
from lamella_layout import Chunk
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
from lamella_transformers._conversion import _cut, _CutTensor, _stacked

CPU = torch.device("cpu")
# Not by the name in transformers, whose lazy module forgets what other tests replaced.
CONVERSION_MAPPING = import_module("transformers.conversion_mapping")


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


def test_check_weights_names_unused_tensors_as_the_file_does(tmp_path: Path) -> None:
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


class _Halves(torch.nn.Module):
    """A model whose files keep three projections as one tensor, by the operations of a table."""

    base_model_prefix = ""
    config = None

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.ModuleDict({"q": torch.nn.Linear(3, 4), "k": torch.nn.Linear(3, 2)})


@pytest.mark.parametrize("steps", ["split", "chunk", "interleave and chunk", "interleave back"])
def test_boxes_cut_tensors_as_transformers_does(steps: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _Halves()
    if steps != "split":
        model.layer["k"] = torch.nn.Linear(3, 4)
    targets = ["q.weight"] if steps == "interleave back" else ["q.weight", "k.weight"]
    operations: Mapping[str, list[table.ConversionOps]] = {
        "split": [table.Split(dim=0)],
        "chunk": [table.Chunk(dim=0)],
        "interleave and chunk": [table.Interleave(dim=0), table.Chunk(dim=0)],
        "interleave back": [table.Interleave(dim=0, inverse=True)],
    }
    converter = table.WeightConverter("fused.weight", targets, operations[steps])
    monkeypatch.setattr(CONVERSION_MAPPING, "get_model_conversion_mapping", lambda _: [converter])
    fused = torch.randn(sum(model.get_parameter(f"layer.{target}").shape[0] for target in targets), 3)
    [correspondence] = correspondences(model, {"layer.fused.weight": tuple(fused.shape)})
    cut = {name: torch.empty(shape) for name, shape in correspondence.right.items()}
    for piece in correspondence.pieces:
        cut[piece.right.name][_slices(piece.right.chunk)] = fused[_slices(piece.left.chunk)]
    converter.add_tensor("layer.q.weight", "layer.fused.weight", "fused.weight", lambda: fused)  # type: ignore[arg-type]
    expected = converter.convert("layer.q.weight", model=model, config=None)
    assert cut.keys() == expected.keys() == {f"layer.{target}" for target in targets}
    assert all(torch.equal(cut[name], tensor) for name, tensor in expected.items())


def _slices(chunk: Chunk) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(chunk.offsets, chunk.sizes, strict=True))


def test_an_operation_that_reorders_elements_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    converter = table.WeightConverter("fused.weight", "q.weight", [table.Transpose(0, 1)])
    monkeypatch.setattr(CONVERSION_MAPPING, "get_model_conversion_mapping", lambda _: [converter])
    with pytest.raises(ModelError, match=r"renames, stacks, joins or cuts, got Transpose for 'layer\.q\.weight'"):
        correspondences(_Halves(), {"layer.fused.weight": (3, 4)})


def test_an_expert_is_cut_out_of_a_stack_along_the_dims_of_its_file() -> None:
    experts = [_CutTensor((4, 3), ((Place(f"{i}", Chunk((0, 0), (4, 3))), Chunk((0, 0), (4, 3))),)) for i in range(2)]
    [(place, box)] = _cut(_stacked(experts, 0), 1, ["head", "tail"], [1, 3])["tail"][0].boxes[1:]
    assert place == Place("1", Chunk((1, 0), (3, 3))) and box == Chunk((1, 0, 0), (1, 3, 3))
