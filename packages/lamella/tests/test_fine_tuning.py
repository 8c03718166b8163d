"""A run that starts from a Hugging Face directory takes its weights, config and tokenizer, however they are spelled."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

from lamella import Config, ConfigError
from lamella._directory import RunDirectory
from lamella._models import load_spec, outline
from lamella._prepare import prepare
from lamella._pretrained import check_weights, load_weights
from lamella._text import collect, train_tokenizer
from lamella._tokens import load_tokens, sequences, validation_indices
from lamella.cli import config_of, parse
from lamella_checkpoint import convert, load

TrainOn = Callable[[Config, int], "object"]

TEXT = {
    "vocab_size": 300,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
}
DENSE = TEXT | {"intermediate_size": 24}
MOE = TEXT | {
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
}
VISION = {
    "depth": 1,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_heads": 2,
    "out_hidden_size": 16,
    "patch_size": 4,
    "num_position_embeddings": 16,
}


def make_model(kind: str) -> nn.Module:
    torch.manual_seed(1)
    match kind:
        case "dense":
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_5_text", **DENSE))
        case "moe":
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_5_moe_text", **MOE))
        case "vision":
            text = DENSE | {"tie_word_embeddings": True}
            config = Qwen3_5Config(text_config=text, vision_config=VISION, tie_word_embeddings=True)
            model = Qwen3_5ForConditionalGeneration(config)
        case _:
            model = Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(text_config=MOE, vision_config=VISION))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


@pytest.fixture
def save(tmp_path: Path, text_folder: Path) -> Callable[[nn.Module], Path]:
    """Writes a model as transformers does, in bf16, with a tokenizer."""

    def save(model: nn.Module) -> Path:
        directory = tmp_path / "published"
        model.to(torch.bfloat16).save_pretrained(directory)
        tokenizer = train_tokenizer(collect([str(text_folder)], 0.05).train, 290)
        tokenizer.save(str(directory / "tokenizer.json"))
        (directory / "tokenizer_config.json").write_text('{"model_max_length": 32}', encoding="utf-8")
        return directory

    return save


def starting_from(config: Config, directory: Path) -> Config:
    return replace(config, model=replace(config.model, name=str(directory)), optim=replace(config.optim, lr=1e-2))


def nats_per_byte(model: nn.Module, directory: RunDirectory) -> float:
    """What a validation of the fixture's configuration measures, by transformers alone."""
    data = load_tokens(directory.tokens)
    batch = sequences(data.validation, validation_indices(data.validation, 32, 7), 32)
    with torch.no_grad():
        logits = model.eval()(input_ids=batch[:, :-1]).logits
    nats = F.cross_entropy(logits.transpose(1, 2), batch[:, 1:], reduction="sum")
    return float(nats / data.token_nbytes[batch[:, 1:]].sum())


@pytest.mark.parametrize("kind", ["dense", "moe", "vision", "vision-moe"])
@pytest.mark.usefixtures("family")
def test_a_qwen_is_trained_on_from_its_published_weights(
    config: Config, train: TrainOn, save: Callable[[nn.Module], Path], kind: str
) -> None:
    directory = save(make_model(kind))
    run = train(starting_from(config, directory), 2)
    published = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    assert run.validations[0] == pytest.approx(nats_per_byte(published, run.directory), rel=1e-5)
    assert run.validations[6] < run.validations[0] - 0.01
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (run.directory.model / file).read_text() == (directory / file).read_text()
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(run.directory.model))
    load(run.directory.checkpoints / "step_00000006", model=model)
    assert run.validations[6] == pytest.approx(nats_per_byte(model, run.directory), rel=1e-5)


@pytest.mark.parametrize("kind", ["dense", "moe", "vision"])
@pytest.mark.usefixtures("family")
def test_what_was_trained_is_published_again(
    config: Config, train: TrainOn, save: Callable[[nn.Module], Path], tmp_path: Path, kind: str
) -> None:
    run = train(starting_from(config, save(make_model(kind))), 2)
    convert(run.directory.checkpoints / "step_00000006", tmp_path / "new", to="hf", like=run.directory.model)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "new", dtype=torch.float32)
    assert run.validations[6] == pytest.approx(nats_per_byte(model, run.directory), rel=1e-5)
    # It can be started from once more.
    again = replace(config.run, directory=str(tmp_path / "again"))
    resumed = train(replace(starting_from(config, tmp_path / "new"), run=again), 1)
    assert resumed.validations[0] == pytest.approx(run.validations[6], rel=1e-5)


def test_a_fine_tuned_run_resumes_without_the_weights_it_started_from(
    config: Config, train: TrainOn, save: Callable[[nn.Module], Path]
) -> None:
    directory = save(make_model("dense"))
    whole = train(starting_from(config, directory), 2)
    shutil.rmtree(whole.directory.checkpoints / "step_00000006")
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    assert train(starting_from(config, directory), 4).losses == pytest.approx(whole.losses, rel=1e-4)


def test_any_models_weights_are_started_from(
    config: Config, train: TrainOn, save: Callable[[nn.Module], Path], model_file: Path
) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**json.loads(model_file.read_text())))
    directory = save(model)
    one = train(starting_from(config, directory), 1)
    assert one.validations[0] == pytest.approx(nats_per_byte(model.float(), one.directory), rel=1e-5)


def test_settings_suit_weights_that_were_trained_before(save: Callable[[nn.Module], Path]) -> None:
    directory = str(save(make_model("dense")))
    assert config_of(parse(["train", "--model", directory])).optim.lr == 2e-5
    assert config_of(parse(["train", "--model", directory, "--lr", "1e-3"])).optim.lr == 1e-3


def test_weights_that_are_not_the_models_are_refused(config: Config, save: Callable[[nn.Module], Path]) -> None:
    directory = save(make_model("dense"))
    values = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(values | {"intermediate_size": 20}))
    with pytest.raises(
        ConfigError, match=r"to be the model's, got .*gate_proj.*\(24, 16\).*\(20, 16\) here.*and 9 more"
    ):
        prepare(starting_from(config, directory))


def test_another_vocabulary_than_that_of_the_weights_is_refused(
    config: Config, save: Callable[[nn.Module], Path]
) -> None:
    directory = save(make_model("dense"))
    config = starting_from(config, directory)
    with pytest.raises(ConfigError, match="Expected no --vocab-size with the weights in"):
        prepare(replace(config, data=replace(config.data, vocab_size=400)))
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(directory / "tokenizer.json"))
    with pytest.raises(ConfigError, match="Expected a byte-level tokenizer in .*tokenizer.json"):
        prepare(config)
    (directory / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="Expected a tokenizer in .*tokenizer.json"):
        prepare(config)


def test_weights_that_vanish_after_the_check_are_missed(save: Callable[[nn.Module], Path]) -> None:
    directory = save(make_model("dense"))
    spec = load_spec(str(directory))
    assert check_weights(directory, outline(spec), spec) == f"weights: {directory}"
    weights = load_file(directory / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, directory / "model.safetensors")
    with pytest.raises(RuntimeError, match=r"to stay as they were, got model.model.norm.weight: absent from the check"):
        load_weights(directory, make_model("dense"), spec)


def test_a_damaged_file_is_named(config: Config, save: Callable[[nn.Module], Path]) -> None:
    directory = save(make_model("dense"))
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(ConfigError, match="damaged file .*model.safetensors"):
        prepare(starting_from(config, directory))
