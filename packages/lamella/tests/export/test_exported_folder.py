"""`lamella export`: a folder that transformers opens with the run's logits, and a card with the run's figures."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from trained_runs import Run, TrainOn
from transformers import AutoModelForCausalLM, AutoTokenizer

from lamella import Config, __version__
from lamella._data.text import collect
from lamella._data.tokenizer import train_tokenizer
from lamella._data.tokens import load_tokens
from lamella._export.model_card import _tokens, model_card
from lamella._export.trained_run import open_run
from lamella._model.published_dtype import published_dtype
from lamella._model.spec import load_spec
from lamella._record.run_directory import RunDirectory
from lamella.cli import main
from lamella_checkpoint import load
from lamella_convert import convert
from lamella_transformers import build_model

INPUTS = torch.arange(20)[None]


@pytest.fixture(scope="module")
def trained(shared_config: Config, train: TrainOn) -> Run:
    """A run from fresh weights, with checkpoints of steps 3 and 6."""
    return train(replace(shared_config, run=replace(shared_config.run, checkpoint_interval=3)), 2)


@pytest.fixture
def run(trained: Run, tmp_path: Path) -> RunDirectory:
    """A copy of its folder."""
    shutil.copytree(trained.directory.root, tmp_path / "copy")
    return RunDirectory(tmp_path / "copy")


@pytest.fixture
def published(model_file: Path, text_folder: Path, tmp_path: Path) -> Callable[[torch.dtype], Path]:
    """Writes the tiny model as a Hugging Face folder, in a dtype."""

    def save(dtype: torch.dtype) -> Path:
        directory = tmp_path / "published"
        model: Any = build_model(load_spec(str(model_file)), torch.device("cpu"), seed=3)
        model.to(dtype).save_pretrained(directory)
        train_tokenizer(collect([str(text_folder)], 0.05).train, 290).tokenizer.save_pretrained(directory)
        (directory / "README.md").write_text("the card of the published model", encoding="utf-8")
        return directory

    return save


def checkpointed(directory: RunDirectory, step: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model of a checkpoint, read without an export."""
    model = build_model(load_spec(str(directory.model)), torch.device("cpu"), seed=0)
    load(directory.checkpoints / f"step_{step:08}", model=model)
    for parameter in model.parameters():  # Not the rotary tables, which transformers leaves in fp32.
        parameter.data = parameter.data.to(dtype)
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        tensor = model.eval()(input_ids=INPUTS).logits
    assert isinstance(tensor, torch.Tensor)
    return tensor


@pytest.mark.parametrize(("argv", "step"), [([], 6), (["--step", "3"], 3)], ids=["newest", "named"])
def test_an_exported_model_has_the_logits_of_its_checkpoint(
    run: RunDirectory, argv: list[str], step: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run.root), *argv]) == 0
    folder = run.root / "exports" / f"step_{step:08}"
    assert f"step {step}, 21 tensors" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(logits(model), logits(checkpointed(run, step)))
    assert AutoTokenizer.from_pretrained(folder)("def f():")["input_ids"]
    assert model.generation_config.eos_token_id is not None


def test_weights_that_came_in_bf16_leave_in_bf16(
    config: Config, train: TrainOn, published: Callable[[torch.dtype], Path], tmp_path: Path
) -> None:
    start = published(torch.bfloat16)
    run = train(replace(config, model=replace(config.model, name=str(start))), 2).directory
    shutil.rmtree(start)  # The run does not need the folder any more.
    out = tmp_path / "out"
    assert main(["export", str(run.root), str(out)]) == 0
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert torch.equal(logits(model), logits(checkpointed(run, 6, torch.bfloat16)))
    card = (out / "README.md").read_text()
    assert "from the weights of `published`" in card and "card of the published" not in card

    assert main(["export", str(run.root), str(tmp_path / "wide"), "--dtype", "fp32"]) == 0
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "wide")), logits(checkpointed(run, 6)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_dtype_of_a_folder_is_that_of_most_of_its_elements(
    published: Callable[[torch.dtype], Path], dtype: torch.dtype
) -> None:
    assert published_dtype(published(dtype)) == dtype


def test_the_card_has_the_figures_of_the_run(trained: Run, run: RunDirectory) -> None:
    assert main(["export", str(run.root), "--step", "3"]) == 0
    card = (run.root / "exports" / "step_00000003" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n") and "# copy\n" in card
    figures = dict(
        line.strip("| ").split(" | ", 1)
        for line in card.splitlines()
        if line.startswith("| ") and line != "| figure | |"
    )
    assert figures["steps"] == "3" and figures["tokens"] == "768 (8 sequences of 32 a step)"
    assert figures["training loss"] == f"{trained.losses[3]:.4f} nats/token (step 3)"
    assert figures["validation loss"] == f"{trained.nats_per_byte(3):.4f} nats/byte (step 3)"
    assert str(open_run(run.root).extra()["fingerprint"]).startswith(figures["fingerprint of the text"].strip("`"))
    assert figures["weights"] == "float32, trained in float32" and figures["lamella"] == __version__


def test_the_tokens_of_the_card_are_those_of_the_runs_speed(config: Config, train: TrainOn, tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    pairs = [json.dumps({"prompt": f"add {number}", "completion": "is"}) for number in range(99)]
    path.write_text("\n".join(pairs), encoding="utf-8")
    data = replace(config.data, paths=(str(path),), packing="none", validation_fraction=0.5)
    config = replace(config, data=data, optim=replace(config.optim, steps=2))
    run = train(config, 1)
    sequences = load_tokens(run.directory.tokens).sequences("train", 32)
    tokens = 2 * round(8 * sequences.tokens_a_sequence)
    card = model_card(open_run(run.directory.root), model_type="llama", dtype="float32", version="0")
    assert 0 < tokens < 2 * 8 * 32
    assert f"| tokens | {tokens:,} without padding (8 sequences of up to 32 a step) |" in card


def test_the_tokens_of_streamed_documents_are_at_most_those_of_full_sequences() -> None:
    extra = {"data.packing": "documents", "optim.batch_size": 8, "data.sequence_length": 32}
    assert _tokens(3, extra) == "at most 768, with padding (8 sequences of up to 32 a step)"
    assert _tokens(3, extra | {"data.packing": "stream"}) == "768 (8 sequences of 32 a step)"


def test_a_checkpoint_that_a_running_run_removes_gives_way_to_the_next(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = run.checkpoints / "step_00000006"
    later = newest.with_name("step_00000009")

    def convert_after_a_save(*paths: Path, **options: Any) -> object:
        if newest.exists():
            newest.rename(later)
        return convert(*paths, **options)

    monkeypatch.setattr("lamella._export.export.convert", convert_after_a_save)
    assert main(["export", str(run.root), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_exporting_a_damaged_checkpoint_is_refused_with_the_step_before(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    file = next((run.checkpoints / "step_00000006").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:100])
    assert main(["export", str(run.root)]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and str(file) in error
    assert "Pass --step 3 for the checkpoint before it, or put back what it lacks." in error
    assert not (run.root / "exports" / "step_00000006").exists()


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["{root}/absent"], "Expected the folder of a run of `lamella train` (its --run-dir), got "),
        (["{root}/checkpoints"], ", a folder without a run's config.json and model. The run's folder is '{root}'."),
        (["{root}", "--step", "5"], "Expected --step to be one of the saved steps, 3, 6, got 5."),
        (["{root}", "--step", "six"], "Expected --step to be an integer of at least 0, got 'six'."),
        (["{root}", "--dtype", "bf61"], "one of auto, fp32, bf16, got 'bf61'. Did you mean 'bf16'?"),
        (["{root}", "{root}"], "Expected OUT to be absent or an empty folder, got '{root}', which is neither. Pass an"),
        (["{root}", "{root}/config.json/out"], "config.json', which is neither."),
        (["{root}", "--setp", "3"], "Expected an option of `lamella export`, got '--setp'. Did you mean '--step'?"),
        (["{root}", "--merge", "a", "b"], "Expected an option of `lamella export`, got 'b'."),
        (["{root}", "--merge", "-a"], "Expected an option of `lamella export`, got '-a'."),
        ([], "The following arguments are required: RUN. See `lamella export --help`."),
    ],
)
def test_bad_input_is_one_line(
    run: RunDirectory, argv: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", *(word.format(root=run.root) for word in argv)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("lamella: error: ") and error.count("\n") == 1
    assert expected.format(root=run.root) in error


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{", "Expected a transformers config in '{path}', got "),
        ("[]", "Expected a field 'model_type' in '{path}', got none."),
    ],
)
def test_a_damaged_model_config_is_refused_by_its_file(
    run: RunDirectory, content: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run.model_config.write_text(content)
    assert main(["export", str(run.root)]) == 2
    assert f"lamella: error: {expected.format(path=run.model_config)}" in capsys.readouterr().err


@pytest.mark.parametrize("delimiter", [[], ["--"]])
def test_the_folder_may_follow_the_options(run: RunDirectory, tmp_path: Path, delimiter: list[str]) -> None:
    folder = tmp_path / "out"
    assert main(["export", str(run.root), "--dtype", "bf16", *delimiter, str(folder)]) == 0
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_run_without_a_checkpoint_is_refused(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run.checkpoints)
    assert main(["export", str(run.root)]) == 2
    assert "got none. The run saves one every --checkpoint-interval steps" in capsys.readouterr().err
