"""A Qwen3.5 goes from Hugging Face to lamella, is trained, and goes to Megatron and all the way back unchanged."""

import pytest
import torch
import torch.nn.functional as F
from qwen_tiny import KINDS, config_of, make_config, make_model, translated
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForConditionalGeneration,
)

from lamella_checkpoint import load, save, save_safetensors
from lamella_checkpoint._convert import convert
from lamella_engine import fully_shard
from lamella_qwen import FAMILY, sharding_units
from lamella_testing import run_ranks

CLASSES = {
    "dense": AutoModelForCausalLM,
    "moe": AutoModelForCausalLM,
    "vision": Qwen3_5ForConditionalGeneration,
    "vision-moe": Qwen3_5MoeForConditionalGeneration,
}


def make_empty(kind):
    """A model whose weights are to come from elsewhere, and its optimizer."""
    config = make_config(kind)
    with torch.random.fork_rng():
        make = CLASSES[kind].from_config if CLASSES[kind] is AutoModelForCausalLM else CLASSES[kind]
        model = make(config)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train_a_step(model, optimizer):
    torch.manual_seed(7)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    round_norms(model)


def round_norms(model):
    """What is stored around one comes back from around zero if it is bf16's; of fp32 a bit may be lost, and is told."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("linear_attn.norm.weight"):
                parameter.copy_(parameter.bfloat16())


def state_of(model, optimizer):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    slots = {
        f"{names[id(parameter)]}.{slot}": value
        for parameter, state in optimizer.state.items()
        for slot, value in state.items()
    }
    return {name: parameter.detach() for name, parameter in model.named_parameters()} | slots


def assert_same(some, others):
    assert sorted(some) == sorted(others)
    for name, tensor in some.items():
        assert torch.equal(tensor, others[name]), name


@pytest.mark.usefixtures("family")
@pytest.mark.parametrize(
    ("dialect", "tensor_parallel_size"),
    [("bridge", None), ("release-0.19", 1), ("release-0.19", 2), ("release-0.19", 4)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_changes_on_the_way_to_megatron_and_back(kind, dialect, tensor_parallel_size, tmp_path):
    published, files = make_model(kind), tmp_path / "hf"
    published.save_pretrained(files)
    convert(files, tmp_path / "native", to="dcp")
    model, optimizer = make_empty(kind)
    load(tmp_path / "native", model=model)
    assert_same(dict(model.named_parameters()), dict(published.named_parameters()))

    train_a_step(model, optimizer)
    save(tmp_path / "trained", model=model, optimizer=optimizer)
    ways = {"dialect": dialect, "tensor_parallel_size": tensor_parallel_size, "like": files}
    there = convert(tmp_path / "trained", tmp_path / "megatron", to="fsdp_dtensor", **ways)
    back = convert(tmp_path / "megatron", tmp_path / "back", to="dcp", **ways)
    assert not there.inexact and not back.inexact
    resumed, its_optimizer = make_empty(kind)
    load(tmp_path / "back", model=resumed, optimizer=its_optimizer)
    assert_same(state_of(resumed, its_optimizer), state_of(model, optimizer))

    convert(tmp_path / "back", tmp_path / "published", to="hf")
    reloaded = CLASSES[kind].from_pretrained(tmp_path / "published")
    assert_same(dict(reloaded.named_parameters()), dict(model.named_parameters()))


@pytest.mark.usefixtures("family")
@pytest.mark.parametrize("kind", KINDS)
def test_weights_go_straight_from_hugging_face_to_megatron_and_back(kind, tmp_path):
    model = make_model(kind)
    round_norms(model)
    model.save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "megatron", to="fsdp_dtensor", dialect="bridge")
    convert(tmp_path / "megatron", tmp_path / "back", to="hf")
    # Under the names that were published, where experts are one by one.
    assert_same(*(load_file(tmp_path / way / "model.safetensors") for way in ("back", "hf")))
    assert (tmp_path / "back" / "config.json").read_text() == (tmp_path / "hf" / "config.json").read_text()


@pytest.mark.usefixtures("family")
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_the_legs_of_the_way_run_on_any_number_of_ranks(kind, tmp_path):
    make_model(kind).save_pretrained(tmp_path / "hf")
    modules = FAMILY.modules(config_of(kind))
    batch = torch.randint(64, (3, 9), generator=torch.Generator().manual_seed(8))

    def make_sharded():
        model, _ = make_empty(kind)
        for unit in sharding_units(model):
            fully_shard(unit)
        return fully_shard(model), torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train():
        model, optimizer = make_sharded()
        load(tmp_path / "hf", model=model, translate=lambda source: translated(source, modules, "right"))
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        F.cross_entropy(logits.transpose(1, 2), batch[:, 1:]).backward()
        optimizer.step()
        round_norms(model)
        save(tmp_path / "trained", model=model, optimizer=optimizer)

    def resume():
        model, optimizer = make_sharded()
        load(tmp_path / "back", model=model, optimizer=optimizer)
        save(tmp_path / "resumed", model=model, optimizer=optimizer)
        save_safetensors(tmp_path / "published", model=model, like=tmp_path / "hf")

    run_ranks(train, 2)
    ways = {"dialect": "release-0.19", "tensor_parallel_size": 2, "like": tmp_path / "hf"}
    convert(tmp_path / "trained", tmp_path / "megatron", to="fsdp_dtensor", **ways)
    convert(tmp_path / "megatron", tmp_path / "back", to="dcp", **ways)
    run_ranks(resume, 3)
    trained, resumed = make_empty(kind), make_empty(kind)
    load(tmp_path / "trained", model=trained[0], optimizer=trained[1])
    load(tmp_path / "resumed", model=resumed[0], optimizer=resumed[1])
    assert_same(state_of(*resumed), state_of(*trained))
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "published")
    assert_same(dict(reloaded.named_parameters()), dict(trained[0].named_parameters()))
