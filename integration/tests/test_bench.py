"""The benchmark runs here too, on gloo with a tiny model: rows, losses, failures, and what is made of them."""

import json
from pathlib import Path

import pytest
import torch
import torch._dynamo  # The optimizer imports it: once here instead of once a rank.

from lamella_integration.bench import parse_options, run
from lamella_integration.llama import SIZES, Llama, num_flops_per_token
from lamella_integration.report import Failure, Measurement, Report
from lamella_testing import run_ranks


def _run(out: Path, *arguments: str) -> Report:
    options = parse_options(["--device", "cpu", "--size", "tiny", "--tokens", "32", "--out", str(out), *arguments])
    return run_ranks(lambda: run(options, torch.device("cpu")), 2)[0]


def test_backends_that_train_alike_have_equal_losses(tmp_path: Path) -> None:
    report = _run(tmp_path, "--backends", "ideal", "lamella", "fsdp2", "ddp", "--steps", "3", "--warmup", "2")
    rows = report.measurements()
    assert list(rows) == ["ideal", "lamella", "fsdp2", "ddp"]
    assert rows["lamella"].first_loss == rows["fsdp2"].first_loss == rows["ideal"].first_loss
    assert rows["lamella"].last_loss == rows["fsdp2"].last_loss < rows["lamella"].first_loss
    assert report.disagreements() == {}
    assert report.is_sound()
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["rows"]["lamella"]["of_ideal"] == report.ratio_of_ideal("lamella")
    assert (tmp_path / "report.md").read_text() == report.markdown()
    assert (tmp_path / "report.png").stat().st_size > 1000


def test_steps_inside_backward_lose_nothing(tmp_path: Path) -> None:
    rows = _run(tmp_path, "--backends", "lamella", "lamella_step_in_backward", "--steps", "3").measurements()
    ordinary, inside = rows["lamella"], rows["lamella_step_in_backward"]
    assert (inside.first_loss, inside.last_loss) == (ordinary.first_loss, ordinary.last_loss)


def test_a_backend_that_fails_has_its_error_in_its_row_and_the_others_go_on(tmp_path: Path) -> None:
    report = _run(tmp_path, "--backends", "megatron_fsdp", "lamella", "--steps", "1", "--warmup", "1")
    failure = report.rows["megatron_fsdp"]
    assert isinstance(failure, Failure)
    assert "Expected the package megatron-fsdp 0.6.1" in failure.error
    assert isinstance(report.rows["lamella"], Measurement)
    assert not report.is_sound()
    assert "| megatron_fsdp | - |" in report.markdown()


def _measurement(first_loss: float, last_loss: float, *, trained: bool = True, leaked_gib: float = 0.0) -> Measurement:
    return Measurement(
        step_s=0.5,
        tokens_per_s=100.0,
        tflops=494.5,
        peak_allocated_gib=2.0,
        peak_reserved_gib=3.0,
        built_gib=1.0,
        at_rest_gib=1.5,
        first_loss=first_loss,
        last_loss=last_loss,
        trained=trained,
        leaked_gib=leaked_gib,
    )


def test_losses_beyond_their_tolerance_are_flagged_with_both_values() -> None:
    rows = {
        "ideal": _measurement(11.8, 11.8, trained=False),
        "first": _measurement(11.8, 8.0),
        "close": _measurement(11.801, 8.1),
        "wrong": _measurement(11.8, 8.5),
        "other": _measurement(11.9, 8.0),
    }
    report = Report(title="t", environment={}, rows=dict(rows))
    assert report.disagreements() == {
        "wrong": "LOSS DISAGREES: expected a last loss of 8.00000 as first has, got 8.50000",
        "other": "LOSS DISAGREES: expected a first loss of 11.80000 as first has, got 11.90000",
    }
    assert "LOSS DISAGREES" in report.markdown()
    assert not report.is_sound()


def test_a_leak_is_noted() -> None:
    report = Report(title="t", environment={}, rows={"leaky": _measurement(1, 1, leaked_gib=0.5)})
    assert "leaked 0.50 GiB" in report.markdown()


def test_mfu_is_of_989_teraflops() -> None:
    assert _measurement(1, 1).mfu == 0.5


@pytest.mark.parametrize(("size", "numel"), [("8b", 8_030_261_248), ("1b", 1_498_482_688)])
def test_sizes_have_the_parameters_they_are_named_after(size: str, numel: int) -> None:
    with torch.device("meta"):
        model = Llama(SIZES[size])
    assert sum(parameter.numel() for parameter in model.parameters()) == numel


def test_flops_count_matrices_but_the_embedding_and_half_of_the_attention_square() -> None:
    config = SIZES["8b"]
    numel = 8_030_261_248 - config.vocab_size * config.dim - (2 * config.num_layers + 1) * config.dim
    assert num_flops_per_token(config, 4096) == 6 * numel + 12 * config.num_layers * config.dim * 4096 / 2


@pytest.mark.parametrize("arguments", [["--tokens", "0"], ["--backends", "nobody"], ["--reduce", "fp8"]])
def test_bad_options_are_refused_before_any_work(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(arguments)
    assert "error:" in capsys.readouterr().err
