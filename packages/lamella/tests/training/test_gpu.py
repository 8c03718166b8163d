"""The same command on GPUs: one worker each, bfloat16 compute, NCCL."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from lamella._data.text import collect
from lamella._data.tokenizer import train_tokenizer
from lamella.cli import main

ON_GPUS = [pytest.param(1, marks=pytest.mark.gpu1), pytest.param(2, marks=pytest.mark.gpu2)]
ON_GPUS += [pytest.param(4, marks=pytest.mark.gpu4)]


LAYER_NUMEL = 2720  # Of `TINY_LLAMA`, in 9 tensors.
SLACK_NUMEL = 9 * 256


def losses(root: Path) -> list[float]:
    records = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]


@pytest.mark.parametrize("num_gpus", ON_GPUS)
def test_the_command_trains_and_resumes_with_one_worker_a_gpu(
    options: list[str], tmp_path: Path, num_gpus: int, capfd: pytest.CaptureFixture[str]
) -> None:
    command = [*options, "--device", "cuda", "--ranks", str(num_gpus)]
    assert main([*command, "--steps", "3"]) == 0
    assert main(command) == 0
    output = capfd.readouterr().out
    assert 'precision = "bf16"' in output and "resuming: step 3 of 6" in output
    trained = losses(tmp_path / "run")
    assert len(trained) == 6 and trained[5] < trained[0] - 0.1


@pytest.mark.parametrize("num_gpus", ON_GPUS)
def test_a_folders_weights_are_read_onto_the_gpus(
    options: list[str], tmp_path: Path, text_folder: Path, model_file: Path, num_gpus: int
) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**json.loads(model_file.read_text())))  # type: ignore[no-untyped-call]
    model.save_pretrained(folder := tmp_path / "folder")
    train_tokenizer(collect([str(text_folder)], 0.05).train, 300).tokenizer.save_pretrained(folder)
    command = [*options, "--model", str(folder), "--precision", "fp32", "--lr", "1e-3", "--steps", "3"]
    on_gpus = ["--device", "cuda", "--ranks", str(num_gpus)]
    assert main([*command, "--device", "cpu", "--ranks", "1", "--run-dir", str(tmp_path / "on-the-host")]) == 0
    assert main([*command, *on_gpus, "--run-dir", str(tmp_path / "on-gpus")]) == 0
    assert losses(tmp_path / "on-gpus") == pytest.approx(losses(tmp_path / "on-the-host"), rel=1e-4)


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("num_gpus", ON_GPUS)
def test_adapters_in_bf16_follow_those_in_float32(options: list[str], tmp_path: Path, num_gpus: int, kind: str) -> None:
    adapters = ["--lora-rank", "4", *(["--dora"] if kind == "dora" else [])]
    command = [*options, "--device", "cuda", "--ranks", str(num_gpus), "--lr", "3e-2", *adapters]
    for precision in ("fp32", "bf16"):
        assert main([*command, "--precision", precision, "--run-dir", str(tmp_path / precision)]) == 0
    trained = losses(tmp_path / "fp32")
    assert losses(tmp_path / "bf16") == pytest.approx(trained, rel=1e-2) and trained[5] < trained[0]


@pytest.mark.gpu1
@pytest.mark.parametrize(
    ("layers", "chosen"), [("--no-compile", []), ("--compile", ["--attention", "documents"])], ids=["eager", "compiled"]
)
def test_attention_within_documents_trains_as_attention_with_masks(
    options: list[str], tmp_path: Path, layers: str, chosen: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    pairs = ({"prompt": "def f(x): " * (1 + index % 3), "completion": f"x + {index}"} for index in range(400))
    (tmp_path / "pairs.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
    command = [*options, "--device", "cuda", "--ranks", "1", "--data", str(tmp_path / "pairs.jsonl")]
    command += ["--packing", "documents", "--sequence-length", "64", "--accumulation", "2", layers]
    assert main([*command, "--attention", "sdpa", "--run-dir", str(tmp_path / "sdpa")]) == 0
    assert "attention: documents" not in capfd.readouterr().out
    assert main([*command, *chosen, "--run-dir", str(tmp_path / "documents")]) == 0
    assert "attention: documents" in capfd.readouterr().out
    with_masks = losses(tmp_path / "sdpa")
    assert len(with_masks) == 6 and with_masks[5] < with_masks[0] - 0.1
    assert losses(tmp_path / "documents") == pytest.approx(with_masks, rel=1e-2)  # bfloat16 has 8 bits.


@pytest.mark.parametrize("num_gpus", ON_GPUS[1:])
def test_losses_in_float32_do_not_depend_on_the_number_of_gpus(
    options: list[str], tmp_path: Path, num_gpus: int
) -> None:
    command = [*options, "--device", "cuda", "--precision", "fp32", "--checkpoint-interval", "3"]
    assert main([*command, "--ranks", "1", "--run-dir", str(tmp_path / "one")]) == 0
    assert main([*command, "--ranks", str(num_gpus), "--run-dir", str(tmp_path / "several")]) == 0
    assert losses(tmp_path / "several") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


@pytest.mark.gpu2
@pytest.mark.parametrize("option", ["--tensor-parallel", "--context-parallel"])
def test_two_gpus_with_the_same_sequences_have_the_losses_of_one(
    options: list[str], tmp_path: Path, model_file: Path, option: str
) -> None:
    model_file.write_text(json.dumps({**json.loads(model_file.read_text()), "num_key_value_heads": 2}))
    command = [*options, "--device", "cuda", "--precision", "fp32"]
    assert main([*command, "--ranks", "1", "--run-dir", str(tmp_path / "one")]) == 0
    assert main([*command, "--ranks", "2", option, "2", "--run-dir", str(tmp_path / "two")]) == 0
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


@pytest.mark.gpu2
def test_a_rank_stopped_beside_collectives_on_the_gpu_ends_the_run_and_is_named(
    options: list[str], tmp_path: Path
) -> None:
    command = [*options, "--device", "cuda", "--ranks", "2", "--steps", "100000", "--timeout", "10"]
    with subprocess.Popen(
        [sys.executable, "-m", "lamella", *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        while not (tmp_path / "run" / "metrics.jsonl").exists() or len(losses(tmp_path / "run")) < 5:
            assert run.poll() is None, run.communicate()[0]
            time.sleep(0.1)
        os.kill(process_of_rank(1, run.pid), signal.SIGSTOP)
        output, _ = run.communicate(timeout=120)
    assert run.returncode != 0 and "got no sign of life from rank 1" in output, output


def process_of_rank(rank: int, parent: int) -> int:
    """Return the id of the child process that is a rank of the run."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return next(
        int(child)
        for child in children
        if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
    )


@pytest.mark.parametrize("num_gpus", ON_GPUS[1:])
def test_a_profile_finds_each_units_collectives_on_the_gpu(
    options: list[str], tmp_path: Path, num_gpus: int, capfd: pytest.CaptureFixture[str]
) -> None:
    profiled = ["--profile", "2", "--validation-interval", "6"]
    assert main([*options, "--device", "cuda", "--ranks", str(num_gpus), *profiled]) == 0
    assert "a step (" in next(line for line in capfd.readouterr().out.splitlines() if line.startswith("profile: "))
    report = json.loads((tmp_path / "run" / "profile" / "overlap.json").read_text())
    assert report["on_gpu"] and len(report["steps"]) == 2
    for step in report["steps"]:
        assert step["compute"] + step["exposed"] + step["idle"] == pytest.approx(step["span"])
        assert 0 < step["exposed"] <= step["collectives"] and step["optimizer"] > 0
    units = {unit["unit"]: unit["traffic"] for unit in report["total"]["units"]}
    share = 2 * 2 * (num_gpus - 1) / num_gpus  # two steps in bfloat16
    for layer in ("model.layers.0", "model.layers.1"):
        for role in ("forward_gathers", "backward_gathers", "reduces"):
            traffic = units[layer][role]
            assert traffic["num"] == 2 and 0 <= traffic["exposed"] <= traffic["duration"]
        assert LAYER_NUMEL <= units[layer]["forward_gathers"]["sent_nbytes"] / share <= LAYER_NUMEL + SLACK_NUMEL


@pytest.mark.parametrize("num_gpus", ON_GPUS)
@pytest.mark.parametrize(
    "fit",
    [
        ["--rest", "cpu"],
        ["--recompute", "full", "--offload-activations"],
        ["--recompute", "selective", "--compile"],
        ["--stage", "2"],
        [],
        ["--capture"],
        ["--capture", "--compile", "--checkpoint-interval", "2"],
    ],
    ids=lambda fit: " ".join(fit) or "default",
)
def test_options_that_save_memory_or_time_change_no_loss_on_gpus(
    options: list[str], tmp_path: Path, num_gpus: int, fit: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    command = [*options, "--device", "cuda", "--precision", "fp32", "--ranks", str(num_gpus)]
    assert main([*command, "--no-capture", "--run-dir", str(tmp_path / "without")]) == 0
    assert "CUDA graph" not in capfd.readouterr().out
    assert main([*command, *fit, "--run-dir", str(tmp_path / "with")]) == 0
    is_captured = "--capture" in fit or not fit or (num_gpus == 1 and fit == ["--stage", "2"])
    assert ("steps: one CUDA graph, from the fourth on" in capfd.readouterr().out) == is_captured
    assert losses(tmp_path / "with") == pytest.approx(losses(tmp_path / "without"), rel=1e-4)
