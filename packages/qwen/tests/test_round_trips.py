"""A Qwen3.5 goes from Hugging Face to lamella, is trained, and goes to Megatron and all the way back unchanged."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from qwen_tiny import config_of, mtp_of, translated
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import (
    AutoModelForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForConditionalGeneration,
)

from lamella_checkpoint import load, save
from lamella_convert import MegatronOptions, convert, open_checkpoint, save_safetensors
from lamella_engine import fully_shard
from lamella_qwen import FAMILY, sharding_units
from lamella_testing import run_ranks
from lamella_testing.qwen import KINDS, Kind, make_empty_model, make_model

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:torch.distributed is unavailable"
)

CLASSES: dict[Kind, Any] = {
    "dense": AutoModelForCausalLM,
    "moe": AutoModelForCausalLM,
    "vision": Qwen3_5ForConditionalGeneration,
    "vision-moe": Qwen3_5MoeForConditionalGeneration,
}


def make_empty(kind: Kind) -> tuple[Any, torch.optim.Optimizer]:
    """A model to be filled, and its optimizer."""
    with torch.random.fork_rng():
        model = make_empty_model(kind)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train_a_step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(7)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("linear_attn.norm.weight"):
                parameter[0] = 1 / 3  # In fp32 the last bit is lost around zero.


def state_of(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    slots = {
        f"{names[id(parameter)]}.{slot}": value
        for parameter, state in optimizer.state.items()
        for slot, value in state.items()
    }
    return {name: parameter.detach() for name, parameter in model.named_parameters()} | slots


def assert_same(some: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert sorted(some) == sorted(expected)
    for name, tensor in some.items():
        assert torch.equal(tensor, expected[name]), name


# Each kind of model in each dialect, with each number of tensor-parallel ranks; the remaining combinations are slow.
TENSOR_PARALLEL_SIZES: dict[str, list[int | None]] = {"bridge": [None], "release-0.19": [1, 2, 4]}
SIZE_OF_KIND: dict[Kind, int] = {"dense": 2, "moe": 4, "vision": 1, "vision-moe": 2}
WAYS = [
    pytest.param(kind, dialect, size, marks=() if size in {None, SIZE_OF_KIND[kind]} else pytest.mark.slow)
    for kind in KINDS
    for dialect, sizes in TENSOR_PARALLEL_SIZES.items()
    for size in sizes
]


@pytest.mark.usefixtures("family")
@pytest.mark.parametrize(("kind", "dialect", "tensor_parallel_size"), WAYS)
def test_trained_qwen_models_go_to_megatron_and_back_unchanged(
    kind: Kind, dialect: Literal["bridge", "release-0.19"], tensor_parallel_size: int | None, tmp_path: Path
) -> None:
    published, files = make_model(kind), tmp_path / "hf"
    published.save_pretrained(files)
    convert(files, tmp_path / "native", to="dcp")
    model, optimizer = make_empty(kind)
    load(open_checkpoint(tmp_path / "native"), model=model)
    assert_same(dict(model.named_parameters()), dict(published.named_parameters()))

    train_a_step(model, optimizer)
    save(tmp_path / "trained", model=model, optimizer=optimizer)
    ways: dict[str, Any] = {
        "megatron": MegatronOptions(dialect=dialect, tensor_parallel_size=tensor_parallel_size),
        "like": files,
    }
    report = convert(tmp_path / "trained", tmp_path / "megatron", to="fsdp_dtensor", **ways)
    back = convert(tmp_path / "megatron", tmp_path / "back", to="dcp", **ways)
    # Norms stored around one lose bits around zero: kept beside the translation, the bits come back.
    assert report.originals and all(name.endswith("linear_attn.norm.weight") for name in report.originals)
    assert not report.inexact and not back.inexact and not back.originals
    resumed, its_optimizer = make_empty(kind)
    load(open_checkpoint(tmp_path / "back"), model=resumed, optimizer=its_optimizer)
    assert_same(state_of(resumed, its_optimizer), state_of(model, optimizer))

    convert(tmp_path / "back", tmp_path / "published", to="hf")
    reloaded = CLASSES[kind].from_pretrained(tmp_path / "published")
    assert_same(dict(reloaded.named_parameters()), dict(model.named_parameters()))


@pytest.mark.usefixtures("family")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_go_straight_from_hugging_face_to_megatron_and_back(
    kind: Kind, dtype: torch.dtype, tmp_path: Path
) -> None:
    make_model(kind).to(dtype).save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "megatron", to="fsdp_dtensor", megatron=MegatronOptions(dialect="bridge"))
    convert(tmp_path / "megatron", tmp_path / "back", to="hf")
    # Under the published names, with experts one by one.
    assert_same(*(load_file(tmp_path / way / "model.safetensors") for way in ("back", "hf")))
    assert (tmp_path / "back" / "config.json").read_text() == (tmp_path / "hf" / "config.json").read_text()


@pytest.mark.usefixtures("family")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kept_originals_do_not_replace_elements_that_megatron_trained(dtype: torch.dtype, tmp_path: Path) -> None:
    """Kept values stand in for elements equal to the shifted values, and for no others."""
    weights = {name: tensor.detach().to(dtype) for name, tensor in make_model("dense").named_parameters()}
    name = "model.layers.0.linear_attn.norm.weight"
    weights[name] = torch.tensor([0.3, 1 / 3, 1e-9, 1.0, 2**-20, 0.7]).to(dtype)
    (tmp_path / "hf").mkdir()
    save_file(weights, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config_of("dense")))
    report = convert(
        tmp_path / "hf", tmp_path / "megatron", to="fsdp_dtensor", megatron=MegatronOptions(dialect="bridge")
    )
    assert f"model.{name}" in report.originals and not report.inexact
    originals = load_file(tmp_path / "megatron" / "hf" / "lamella_originals.safetensors")
    assert torch.equal(originals[f"model.{name}"], weights[name])

    stored = dcp_load(tmp_path / "megatron")
    norm = "module.decoder.layers.0.self_attention.out_norm.weight"
    stored[norm][1] = 0.25
    dcp.save({"model": stored, "checkpoint_version": 3.0}, checkpoint_id=tmp_path / "trained", no_dist=True)  # type: ignore[attr-defined]
    like = tmp_path / "megatron" / "hf"
    back = convert(tmp_path / "trained", tmp_path / "back", to="hf", like=like)
    expected = weights[name].clone()
    expected[1] = 1.25
    assert torch.equal(load_file(tmp_path / "back" / "model.safetensors")[name], expected)
    assert not back.inexact and not back.absent
    # Without kept values, a value comes back rounded, and the way to Megatron cannot undo the rounding: told by name
    # and number.
    shutil.rmtree(tmp_path / "megatron" / "hf")
    alone = convert(tmp_path / "trained", tmp_path / "alone", to="hf", like=tmp_path / "hf")
    assert not torch.equal(load_file(tmp_path / "alone" / "model.safetensors")[name], expected)
    assert set(alone.inexact) <= {f"model.model.layers.{layer}.linear_attn.norm.weight" for layer in range(3)}


def dcp_load(path: Path) -> dict[str, torch.Tensor]:
    infos = dcp.FileSystemReader(path).read_metadata().state_dict_metadata  # type: ignore[attr-defined]
    tensors = {
        name: torch.empty(info.size, dtype=info.properties.dtype)
        for name, info in infos.items()
        if name.startswith("model.") and isinstance(info, TensorStorageMetadata)
    }
    dcp.load(tensors, checkpoint_id=path, no_dist=True)  # type: ignore[attr-defined]
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


@pytest.mark.usefixtures("family")
@pytest.mark.parametrize("packed", [True, False])
def test_the_multi_token_prediction_layer_is_published_unchanged(packed: bool, tmp_path: Path) -> None:
    """The layer's experts are stacked in Qwen3.6's files, and one by one in Qwen3.5's."""
    make_model("moe").save_pretrained(tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    weights = load_file(file) | mtp_of("moe", packed=packed)
    save_file(weights, file, {"format": "pt"})
    convert(tmp_path / "hf", tmp_path / "native", to="dcp")
    for way, source in (("straight", "hf"), ("trained", "native")):
        convert(
            tmp_path / source,
            tmp_path / way,
            to="fsdp_dtensor",
            megatron=MegatronOptions(dialect="bridge", mtp_layer="transformer_layer"),
        )
        assert "module.mtp.layers.0.transformer_layer.mlp.experts.linear_fc1.weight3_w" in dcp_load(tmp_path / way)
        convert(tmp_path / way, tmp_path / f"{way}-back", to="hf")
        assert_same(load_file(tmp_path / f"{way}-back" / "model.safetensors"), weights)
    unknown: Any = "mtp"
    with pytest.raises(ValueError, match="`mtp_layer` to be one of .*, got 'mtp'"):
        convert(tmp_path / "hf", tmp_path / "no", to="fsdp_dtensor", megatron=MegatronOptions(mtp_layer=unknown))


@pytest.mark.usefixtures("family")
@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_a_vocabulary_is_padded_when_asked_and_cut_again(tensor_parallel_size: int, tmp_path: Path) -> None:
    published, files = make_model("dense"), tmp_path / "hf"
    published.save_pretrained(files)
    model, optimizer = make_empty("dense")
    load(open_checkpoint(files), model=model)
    train_a_step(model, optimizer)
    save(tmp_path / "trained", model=model, optimizer=optimizer)
    ways: dict[str, Any] = {"megatron": MegatronOptions(tensor_parallel_size=tensor_parallel_size), "like": files}

    def padded(num_rows: int) -> dict[str, Any]:
        return ways | {"megatron": replace(ways["megatron"], padded_vocabulary=num_rows)}

    convert(tmp_path / "trained", tmp_path / "megatron", to="fsdp_dtensor", **padded(72))
    stored = dcp_load(tmp_path / "megatron")
    for name, weight in (("embedding.word_embeddings", "model.embed_tokens"), ("output_layer", "lm_head")):
        tensor = stored[f"module.{name}.weight"]
        assert tensor.shape == (72, 32) and not tensor[64:].any()
        assert torch.equal(tensor[:64], dict(model.named_parameters())[f"{weight}.weight"])
    report = convert(tmp_path / "megatron", tmp_path / "back", to="dcp", **ways)
    assert not report.inexact
    resumed, its_optimizer = make_empty("dense")
    load(open_checkpoint(tmp_path / "back"), model=resumed, optimizer=its_optimizer)
    assert_same(state_of(resumed, its_optimizer), state_of(model, optimizer))

    stored["module.output_layer.weight"][[66, 70]] = 1.0
    dcp.save({"model": stored, "checkpoint_version": 3.0}, checkpoint_id=tmp_path / "other", no_dist=True)  # type: ignore[attr-defined]
    report = convert(tmp_path / "other", tmp_path / "cut", to="hf", **ways)
    assert report.inexact == {"model.lm_head.weight": "2 of 8 rows of padding that are cut off are not zero"}
    assert load_file(tmp_path / "cut" / "model.safetensors")["lm_head.weight"].shape == (64, 32)
    with pytest.raises(ValueError, match=r"vocabulary \(64\) rows, and padded vocabulary to be no less, got 64 and 63"):
        convert(files, tmp_path / "less", to="fsdp_dtensor", **padded(63))
    with pytest.raises(ValueError, match="with to='fsdp_dtensor' only"):
        convert(files, tmp_path / "less", to="hf", megatron=MegatronOptions(padded_vocabulary=72))
    with pytest.raises(ValueError, match="from other names than Megatron's"):
        convert(tmp_path / "megatron", tmp_path / "less", to="fsdp_dtensor", **padded(80))


@pytest.mark.usefixtures("family")
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_the_legs_of_the_way_run_on_any_number_of_ranks(kind: Kind, tmp_path: Path) -> None:
    make_model(kind).save_pretrained(tmp_path / "hf")
    modules = FAMILY.modules(config_of(kind))
    batch = torch.randint(64, (3, 9), generator=torch.Generator().manual_seed(8))

    def make_sharded() -> tuple[Any, torch.optim.Optimizer]:
        model, _ = make_empty(kind)
        for unit in sharding_units(model):
            fully_shard(unit)
        return fully_shard(model), torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train() -> None:
        model, optimizer = make_sharded()
        load(
            open_checkpoint(tmp_path / "hf"), model=model, translate=lambda source: translated(source, modules, "right")
        )
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        F.cross_entropy(logits.transpose(1, 2), batch[:, 1:]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        save(tmp_path / "trained", model=model, optimizer=optimizer)

    def resume() -> None:
        model, optimizer = make_sharded()
        load(open_checkpoint(tmp_path / "back"), model=model, optimizer=optimizer)
        save(tmp_path / "resumed", model=model, optimizer=optimizer)
        save_safetensors(tmp_path / "published", model=model, like=tmp_path / "hf")

    run_ranks(train, 2)
    ways: dict[str, Any] = {
        "megatron": MegatronOptions(dialect="release-0.19", tensor_parallel_size=2),
        "like": tmp_path / "hf",
    }
    convert(tmp_path / "trained", tmp_path / "megatron", to="fsdp_dtensor", **ways)
    convert(tmp_path / "megatron", tmp_path / "back", to="dcp", **ways)
    run_ranks(resume, 3)
    trained, resumed = make_empty(kind), make_empty(kind)
    load(open_checkpoint(tmp_path / "trained"), model=trained[0], optimizer=trained[1])
    load(open_checkpoint(tmp_path / "resumed"), model=resumed[0], optimizer=resumed[1])
    assert_same(state_of(*resumed), state_of(*trained))
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "published")
    assert_same(dict(reloaded.named_parameters()), dict(trained[0].named_parameters()))
