"""A run from a Hugging Face directory takes its weights, config and tokenizer, in any spelling."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch import nn
from trained_runs import TrainOn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
)
from validation import nats_per_byte

from lamella import Config, ConfigError
from lamella._data.text import collect
from lamella._data.tokenizer import train_tokenizer
from lamella._model.spec import load_spec, outline
from lamella._model.weights import check_weights
from lamella._processes.placement import place
from lamella._training.preparation import prepare
from lamella._training.trainer import Trainer
from lamella.cli import config_of, main, parse
from lamella_checkpoint import load
from lamella_testing import RankFailure, qwen
from lamella_testing.qwen import Kind
from lamella_transformers import load_weights


def make_model(kind: Kind) -> nn.Module:
    return cast(nn.Module, qwen.make_model(kind, vocab_size=300, spread=0.05))


@pytest.fixture
def save(tmp_path: Path, text_folder: Path) -> Callable[[nn.Module], Path]:
    """Writes a model in its published form: in bf16, with a tokenizer, and the layer unknown to transformers."""

    def save(model: Any) -> Path:
        directory = tmp_path / "published"
        model.to(torch.bfloat16).save_pretrained(directory)
        if any(".linear_attn." in name for name, _ in model.named_parameters()):
            weights = load_file(file := directory / "model.safetensors")
            save_file(weights | qwen.make_mtp(weights), file, {"format": "pt"})
        tokenizer = train_tokenizer(collect([str(text_folder)], 0.05).train, 290)
        assert tokenizer.backend is not None
        tokenizer.backend.save(str(directory / "tokenizer.json"))
        (directory / "tokenizer_config.json").write_text('{"model_max_length": 32}', encoding="utf-8")
        return directory

    return save


def starting_from(config: Config, directory: Path) -> Config:
    return replace(config, model=replace(config.model, name=str(directory)), optim=replace(config.optim, lr=1e-2))


@pytest.mark.parametrize(
    "kind", ["dense", "vision-moe", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("moe", "vision"))]
)
@pytest.mark.usefixtures("family")
def test_a_qwen_is_trained_on_from_its_published_weights(
    config: Config, train: TrainOn, save: Callable[[nn.Module], Path], kind: Kind
) -> None:
    directory = save(make_model(kind))
    run = train(starting_from(config, directory), 2)
    published = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    assert run.validations[0] == pytest.approx(nats_per_byte(published, run.directory), rel=1e-5)
    assert run.nats_per_byte(6) < run.nats_per_byte(0) - 0.01
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (run.directory.model / file).read_text() == (directory / file).read_text()
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(run.directory.model).get_text_config())  # type: ignore[no-untyped-call]
    load(run.directory.checkpoints / "step_00000006", model=model)
    assert run.validations[6] == pytest.approx(nats_per_byte(model, run.directory), rel=1e-5)


# A vision model has both parts that stay untrained: the layer that predicts a further token, and the tower.
@pytest.mark.parametrize("kind", [*(pytest.param(kind, marks=pytest.mark.slow) for kind in ("dense", "moe")), "vision"])
@pytest.mark.usefixtures("family")
def test_a_run_that_is_killed_goes_on_elsewhere_and_is_published_whole(
    config: Config, train: TrainOn, save: Callable[[nn.Module], Path], kind: Kind, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    directory = save(make_model(kind))
    config = starting_from(config, directory)
    uninterrupted = train(config, 2)

    config = replace(config, run=replace(config.run, directory=str(tmp_path / "killed"), checkpoint_interval=3))
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", killed_once_3_steps_are_saved(tmp_path / "killed"))
        with pytest.raises(RankFailure, match="SIGKILL"):
            train(config, 2)
    before = {name: tensor.clone() for name, tensor in load_file(directory / "model.safetensors").items()}
    (directory / "model.safetensors").write_bytes(b"")  # Never read again.
    resumed = train(config, 1)
    assert min(resumed.losses) == 1 and resumed.losses == pytest.approx(uninterrupted.losses, rel=1e-4)
    assert resumed.validations == pytest.approx(uninterrupted.validations, rel=1e-5)

    new, checkpoint = tmp_path / "new", resumed.directory.checkpoints / "step_00000006"
    capsys.readouterr()
    assert (
        main(["ckpt", "convert", str(checkpoint), str(new), "--to", "hf", "--config", str(resumed.directory.model)])
        == 0
    )
    untrained = [name for name in before if name.startswith(("mtp.", "model.visual."))]
    assert f"as they were published, not trained: {untrained[0]}, " in capsys.readouterr().out
    after = load_file(new / "model.safetensors")
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor) is (name in untrained), name
    model = AutoModelForCausalLM.from_pretrained(new, dtype=torch.float32)
    assert resumed.validations[6] == pytest.approx(nats_per_byte(model, resumed.directory), rel=1e-5)
    # A second start works.
    again = replace(config.run, directory=str(tmp_path / "again"), checkpoint_interval=6)
    assert train(replace(starting_from(config, new), run=again), 1).validations[0] == pytest.approx(
        resumed.validations[6], rel=1e-5
    )


def killed_once_3_steps_are_saved(run: Path) -> Callable[[Trainer, int], object]:
    """A step that is not finished: its process is killed before the fifth."""
    step = Trainer._step

    def step_or_die(self: Trainer, number: int) -> object:
        if number == 4:
            while not (run / "checkpoints" / "step_00000003").exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, number)

    return step_or_die


def test_any_models_weights_are_started_from(
    config: Config, train: TrainOn, save: Callable[[nn.Module], Path], model_file: Path
) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**json.loads(model_file.read_text())))  # type: ignore[no-untyped-call]
    directory = save(model)
    one = train(starting_from(config, directory), 1)
    assert one.validations[0] == pytest.approx(nats_per_byte(model.float(), one.directory), rel=1e-5)


def test_a_run_resumes_with_moved_starting_weights_and_refuses_changed_weights(
    config: Config, train: TrainOn, save: Callable[[nn.Module], Path], model_file: Path, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**json.loads(model_file.read_text())))  # type: ignore[no-untyped-call]
    directory = save(model)
    run = train(starting_from(config, directory), 1)
    longer = replace(config, optim=replace(config.optim, steps=9))

    moved = Path(shutil.copytree(directory, tmp_path / "moved"))
    assert prepare(place(starting_from(longer, moved))).first_step == 6
    weights = load_file(moved / "model.safetensors")
    save_file({**weights, "model.norm.weight": weights["model.norm.weight"] * 2}, moved / "model.safetensors")
    before = run.directory.weights.read_text()[:12]
    with pytest.raises(ConfigError, match=rf"started from \({before}\) in --model, got others in '{moved}' "):
        prepare(place(starting_from(longer, moved)))
    assert prepare(place(starting_from(longer, directory))).first_step == 6


def test_settings_suit_weights_that_were_trained_before(save: Callable[[nn.Module], Path]) -> None:
    directory = str(save(make_model("dense")))
    assert config_of(parse(["train", "--model", directory])).optim.lr == 2e-5
    assert config_of(parse(["train", "--model", directory, "--lr", "1e-3"])).optim.lr == 1e-3


def test_weights_that_are_not_the_models_are_refused(config: Config, save: Callable[[nn.Module], Path]) -> None:
    directory = save(make_model("dense"))
    values = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(values | {"intermediate_size": 20}))
    with pytest.raises(
        ConfigError, match=r"to be the model's, got .*gate_proj.*\(48, 32\).*\(20, 32\) here.*and 9 more"
    ):
        prepare(starting_from(config, directory))


def test_a_vocab_size_or_tokenizer_unfit_for_the_starting_weights_is_refused(
    config: Config, save: Callable[[nn.Module], Path]
) -> None:
    directory = save(make_model("dense"))
    config = starting_from(config, directory)
    with pytest.raises(ConfigError, match="Expected no --vocab-size with the weights in"):
        prepare(replace(config, data=replace(config.data, vocab_size=400)))
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(directory / "tokenizer.json"))
    with pytest.raises(ConfigError, match="or a token of the tokenizer as eos_token in its tokenizer_config.json, got"):
        prepare(config)
    (directory / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="Expected a tokenizer that transformers can read in .*published', got one w"):
        prepare(config)


def test_weights_that_vanish_after_the_check_are_missed(save: Callable[[nn.Module], Path]) -> None:
    directory = save(make_model("dense"))
    spec = load_spec(str(directory))
    assert check_weights(directory, outline(spec), spec) == tuple(
        name for name in load_file(directory / "model.safetensors") if name.startswith("mtp.")
    )
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


def test_an_untied_head_under_a_config_with_tied_embeddings_is_refused(
    config: Config, save: Callable[[nn.Module], Path]
) -> None:
    values = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    values |= {"num_key_value_heads": 2}
    spec = AutoConfig.for_model("llama", vocab_size=300, tie_word_embeddings=False, **values)
    directory = save(AutoModelForCausalLM.from_config(spec))  # type: ignore[no-untyped-call]
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": True}), encoding="utf-8")
    starting = place(starting_from(config, directory))
    with pytest.raises(ConfigError, match=r"Expected 'lm_head.weight' in .* \"tie_word_embeddings\": false"):
        prepare(starting)
    weights = load_file(directory / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    prepare(starting)
