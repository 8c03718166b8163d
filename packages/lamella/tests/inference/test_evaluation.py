"""`lamella eval`: the validation of training on any text, and the tasks of lm-eval."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from trained_runs import Run, TrainOn
from transformers import AutoModelForCausalLM, AutoTokenizer

from lamella import Config
from lamella.cli import main

CPU = ("--device", "cpu")


def evaluated(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["eval", *argv, *CPU, "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert isinstance(report, dict)
    return report


def test_the_held_out_text_of_a_run_gives_its_last_validation_again(
    trained: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    report = evaluated(capsys, str(trained.directory.root))
    assert report["nats_per_byte"] == pytest.approx(trained.nats_per_byte(6), rel=1e-5)
    assert (report["sequences"], report["sequence_length"]) == (7, 32)
    assert main(["eval", str(trained.directory.root), *CPU]) == 0
    line = capsys.readouterr().out
    assert (
        line
        == f"{report['nats_per_byte']:.4f} nats/byte on the text that the run held out (7 sequences of 32 tokens)\n"
    )


def test_a_run_with_replicas_is_evaluated_in_one_process(
    shared_config: Config, train: TrainOn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = replace(shared_config.run, directory=str(tmp_path / "run"))
    parallel = replace(shared_config.parallel, ranks=2, replicate=2)
    run = train(replace(shared_config, run=settings, parallel=parallel), 2)
    assert evaluated(capsys, str(run.directory.root))["nats_per_byte"] == pytest.approx(run.nats_per_byte(6), rel=1e-5)


def test_eval_of_any_text_equals_the_loss_of_transformers_over_all_sequences(
    trained: Run, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "".join(f"def f{number}(x):\n    return x + {number}\n" for number in range(40))
    text += "# The last line is long and without an end." * 4
    (tmp_path / "text.py").write_text(text, encoding="utf-8")
    argv = ("--data", str(tmp_path / "text.py"), "--sequence-length", "64")
    of_run, of_folder = (evaluated(capsys, str(path), *argv) for path in (trained.directory.root, exported))
    assert of_run == of_folder

    tokenizer: Any = AutoTokenizer.from_pretrained(exported)
    model: Any = AutoModelForCausalLM.from_pretrained(exported)
    tokens = torch.tensor([*tokenizer(text)["input_ids"], tokenizer.eos_token_id])
    count, rest = divmod(len(tokens) - 1, 64)
    assert rest and of_run["sequences"] == count + 1 > 5  # the last sequence is shorter
    nats, nbytes = 0.0, 0
    for start in range(0, len(tokens) - 1, 64):
        piece = tokens[start : start + 65]
        with torch.no_grad():
            nats += float(F.cross_entropy(model(piece[None, :-1]).logits[0], piece[1:], reduction="sum"))
        nbytes += len(tokenizer.decode(piece[1:], skip_special_tokens=True).encode())
    assert of_run["nats_per_byte"] == pytest.approx(nats / nbytes, rel=1e-5)


def test_named_texts_are_evaluated_in_their_order(
    trained: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = {name: tmp_path / f"{file}.txt" for name, file in (("one", "b"), ("two", "a"))}
    for name, path in paths.items():
        path.write_text(f"import {name}\n" * 100, encoding="utf-8")
    named = [f"{name}={path}" for name, path in paths.items()]
    texts = evaluated(capsys, str(trained.directory.root), "--data", *named)["texts"]
    assert [text["text"] for text in texts] == [f"{', '.join(named)}, {name}" for name in paths]


def test_sequences_without_a_target_are_not_counted_as_evaluated(
    trained: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unanswered = {"prompt": "Longer than a sequence? " * 9, "completion": "Yes."}
    answered = [{"prompt": f"What is {number}? " * 2, "completion": f"Number {number}."} for number in range(3)]
    texts: list[Any] = []
    for records in ([unanswered, answered[0], unanswered, *answered[1:]], answered):
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        argv = ("--data", str(tmp_path / "a.jsonl"), "--sequence-length", "64")
        texts.append(evaluated(capsys, str(trained.directory.root), *argv))
    assert texts[0]["sequences"] == texts[1]["sequences"] > 0
    assert texts[0]["nats_per_byte"] == pytest.approx(texts[1]["nats_per_byte"], rel=1e-5)


@pytest.fixture
def lm_eval(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A stand-in for lm-eval, which notes its calls."""
    calls: list[dict[str, Any]] = []
    package, models, huggingface = (ModuleType(name) for name in ("lm_eval", "models", "huggingface"))

    def simple_evaluate(**arguments: Any) -> dict[str, Any]:
        calls.append(arguments)
        if arguments["tasks"] == ["absent"]:
            raise ValueError("Tasks not found: absent.\nTry another.")
        scores = {"acc,none": 0.25, "acc_stderr,none": 0.125, "alias": "one", "sample_len": 5}
        return {"results": dict.fromkeys(arguments["tasks"], scores)}

    package.simple_evaluate = simple_evaluate  # type: ignore[attr-defined]
    huggingface.HFLM = lambda **arguments: arguments  # type: ignore[attr-defined]
    for name, module in (("lm_eval", package), ("lm_eval.models", models), ("lm_eval.models.huggingface", huggingface)):
        monkeypatch.setitem(sys.modules, name, module)
    return calls


def test_tasks_are_scored_by_lm_eval(
    trained: Run, lm_eval: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["eval", str(trained.directory.root), "--tasks", "one", "two", "--limit", "5", *CPU]) == 0
    assert capsys.readouterr().out == "one  acc: 0.2500 +- 0.1250\ntwo  acc: 0.2500 +- 0.1250\n"
    (call,) = lm_eval
    assert call["tasks"] == ["one", "two"] and call["limit"] == 5
    assert type(call["model"]["pretrained"]).__name__ == "LlamaForCausalLM" and call["model"]["tokenizer"]("x")


def test_tasks_that_lm_eval_refuses_are_one_line(
    trained: Run, lm_eval: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["eval", str(trained.directory.root), "--tasks", "absent", *CPU]) == 2
    assert "lm-eval can run, got: Tasks not found: absent. Try another.\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["{run}", "--tasks", "x"], r"lm-eval to be installed for --tasks, got .* './packages/lamella\[eval\]'"),
        (["{exported}"], r"Expected --data or --tasks with '.*', which has no held-out text as a run has, got none\."),
        (["{run}", "--data", "absent"], r"Expected a text file or a folder as --data, got 'absent', which does not"),
        (["{run}", "--data", "{run}/empty.txt"], r"Expected text in .*empty.txt, got 1 files with no text in them\."),
        (["{run}", "--data", "{run}/questions.jsonl"], r"Expected tokens of an answer in .*, got none in the first 32"),
        (["{run}", "--limit", "3"], r"Expected --tasks with --limit, a number of documents of a task, got none\."),
        (["{run}", "--sequence-length", "9999"], r"Expected a --sequence-length of at most 2048, the positions that"),
        (["{run}", "--sequences", "0"], r"Expected --sequences to be an integer of at least 1, got '0'\."),
        (["{run}", "--json", "{run}/absent/x"], r"Expected a file to write to as --json, .*got '.*/absent/x', without"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(
    trained: Run, exported: Path, argv: list[str], expected: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    (trained.directory.root / "empty.txt").write_text("", encoding="utf-8")
    question = {"prompt": "Longer than a sequence? " * 9, "completion": "Yes."}
    (trained.directory.root / "questions.jsonl").write_text(json.dumps(question), encoding="utf-8")
    capsys.readouterr()
    names = {"run": str(trained.directory.root), "exported": str(exported)}
    assert main(["eval", *(word.format_map(names) for word in argv), *CPU]) == 2
    error = capsys.readouterr().err
    assert error.startswith("lamella: error: ") and error.count("\n") == 1
    assert re.search(expected, error), error


def test_held_out_answers_are_evaluated_at_the_length_at_which_they_were_counted(
    shared_config: Config, train: TrainOn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = ({"prompt": f"Number {number}?", "completion": f" {number} and more."} for number in range(300))
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    data = replace(shared_config.data, paths=(str(tmp_path / "rows.jsonl"),), packing="stream")
    settings = replace(shared_config.run, directory=str(tmp_path / "run"))
    run = train(replace(shared_config, data=data, run=settings), 2)
    root = str(run.directory.root)
    assert evaluated(capsys, root)["nats_per_byte"] == pytest.approx(run.nats_per_byte(6), rel=1e-5)
    assert main(["eval", root, "--sequence-length", "16", *CPU]) == 2
    error = capsys.readouterr().err
    assert "Expected the --sequence-length of the run, 32, at which its answers were counted, got 16." in error
