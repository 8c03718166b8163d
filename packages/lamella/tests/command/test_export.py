"""What a run that starts from nothing publishes opens in transformers, and its parts agree on their tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from trained_runs import TrainOn
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from lamella import Config
from lamella.cli import main


@pytest.fixture
def exported(config: Config, train: TrainOn, model_file: Path, tmp_path: Path) -> Path:
    """The folder that `lamella ckpt convert --to hf` makes of a run whose config names another tokenizer's tokens."""
    values = json.loads(model_file.read_text())
    model_file.write_text(json.dumps(values | {"bos_token_id": 7, "eos_token_id": 2, "pad_token_id": 3}))
    run = train(config, 2)
    checkpoint, to = run.directory.checkpoints / "step_00000006", tmp_path / "exported"
    assert main(["ckpt", "convert", str(checkpoint), str(to), "--to", "hf", "--config", str(run.directory.model)]) == 0
    return to


def test_an_exported_folder_names_the_tokens_of_its_tokenizer(exported: Path) -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(exported), AutoModelForCausalLM.from_pretrained(exported)
    assert tokenizer.eos_token == "<|endoftext|>"
    for config in (model.config, model.generation_config):
        assert config.eos_token_id == config.bos_token_id == tokenizer.eos_token_id
        assert config.pad_token_id is None
    assert model.config.architectures == ["LlamaForCausalLM"]
    text = "def f(x):\n    return 'na\u00efve'\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_generation_from_an_exported_folder_stops_at_the_end_of_a_text(exported: Path) -> None:
    generate: Any = pipeline("text-generation", model=str(exported), tokenizer=str(exported), device="cpu")
    model, end = generate.model, generate.tokenizer.eos_token_id
    with torch.no_grad():
        # Whatever was read, the model's next token is the end of a text.
        model.lm_head.weight.zero_()
        model.model.norm.register_forward_hook(lambda module, args, output: torch.ones_like(output))
        model.lm_head.weight[end] = 1.0
    ids = generate.tokenizer("def", return_tensors="pt")["input_ids"]
    generated = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
    assert generated[0, ids.shape[1] :].tolist() == [end]
    (result,) = generate("def", max_new_tokens=20, do_sample=False)
    assert result["generated_text"] == "def"
