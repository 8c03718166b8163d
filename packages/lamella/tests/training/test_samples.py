"""Samples during training: the model's own continuations, which leave training as it is."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_pieces import NUM_PIECES, write_sentence_pieces
from trained_runs import Run, TrainOn
from transformers import AutoModelForCausalLM, AutoTokenizer

from lamella import Config
from lamella._data.tokenizer import read_tokenizer
from lamella._model.spec import load_spec
from lamella._processes.placement import DataShare, Rank, place
from lamella._record.metrics import SampleRecord, read
from lamella._record.report import report
from lamella._record.run_directory import RunDirectory
from lamella._settings.sections import RunConfig
from lamella._training.preparation import prepare
from lamella._training.samples import Samples
from lamella.cli import main
from lamella_testing import RankFailure

PROMPTS = ("def ", "", "class Parser:\n    ")


def sampling(config: Config, name: str, **settings: Any) -> Config:
    """The config with samples after steps 3 and 6, in a folder of its own."""
    root = Path(str(config.run.directory)).parent
    settings = {"sample": PROMPTS, "sample_interval": 3, "sample_tokens": 5, **settings}
    return replace(config, run=replace(config.run, directory=str(root / name), **settings))


def samples(run: Run) -> dict[int, list[tuple[str, str]]]:
    texts: dict[int, list[tuple[str, str]]] = {}
    for record in read(run.directory.metrics):
        if isinstance(record, SampleRecord):
            assert record.number == 1 + len(texts.setdefault(record.step, []))
            texts[record.step].append((record.prompt, record.text))
    return texts


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_samples_change_no_loss_and_are_the_same_after_a_resume(
    config: Config, train: TrainOn, num_ranks: int, capfd: pytest.CaptureFixture[str]
) -> None:
    without = train(sampling(config, "without", sample=()), num_ranks)
    sampled = sampling(config, "with", sample_temperature=0.8, checkpoint_interval=3)
    run = train(sampled, num_ranks)
    assert run.losses == without.losses and run.validations == without.validations
    texts = samples(run)
    assert [*texts] == [3, 6] and [prompt for prompt, _ in texts[6]] == [*PROMPTS]
    assert capfd.readouterr().out.count("  sample: 'def ' -> ") == 2
    resumed = train(replace(sampled, run=replace(sampled.run, from_step=3)), num_ranks)
    assert resumed.losses == run.losses and samples(resumed) == texts


def test_a_greedy_sample_is_the_text_that_transformers_generates(
    config: Config, train: TrainOn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(sampling(config, "run"), 1)
    assert main(["export", str(run.directory.root), str(tmp_path / "model")]) == 0
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "model")
    for prompt, text in samples(run)[6]:
        inputs = torch.tensor([tokenizer(prompt)["input_ids"] or [tokenizer.eos_token_id]])
        tokens = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=5, do_sample=False, pad_token_id=0
        )
        assert text == tokenizer.decode(tokens[0, inputs.shape[1] :], skip_special_tokens=True)
    page = report(RunDirectory(run.directory.root))
    assert "Samples at step 6" in page and "class Parser:" in page


@pytest.mark.parametrize("ends", [[7, 9], 9])
def test_a_sample_ends_at_the_tokens_at_which_generation_ends(
    config: Config, ends: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = prepare(place(config)).directory
    (directory.model / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    rank = Rank(rank=0, num_ranks=1, device=torch.device("cpu"))
    run = RunConfig(sample=("def ",), sample_tokens=5)
    samples_of_run = Samples(run, directory, load_spec(str(directory.model)), rank, DataShare(0, 1))
    monkeypatch.setattr("lamella._training.samples.dist.all_reduce", lambda *_, **__: None)
    tokens = iter([5, 9, 6])
    monkeypatch.setattr(samples_of_run, "_next", lambda *_: next(tokens))
    assert samples_of_run._continuation(torch.nn.Identity(), [1], torch.Generator()) == [5, 9]


def test_a_sample_begins_with_the_space_that_a_decoder_strips_from_a_text(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = prepare(place(config)).directory
    write_sentence_pieces(directory.model)
    rank = Rank(rank=0, num_ranks=1, device=torch.device("cpu"))
    run = RunConfig(sample=("for x in",), sample_tokens=2)
    samples_of_run = Samples(run, directory, load_spec(str(directory.model)), rank, DataShare(0, 1))
    for function in ("all_reduce", "all_gather_object"):
        monkeypatch.setattr(f"lamella._training.samples.dist.{function}", _alone)
    tokens = iter(read_tokenizer(directory.model, NUM_PIECES).prompt_tokens("for x in -den")[-2:])
    monkeypatch.setattr(samples_of_run, "_next", lambda *_: next(tokens))
    assert [record.text for record in samples_of_run.records(torch.nn.Identity(), 1)] == [" -den"]


def _alone(outputs: list[str] | torch.Tensor, text: str | None = None, **_: object) -> None:
    """Do a collective of this process alone."""
    if isinstance(outputs, list) and text is not None:
        outputs[0] = text


def test_float8_with_past_amaxes_trains_alike_with_samples(config: Config, train: TrainOn) -> None:
    quantised = replace(config, parallel=replace(config.parallel, float8="delayed"))
    losses = [train(sampling(quantised, f"run-{len(sample)}", sample=sample), 2).losses for sample in ((), PROMPTS)]
    assert losses[0] == losses[1]


def test_prompts_that_no_model_reads_are_refused(
    config: Config, train: TrainOn, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*options, "--sample", "\udcff"]) == 2
    assert "Expected --sample to be texts in UTF-8, got '\\udcff'." in capsys.readouterr().err
    with pytest.raises(RankFailure, match=r"Expected --sample of fewer than 2,048 tokens, .* got 9,001 in"):
        train(sampling(config, "long", sample=("word " * 3000,)), 1)
