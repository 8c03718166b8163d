"""The benchmark of the ready configurations: rows of real runs on CPUs, and refusals before the first run."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from lamella_integration.bench_configurations import main
from lamella_testing.forked_programs import fork_lamella

TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def forked_output_of(command: Sequence[str], timeout: float) -> str:
    """Return the output of `python -m lamella` with arguments, without a start by exec."""
    process = fork_lamella(*command[3:])
    output, errors = process.communicate(timeout=timeout)
    assert process.returncode == 0 and "error" not in errors, errors
    return output


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr("lamella_integration.bench_recipe.output_of", forked_output_of)
    monkeypatch.chdir(Path(__file__).parents[2])  # the configurations are no part of the wheel
    monkeypatch.setattr("sys.argv", ["bench_configurations", *arguments])
    main()


@pytest.fixture
def few_steps(tmp_path: Path) -> list[str]:
    (tmp_path / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    steps = ["--steps", "6", "--num-skipped", "3"]
    return ["--device", "cpu", "--ranks", "1", *steps, "--out", str(tmp_path / "rows.json")]


@pytest.mark.slow  # the same rows from another start
def test_a_row_has_the_losses_of_a_run_of_the_configurations_own_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few_steps: list[str]
) -> None:
    (tmp_path / "text.txt").write_text("Thin layers of shards.\n\n" * 4000, encoding="utf-8")
    call(monkeypatch, "--only", "laptop", *few_steps, "--data", str(tmp_path / "text.txt"))
    (laptop,) = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
    assert laptop["variant"] == "laptop"
    assert len(laptop["losses"]) == 6
    assert laptop["losses"][-1] < laptop["losses"][0]


def test_a_row_has_the_losses_of_a_run_from_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], few_steps: list[str]
) -> None:
    base = ["--base-model", str(tmp_path / "config.json"), "--num-documents", "60", "--sequence-length", "512"]
    small = ["--batch-size", "4", "--accumulation", "2", "--no-compile"]
    call(monkeypatch, "--only", "fine-tune", *few_steps, *base, *small)
    (tuned,) = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
    assert tuned["variant"] == "fine-tune"
    assert len(tuned["losses"]) == 6
    assert tuned["losses"][0] == pytest.approx(6.24, abs=0.1), "drawn weights know nothing of 512 tokens"
    assert tuned["tokens_per_s"] > 0
    assert tuned["peak_gib"] > 0
    first, last = (f"{tuned['losses'][index]:.4f}" for index in (0, -1))
    assert capsys.readouterr().out.rstrip().endswith(f"| {first} | {last} |")


def test_instances_without_ranks_are_refused_before_any_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        call(monkeypatch, "--only", "laptop", "many-hosts", "--ranks", "1")
    assert "many-hosts: Expected --replicate to divide the 1 ranks, got 2." in capsys.readouterr().err
