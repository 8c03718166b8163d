"""`lamella train` as a user runs it: from nothing to a result, run again, asked wrongly."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from lamella import Config
from lamella._data.batches import TokenBatch
from lamella._data.order import BatchStream
from lamella.cli import main
from lamella_testing import run_ranks

Refuse = Callable[..., str]


@pytest.mark.usefixtures("forked_workers")
def test_the_command_trains_and_run_again_resumes(
    options: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*options, "--steps", "3"]) == 0
    first = capfd.readouterr()
    assert "Traceback" not in first.err
    lines = first.out.splitlines()
    assert "[optim]" in lines and "steps = 3" in lines and "ranks = 2" in lines
    assert any(line.startswith("data: 3 files, ") for line in lines)
    step = next(line for line in lines if line.startswith("step: 3  loss: "))
    assert all(word in step for word in ("grad_norm: ", "tokens/s: ", "memory: ", "GiB", "mfu: -"))
    for line, path in zip(
        lines[-5:-1], ["checkpoints/step_00000003", "loss.png", "report.html", "metrics.jsonl"], strict=True
    ):
        assert line.endswith(str(tmp_path / "run" / path)) and (tmp_path / "run" / path).exists()
    assert (tmp_path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert lines[-6].startswith("validation: ") and "% of the first" in lines[-6]
    assert lines[-1] == f'next: lamella export {tmp_path / "run"}, or lamella generate {tmp_path / "run"} "..."'

    assert main([*options, "--steps", "3"]) == 0
    again = capfd.readouterr().out
    assert "Already complete at step 3. Pass --steps M" in again
    assert again.splitlines()[-6:] == lines[-6:]

    assert main([*options, "--steps", "5", "--ranks", "1"]) == 0
    on = capfd.readouterr().out
    assert "resuming: step 3 of 5" in on and "step: 5  loss: " in on
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "loss" in record] == [1, 2, 3, 4, 5]
    report = (tmp_path / "run" / "report.html").read_text()
    assert report.count("resume from step 3") == 1 and "1 rank on cpu" in report


def test_ranks_that_torchrun_started_all_leave_on_bad_input_and_one_says_why(
    options: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun's agent has

    def on_rank() -> int:
        rank = str(dist.get_rank())
        dist.barrier()
        dist.destroy_process_group()  # Ranks read the options before they have a group.
        store_variables = {
            "MASTER_ADDR": store.host,
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        os.environ.update(store_variables, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2")
        return main([*options, "--data", "absent"])

    assert run_ranks(on_rank, 2) == [2, 2]
    expected = "lamella: error: Expected a text file or a folder as --data, got 'absent'"
    assert capfd.readouterr().err.count(expected) == 1


@pytest.fixture
def refuse(
    options: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """Run the command in this process; give the one line with which it refuses before any worker is started."""

    def no_workers(*_: object) -> None:
        raise AssertionError("a worker was started")

    monkeypatch.setattr("lamella._command.train.run_workers", no_workers)

    def refusal(*argv: str) -> str:
        assert main([*options, *argv]) == 2
        output = capsys.readouterr()
        assert output.out == ""
        assert output.err.startswith("lamella: error: Expected ") and output.err.count("\n") == 1
        return output.err

    return refusal


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--data", "absent"], "Expected a text file or a folder as --data, got 'absent', which does not exist."),
        (["--model", ""], "as --model, got ''."),
        (["--model", "llama-smal"], "got 'llama-smal'. Did you mean 'llama-small'?"),
        (["--stepps", "3"], "got '--stepps'. Did you mean '--steps'?"),
        (["--steps", "none"], "Expected --steps to be an integer, got 'none'."),
        (["--model", "owner/large"], "downloaded here: hf download owner/large --local-dir large, then --model large"),
        (["--batch-size", "7"], "multiple of ranks times --accumulation, 2 * 1 = 2, got 7. Pass --batch-size 8."),
        (["--resume"], "Expected a checkpoint to resume in"),
        (["--profile", "4"], "Expected at least 7 steps to go for --profile 4, which begins after 3, got 6."),
        (["--sequence-length", "999999"], "the 'llama' model has (max_position_embeddings), got 999999. Pass --seq"),
        (["--float8-except", "x"], "Expected --float8-except with --float8 only, got x with --float8 no."),
        (
            ["--float8", "row", "--float8-except", "mpl.*"],
            "`except_names` to match a parameter of the modules, got none",
        ),
        (["--float8", "row", "--float8-except", "*"], "Expected matrices in the model's layers for --float8 row and"),
        (["--kernels", "liger", "--compile"], "Expected --kernels liger without --compile, whose inductor fuses"),
        (["--config", "absent.toml"], "Expected a configuration in 'absent.toml', got No such file or directory."),
    ],
)
def test_bad_input_is_one_line_and_no_worker(refuse: Refuse, argv: list[str], expected: str) -> None:
    assert expected in refuse(*argv)


def test_layers_are_not_compiled_without_a_compiler(refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "absent-g++")
    refused = refuse("--compile")
    assert "Expected a compiler for --compile on cpu (CXX, or " in refused
    assert "got none of absent-g++. Install one, or pass --no-compile." in refused


def test_text_that_is_shorter_than_a_sequence_is_refused(refuse: Refuse, model_file: Path) -> None:
    values = json.loads(model_file.read_text())
    model_file.write_text(json.dumps(values | {"max_position_embeddings": 999_999}))
    assert "Expected at least 1000000 tokens to train on, got " in refuse("--sequence-length", "999999")


@pytest.mark.parametrize(
    ("num_gpus", "expected"),
    [(0, "Expected a GPU for --device cuda, got none that torch sees. Pass --device cpu"), (2, "Pass --ranks 2.")],
)
def test_more_ranks_than_gpus_are_refused(
    refuse: Refuse, num_gpus: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: num_gpus)
    assert expected in refuse("--device", "cuda", "--ranks", "3")


def test_a_run_that_has_no_place_is_refused_before_the_text_is_read(
    refuse: Refuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lamella._data.sources.collect", lambda *_: pytest.fail("the text was read"))
    (tmp_path / "file").touch()
    assert "which is a file. Pass another --run-dir." in refuse("--run-dir", str(tmp_path / "file" / "run"))
    monkeypatch.setattr("os.access", lambda *_: False)
    assert "which cannot be written to. Pass another" in refuse("--run-dir", str(tmp_path / "run"))


def test_a_disk_that_is_full_is_one_line(refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "/disk/tokens.pt")

    monkeypatch.setattr("lamella._training.writing.prepare_tokens", full)
    assert "got No space left on device: '/disk/tokens.pt'. Pass another --run-dir." in refuse()


def test_empty_data_is_refused(refuse: Refuse, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    assert "with no text in them" in refuse("--data", str(tmp_path / "empty.txt"))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": None}, "Expected a field 'model_type' in "),
        ({"hidden_size": None}, "Expected a field 'hidden_size' in the model config "),
        ({"num_attention_heads": 3}, "The hidden size (16) is not a multiple of the number of attention heads (3)"),
        ({"hidden_size": "wide"}, "Expected a config that transformers accepts in "),
        ({"model_type": "nonesuch"}, "nonesuch"),
        ({"model_type": "t5"}, "Expected a causal language model that transformers can build, got 't5'"),
        (
            {"vocab_size": 100},
            "Expected a vocabulary of at least 257 tokens (each byte, and the end of a text), got",
        ),
    ],
)
def test_a_model_config_that_cannot_be_trained_is_refused(
    refuse: Refuse, model_file: Path, changes: dict[str, object], expected: str
) -> None:
    values = json.loads(model_file.read_text()) | changes
    model_file.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    assert expected in refuse()


def test_a_model_file_that_is_not_json_is_refused(refuse: Refuse, model_file: Path) -> None:
    model_file.write_text("{")
    assert "Expected a transformers config in " in refuse()


def test_an_adapter_that_is_not_installed_is_named(refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamella._model.spec.find_adapter", lambda model_type: None)
    assert "uv pip install './packages/lamella[qwen]'" in refuse("--model", "qwen3.5-tiny")


@pytest.mark.usefixtures("forked_workers")
def test_some_steps_are_profiled_and_reported_on(
    options: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*options, "--profile", "2", "--validation-interval", "6"]) == 0
    folder = tmp_path / "run" / "profile"
    assert f"profile: {folder}. No GPU kernels" in capfd.readouterr().out
    assert {path.name for path in folder.iterdir()} == {"trace.json.gz", *(f"overlap.{kind}" for kind in KINDS)}

    trace, page, values = (str(tmp_path / name) for name in ("trace.json.gz", "page.html", "values.json"))
    (folder / "trace.json.gz").rename(trace)
    assert main(["overlap-report", trace, "--html", page, "--json", values]) == 0
    assert capfd.readouterr().out == (folder / "overlap.txt").read_text()
    assert Path(page).read_text() == (folder / "overlap.html").read_text()
    report = json.loads(Path(values).read_text())
    assert [step["name"] for step in report["steps"]] == ["ProfilerStep#3", "ProfilerStep#4"]
    units = {unit["unit"]: unit["traffic"] for unit in report["total"]["units"]}
    for unit in ("model.layers.0", "model.layers.1"):
        assert [units[unit][role]["num"] for role in ROLES] == [2, 2, 2]  # in two steps
    assert main(["overlap-report", trace, "--json", "-"]) == 0
    assert json.loads(capfd.readouterr().out) == report


KINDS, ROLES = ("txt", "json", "html"), ("forward_gathers", "backward_gathers", "reduces")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["absent.json"], "Expected what export_chrome_trace() wrote in 'absent.json', got No such file or directory."),
        ([], "The following arguments are required: TRACE. See `lamella overlap-report --help`."),
        (
            ["absent.json", "--hmtl", "x"],
            "Expected an option of `lamella overlap-report`, got '--hmtl'. Did you mean '--html'?",
        ),
    ],
)
def test_a_report_on_nothing_is_refused(argv: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["overlap-report", *argv]) == 2
    assert capsys.readouterr() == ("", f"lamella: error: {expected}\n")


def test_a_report_that_cannot_be_written_is_refused_by_its_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    event = {"ph": "X", "ts": 1, "dur": 2, "pid": 1, "tid": 1, "args": {}}
    unit, operator = ("user_annotation", "FSDP::all_gather (a)"), ("cpu_op", "aten::mm")
    events = [event | {"cat": category, "name": name} for category, name in (unit, operator)]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    assert main(["overlap-report", str(tmp_path / "trace.json"), "--html", str(tmp_path / "absent" / "page.html")]) == 2
    assert "page.html', got No such file or directory." in capsys.readouterr().err


@pytest.fixture
def finished(config: Config, train: Callable[[Config, int], object]) -> Path:
    """A run of the same command, complete."""
    train(config, 1)
    return Path(str(config.run.directory))


def test_the_checkpoint_of_another_model_is_refused_by_the_first_parameters_that_differ(
    refuse: Refuse, finished: Path, model_file: Path
) -> None:
    values = json.loads(model_file.read_text())
    model_file.write_text(json.dumps(values | {"intermediate_size": 44, "num_hidden_layers": 1}))
    message = refuse()
    assert "model.layers.0.mlp.gate_proj.weight: (40, 16) in the checkpoint, (44, 16) here; " in message
    assert "; and " in message and str(finished) in message


def test_a_full_disk_of_a_run_with_a_checkpoint_does_not_begin_it_anew(
    refuse: Refuse, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lamella._training.writing.prepare_tokens", Mock(side_effect=OSError(28, "No space left")))
    error = refuse("--steps", "9")
    assert f"Expected to write the run to {str(finished)!r}, got No space left. Make room, or" in error
    assert error.endswith("then run the same command again to go on from step_00000006.\n")


def test_a_run_is_not_resumed_with_other_data(refuse: Refuse, finished: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    for option, value, expected in [
        ("--sequence-length", "16", "Expected data.sequence_length to stay 32 as in the run to be resumed, got 16."),
        ("--batch-size", "4", "Pass the former value of --batch-size, or"),
        ("--seed", "1", "Expected run.seed to stay 0 "),
        ("--validation-fraction", "0.5", "and the same tokenizer and chat template in --model"),
    ]:
        assert expected in refuse("--steps", "9", option, value)
    assert "Expected no checkpoint in " in refuse("--no-resume")
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before


def test_a_damaged_checkpoint_is_refused_with_the_name_of_the_file(refuse: Refuse, finished: Path) -> None:
    (damaged,) = (finished / "checkpoints" / "step_00000006").glob("*.distcp")
    damaged.write_bytes(damaged.read_bytes()[:100])
    assert str(damaged) in refuse("--steps", "9")


@pytest.mark.usefixtures("forked_workers")
def test_a_worker_that_dies_in_training_is_told_once(
    options: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = BatchStream.batch

    def broken_on_rank_1(stream: BatchStream, step: int, rank: int, num_ranks: int) -> TokenBatch:
        if rank == 1:
            raise RuntimeError("out of luck")
        return batch(stream, step, rank, num_ranks)

    monkeypatch.setattr(BatchStream, "batch", broken_on_rank_1)
    assert main(options) == 1
    errors = capfd.readouterr().err
    assert errors.count("Traceback") == 1 and "RuntimeError: out of luck" in errors
    assert "lamella: error: Rank 1 died, and the others have been stopped." in errors
