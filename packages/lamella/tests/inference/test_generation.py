"""`lamella generate`: the text that transformers generates from an export, from a run or from the folder."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_pieces import NUM_PIECES, write_sentence_pieces
from trained_runs import Run
from transformers import AutoModelForCausalLM, AutoTokenizer

from lamella._data.tokenizer import read_tokenizer
from lamella._inference.generation import TextStream
from lamella.cli import main

PROMPT = "def f("
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def by_transformers(folder: Path, prompt: str, num_tokens: int) -> str:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        output = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=num_tokens, do_sample=False
        )
    return str(tokenizer.decode(output[0, inputs.shape[1] :], skip_special_tokens=True))


def generated(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["generate", *argv]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    return output.out


@pytest.mark.parametrize("kind", ["run", "folder"])
def test_the_text_is_that_of_transformers(
    trained: Run, exported: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = by_transformers(exported, PROMPT, 12)
    before = {path: path.stat().st_mtime_ns for path in trained.directory.root.rglob("*")}
    capsys.readouterr()
    path = trained.directory.root if kind == "run" else exported
    output = generated(capsys, str(path), PROMPT, "--max-tokens", "12", "--temperature", "0", "--device", "cpu")
    assert output == f"{PROMPT}{expected}\n"
    assert {path: path.stat().st_mtime_ns for path in trained.directory.root.rglob("*")} == before


def test_a_generated_text_has_the_spaces_of_a_decoder_that_strips_the_first(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "pieces"
    shutil.copytree(exported, folder)
    write_sentence_pieces(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    inputs = tokenizer("for x in", return_tensors="pt")["input_ids"]
    torch.manual_seed(1)
    options = {"max_new_tokens": 40, "do_sample": True, "temperature": 2.0}
    expected = tokenizer.decode(
        model.generate(inputs, attention_mask=torch.ones_like(inputs), **options)[0], skip_special_tokens=True
    )
    assert expected.startswith("for x in ")
    argv = ["--max-tokens", "40", "--temperature", "2", "--seed", "1", "--device", "cpu"]
    capsys.readouterr()
    assert generated(capsys, str(folder), "for x in", *argv) == f"{expected}\n"


@pytest.mark.parametrize("is_byte_level", [True, False])
def test_a_stream_of_tokens_is_the_text_of_all_in_whole_characters(
    exported: Path, tmp_path: Path, is_byte_level: bool
) -> None:
    if not is_byte_level:
        write_sentence_pieces(tmp_path, "\n\u4e2d".encode())
    tokenizer = read_tokenizer(exported if is_byte_level else tmp_path, NUM_PIECES)
    prompt, text = "for x in", " -den\n    if\n\n  \u4e2d\u4e2d in\u4e2d  "
    tokens = tokenizer.prompt_tokens(prompt + text)
    context, tokens = tokens[: len(tokenizer.prompt_tokens(prompt))], tokens[len(tokenizer.prompt_tokens(prompt)) :]
    pieces: list[str] = []
    stream = TextStream(tokenizer, context, pieces.append)
    stream.put(torch.tensor([context]))
    for token in (tokenizer.end, *tokens, tokenizer.end):
        stream.put(torch.tensor([token]))
    assert "".join(pieces) == tokenizer.text_after(context, tokens) == text
    assert len(pieces) == len(tokens) - 2 * 3  # a character of three bytes comes with its last token
    stream.put(torch.tensor(tokenizer.prompt_tokens("\u4e2d")[-2:-1]))
    stream.end()
    assert "".join(pieces) == text + "\ufffd"  # half a character, at the end alone


def test_random_choices_follow_from_the_seed(trained: Run, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [str(trained.directory.root), PROMPT, "--max-tokens", "12", "--temperature", "1.5", "--device", "cpu"]
    texts = [generated(capsys, *argv, "--seed", seed) for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]


def test_a_temperature_next_to_0_takes_the_likeliest_token(trained: Run, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [str(trained.directory.root), PROMPT, "--max-tokens", "12", "--device", "cpu", "--temperature"]
    texts = [generated(capsys, *argv, temperature) for temperature in ("0", "1e-40", "1e-20")]
    assert texts[0] == texts[1] == texts[2]


def with_settings(exported: Path, folder: Path, **settings: object) -> Path:
    """Return a copy of a folder with other settings in its generation config."""
    shutil.copytree(exported, folder)
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | settings), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 3},
        {"num_beams": 2, "num_return_sequences": 2},
        {"token_healing": True},
        {"do_sample": True, "temperature": 0.0},
        {"stop_strings": ["no text that the model generates"]},
    ],
)
def test_one_text_is_generated_whatever_the_generation_config_asks_for(
    exported: Path, tmp_path: Path, settings: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    expected = by_transformers(exported, PROMPT, 12)
    folder = with_settings(exported, tmp_path / "folder", **settings)
    capsys.readouterr()
    assert generated(capsys, str(folder), PROMPT, "--max-tokens", "12", "--device", "cpu") == f"{PROMPT}{expected}\n"


def test_a_text_ends_with_a_stop_string_of_the_generation_config(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = by_transformers(exported, PROMPT, 12)
    folder = with_settings(exported, tmp_path / "folder", stop_strings=[expected[1:3]])
    capsys.readouterr()
    output = generated(capsys, str(folder), PROMPT, "--max-tokens", "12", "--device", "cpu")
    assert f"{PROMPT}{expected}".startswith(output[:-1])
    assert expected[1:3] in output and len(output) < len(f"{PROMPT}{expected}\n")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"penalty_alpha": 0.6, "top_k": 4}, "Contrastive Search requires"),
        ({"dola_layers": "low"}, "Dola Generation requires"),
        ({"eos_token_id": "2"}, "invalid data type 'str'"),
        ({"do_sample": True, "temperature": -1.0}, "`temperature` (=-1.0) has to be a strictly positive float"),
    ],
)
def test_a_generation_config_that_transformers_refuses_is_refused_by_its_file(
    exported: Path, tmp_path: Path, settings: dict[str, object], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = with_settings(exported, tmp_path / "folder", **settings)
    capsys.readouterr()
    assert main(["generate", str(folder), PROMPT, "--max-tokens", "12", "--device", "cpu"]) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1
    file = f"{folder}/generation_config.json"
    assert f"Expected settings that transformers generates text with in '{file}', got: " in output.err
    assert expected in output.err and output.err.endswith("Change the file, or leave the setting out.\n")


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_generation_config_that_cannot_be_read_is_refused(
    exported: Path, tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = with_settings(exported, tmp_path / "folder")
    (folder / "generation_config.json").write_text(content, encoding="utf-8")
    capsys.readouterr()
    assert main(["generate", str(folder), PROMPT, "--max-tokens", "12", "--device", "cpu"]) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1
    assert f"Expected a generation_config.json that transformers reads in '{folder}', got: " in output.err


def test_a_message_is_rendered_by_the_chat_template(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "chat"
    shutil.copytree(exported, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    expected = by_transformers(exported, f"<user>{PROMPT}<a>", 12)
    capsys.readouterr()
    argv = ["--chat", "--max-tokens", "12", "--temperature", "0", "--device", "cpu"]
    assert generated(capsys, str(folder), PROMPT, *argv) == f"{expected}\n"  # without the prompt


def test_a_text_without_tokens_begins_as_a_document(trained: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert generated(capsys, str(trained.directory.root), "", "--max-tokens", "3", "--device", "cpu").endswith("\n")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["{run}/absent", "x"], "Expected the folder of a run of `lamella train`, or a Hugging Face folder, got '"),
        (["{run}/checkpoints", "x"], "which has no config.json. The run's folder is '{run}'."),
        (["{run}/model", "x"], "Expected weights (model.safetensors) in the folder '{run}/model', got none. The run"),
        (["{run}", "x", "--step", "4"], "Expected --step to be one of the saved steps, 6, got 4."),
        (["{run}", "x", "--chat"], "Expected a tokenizer with a chat template for --chat, got none in '{run}, step 6'"),
        (["{run}", "x", "--max-tokens", "0"], "Expected --max-tokens to be an integer of at least 1, got '0'."),
        (["{run}", "x", "--temperature", "nan"], "Expected --temperature to be a number of at least 0, got 'nan'."),
        (["{run}", "x", "--device", "gpu"], "Expected --device to be one of auto, cpu, cuda, got 'gpu'."),
        (["{run}", "\udcff"], "Expected a prompt in UTF-8, got other bytes."),
        (["{run}", "word " * 3000], "Expected a prompt of fewer than 2,048 tokens, the positions of the model, got "),
        (["{run}", "x", "--temprature", "1"], "got '--temprature'. Did you mean '--temperature'?"),
        (["{run}"], "The following arguments are required: PROMPT. See `lamella generate --help`."),
        (["{run}", "-x"], "--help`. Pass an argument that begins with - after --, and options before it."),
        (["{run}", "--", "-x", "--seed", "1"], "Expected no option after --, got '--seed'. Pass options before --."),
        (["{exported}", "x", "--step", "3"], "Expected --step with the folder of a run only, got '{exported}'."),
    ],
)
def test_bad_input_is_one_line(
    trained: Run, exported: Path, argv: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    names = {"run": str(trained.directory.root), "exported": str(exported)}
    assert main(["generate", *(word.format_map(names) for word in argv)]) == 2
    output = capsys.readouterr()
    assert output.err.startswith("lamella: error: ") and output.err.count("\n") == 1 and output.out == ""
    assert expected.format_map(names) in output.err


@pytest.mark.parametrize(
    "argv", [["generate", "{folder}", "x"], ["eval", "{folder}"], ["train", "--model", "{folder}", "--print-config"]]
)
def test_an_adapter_alone_is_refused_with_the_ways_to_merge_it(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_text("{}", encoding="utf-8")
    assert main([word.format(folder=tmp_path) for word in argv]) == 2
    error = capsys.readouterr().err
    assert f"Expected a model in '{tmp_path}', got an adapter of peft's (adapter_config.json). Merge it" in error
    assert error.count("\n") == 1


def test_a_damaged_checkpoint_is_refused_by_its_file(
    trained: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trained.directory.root, tmp_path / "copy")
    file = next((tmp_path / "copy" / "checkpoints").glob("*/*.distcp"))
    file.write_bytes(file.read_bytes()[:100])
    assert main(["generate", str(tmp_path / "copy"), "x", "--device", "cpu"]) == 1
    error = capsys.readouterr().err
    assert str(file) in error and error.count("\n") == 1
