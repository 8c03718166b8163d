"""Models as they are published: read by transformers' own tables, refused where that is impossible, and given back."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from trained_runs import TrainOn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from validation import nats_per_byte

from lamella import Config, ConfigError
from lamella._data.text import collect
from lamella._data.tokenizer import read_tokenizer, train_tokenizer
from lamella._data.tokens import load_tokens
from lamella._model.spec import check_context, load_spec
from lamella._record.metrics import ValidationRecord, append, read
from lamella._training.preparation import prepare
from lamella.cli import main
from lamella_testing import RankFailure

SMALL: Mapping[str, object] = {
    "vocab_size": 300,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
MODELS: Mapping[str, Mapping[str, object]] = {
    "mixtral": {"num_key_value_heads": 1, "num_local_experts": 12, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "num_key_value_heads": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "head_dim": 8,
    },
    "mamba2": {"num_heads": 4, "head_dim": 8, "state_size": 4, "n_groups": 1},
    "gpt2": {"n_positions": 64},
}


def make(model_type: str, **changes: object) -> Any:
    torch.manual_seed(1)
    values = {**SMALL, **MODELS.get(model_type, {}), **changes}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values))  # type: ignore[no-untyped-call]


def published(model: Any, text_folder: Path, to: Path) -> Path:
    model.save_pretrained(to)
    train_tokenizer(collect([str(text_folder)], 0.05).train, 290).tokenizer.save_pretrained(to)
    return to


def starting_from(config: Config, directory: Path, lr: float = 1e-2) -> Config:
    return replace(
        config,
        model=replace(config.model, name=str(directory)),
        optim=replace(config.optim, lr=lr),
    )


@pytest.mark.parametrize("model_type", MODELS)
def test_a_published_model_is_trained_on_and_published_again_under_its_names(
    model_type: str, config: Config, train: TrainOn, text_folder: Path, tmp_path: Path
) -> None:
    directory = published(make(model_type), text_folder, tmp_path / "published")
    run = train(starting_from(config, directory), 2)
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    assert run.validations[0] == pytest.approx(nats_per_byte(reference, run.directory), rel=1e-5)
    assert run.nats_per_byte(6) < run.nats_per_byte(0)

    checkpoint, new = run.directory.checkpoints / "step_00000006", tmp_path / "new"
    assert main(["ckpt", "convert", str(checkpoint), str(new), "--to", "hf", "--config", str(run.directory.model)]) == 0
    trained = AutoModelForCausalLM.from_pretrained(new, dtype=torch.float32)
    assert run.validations[6] == pytest.approx(nats_per_byte(trained, run.directory), rel=1e-5)
    trained.save_pretrained(tmp_path / "by-transformers")
    mine, theirs = (load_file(folder / "model.safetensors") for folder in (new, tmp_path / "by-transformers"))
    assert mine.keys() == theirs.keys() == load_file(directory / "model.safetensors").keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_weights_that_are_not_finite_are_refused_by_name_before_the_first_step(
    config: Config, train: TrainOn, text_folder: Path, tmp_path: Path
) -> None:
    model = make("gpt2")
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.weight[3, 5] = math.nan
    directory = published(model, text_folder, tmp_path / "published")
    expected = "Expected finite weights in .*published', got nan in 'transformer.h.1.mlp.c_fc.weight'"
    with pytest.raises(RankFailure, match=expected):
        train(starting_from(config, directory), 2)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "consolidated.00.pth"])
def test_starting_weights_in_formats_other_than_safetensors_are_refused(
    config: Config, text_folder: Path, tmp_path: Path, file: str
) -> None:
    model = make("gpt2")
    directory = published(model, text_folder, tmp_path / "published")
    (directory / "model.safetensors").unlink()
    torch.save(model.state_dict(), directory / file)
    with pytest.raises(ConfigError, match=f"Expected weights as model.safetensors in .*published', got {file}. "):
        prepare(starting_from(config, directory))


def test_the_way_out_for_weights_of_torch_save_leads_to_the_same_weights(
    config: Config, train: TrainOn, text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make("gpt2")
    directory = published(model, text_folder, tmp_path / "published")
    (directory / "model.safetensors").unlink()
    torch.save(model.state_dict(), directory / "pytorch_model.bin")
    with pytest.raises(ConfigError) as caught:
        prepare(starting_from(config, directory))
    monkeypatch.chdir(tmp_path)
    command = str(caught.value).split("Run: lamella ")[1].split(", then")[0]
    assert main(command.split()) == 0
    run = train(starting_from(config, tmp_path / "published-safetensors"), 1)
    assert run.validations[0] == pytest.approx(nats_per_byte(model, run.directory), rel=1e-5)


@pytest.mark.parametrize(
    ("model_type", "changes", "bound"),
    [
        ("gpt2", {"n_positions": 16}, 16),
        ("llama", {"max_position_embeddings": 31}, 31),
        (
            "llama",
            {
                "max_position_embeddings": 8,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 2.0,
                    "original_max_position_embeddings": 8,
                },
            },
            16,
        ),
    ],
)
def test_sequences_past_the_models_positions_are_refused_before_the_text_is_read(
    config: Config,
    tmp_path: Path,
    model_type: str,
    changes: dict[str, object],
    bound: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lamella._data.sources.collect", lambda *_, **__: pytest.fail("the text was read"))
    file = tmp_path / "model.json"
    file.write_text(json.dumps({"model_type": model_type, **SMALL, **changes}))
    with pytest.raises(ConfigError, match=f"of at most {bound}, .*got 32. Pass --sequence-length {bound}."):
        prepare(starting_from(config, file))
    check_context(load_spec(str(file)), bound)


def test_training_a_model_that_is_not_causal_is_refused(config: Config, tmp_path: Path) -> None:
    file = tmp_path / "model.json"
    file.write_text(json.dumps({"model_type": "bert", **SMALL}))
    with pytest.raises(
        ConfigError, match="got 'bert', whose positions see the tokens that they predict. Set \"is_decoder\": true"
    ):
        prepare(starting_from(config, file))


@pytest.mark.parametrize(
    ("model_type", "sizes", "num_layers"),
    [
        ("nemotron_h", {"layers_block_type": ["mamba", "attention", "mlp"]}, 3),
        ("longcat_flash", {"num_layers": 2}, 4),
        ("prophetnet", {"num_encoder_layers": 3, "num_decoder_layers": 2}, 3),
    ],
)
def test_a_number_of_layers_may_be_computed_from_other_fields(
    tmp_path: Path, model_type: str, sizes: dict[str, object], num_layers: int
) -> None:
    file = tmp_path / "model.json"
    values = {"model_type": model_type, "vocab_size": 300, "hidden_size": 16}
    file.write_text(json.dumps(values | sizes))
    assert cast(Any, load_spec(str(file))).num_hidden_layers == num_layers
    file.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=f"Expected a field '{min(sizes, key=len)}' in the model config .*, got none"):
        load_spec(str(file))


def test_units_that_transformers_does_not_name_are_told_at_the_start(config: Config, tmp_path: Path) -> None:
    file = tmp_path / "model.json"
    values = {"model_type": "openai-gpt", "vocab_size": 300, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    file.write_text(json.dumps(values))
    [line] = [line for line in prepare(starting_from(config, file)).lines if line.startswith("model: ")]
    assert line.endswith("; its units are the 2 modules of the longest list (Block), which transformers does not name")


def test_a_tokenizer_that_is_not_byte_level_is_taken_and_losses_are_told_a_token(
    config: Config, text_folder: Path, tmp_path: Path
) -> None:
    make("gpt2").save_pretrained(tmp_path / "published")
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=280, special_tokens=["<unk>", "</s>"], show_progress=False)
    tokenizer.train([str(path) for path in text_folder.iterdir()], trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")  # type: ignore[no-untyped-call]
    wrapped.save_pretrained(tmp_path / "published")

    prepared = prepare(starting_from(config, tmp_path / "published"))
    data = load_tokens(prepared.directory.tokens)
    assert any("in nats a token, since the tokenizer does not tell" in line for line in prepared.lines)
    assert data.num_units(data.train[None, :50].long()).tolist() == [50]
    assert int((data.train == 1).sum() + (data.validation == 1).sum()) == 3  # An end for each file.
    record = ValidationRecord.of(3, 1.5, data.unit)
    assert record.line() == "step: 3  validation: 1.5000 nats/token"
    append(tmp_path / "metrics.jsonl", [record])
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 3, "nats_per_token": 1.5}
    assert read(tmp_path / "metrics.jsonl") == [record]


def test_sentencepieces_file_without_its_library_is_refused_by_the_librarys_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\n")
    for name, is_available in (("sentencepiece", False), ("protobuf", True)):
        monkeypatch.setattr(
            f"transformers.utils.import_utils.is_{name}_available", lambda is_available=is_available: is_available
        )
    with pytest.raises(
        ConfigError, match="Expected sentencepiece to be .*model', got .* from the package index: sentencepiece$"
    ):
        read_tokenizer(tmp_path, 300)
