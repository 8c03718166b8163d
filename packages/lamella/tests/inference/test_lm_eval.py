"""`lamella eval --tasks` with lm-eval itself, on a task of the user's: scores by the model's own log-likelihoods."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lamella.cli import main

pytest.importorskip("lm_eval", reason="an extra of lamella, tested in a session of its own")
pytestmark = pytest.mark.filterwarnings("default")  # lm-eval's own

QUESTIONS: list[dict[str, Any]] = [
    {"question": f"return {first} +", "choices": [f"{second}", f"{first}", "None", "self"], "gold": second % 4}
    for first in range(4)
    for second in range(4)
]
TASK = """
task: sums
dataset_path: json
dataset_kwargs: {data_files: FILE}
test_split: train
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: gold
metric_list: [{metric: acc}]
"""


def log_likelihood(model: Any, tokenizer: Any, question: str, choice: str) -> float:
    start, tokens = (torch.tensor(tokenizer(text)["input_ids"]) for text in (question, f"{question} {choice}"))
    with torch.no_grad():
        scores = model(tokens[None]).logits[0].log_softmax(-1)
    return float(scores[:-1].gather(1, tokens[1:, None])[len(start) - 1 :].sum())


def test_a_task_in_a_file_is_scored_by_the_models_log_likelihoods(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    file, task = tmp_path / "sums.jsonl", tmp_path / "sums.yaml"
    file.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    task.write_text(TASK.replace("FILE", str(file)))
    model: Any = AutoModelForCausalLM.from_pretrained(exported)
    tokenizer: Any = AutoTokenizer.from_pretrained(exported)
    answers = []
    for question in QUESTIONS:
        scores = [log_likelihood(model, tokenizer, question["question"], choice) for choice in question["choices"]]
        answers.append(max(range(4), key=scores.__getitem__) == question["gold"])
    assert 0 < sum(answers) < len(answers)

    capsys.readouterr()
    assert main(["eval", str(exported), "--device", "cpu", "--tasks", str(task), "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["tasks"]["sums"].keys() == {"acc", "acc_stderr"}
    assert report["tasks"]["sums"]["acc"] == pytest.approx(sum(answers) / len(answers))

    assert main(["eval", str(exported), "--device", "cpu", "--tasks", "absent_task"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "Expected tasks that lm-eval can run, got:" in error and "absent_task" in error
