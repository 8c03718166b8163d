"""The benchmark of megatron-core's models: the table, and a run on CPU ranks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lamella_integration.bench_megatron import main, table


def test_losses_are_held_against_the_first_row_of_the_layout() -> None:
    rows = [
        {"layout": "TP 2", "engine": "ddp", "ms": 12.34, "gib": 1.5, "losses": [5.0, 4.0]},
        {"layout": "DP 2", "engine": "ddp", "ms": 10.0, "gib": 2.0, "losses": [5.0, 3.0]},
        {"layout": "TP 2", "engine": "lamella, ZeRO-3", "ms": 11.0, "gib": 1.25, "losses": [5.0, 4.5]},
    ]
    assert table(rows).splitlines()[2:] == [
        "| TP 2 | ddp | 12.3 | 1.50 | 5.0000 | 4.0000 | 0.0000 | 0.0000 |",
        "| DP 2 | ddp | 10.0 | 2.00 | 5.0000 | 3.0000 | 0.0000 | 0.0000 |",
        "| TP 2 | lamella, ZeRO-3 | 11.0 | 1.25 | 5.0000 | 4.5000 | 0.5000 | 0.2500 |",
    ]


def test_too_few_steps_for_a_time_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--engine", "lamella", "--steps", "3"])
    assert "Expected --steps of more than 3, the steps without a time, got 3." in capsys.readouterr().err


@pytest.mark.slow
def test_two_cpu_ranks_train_experts(tmp_path: Path) -> None:
    (tmp_path / "text.md").write_text("Parameters are gathered for their use. " * 20)
    out = tmp_path / "rows.jsonl"
    small = [
        "--device",
        "cpu",
        "--steps",
        "12",
        "--length",
        "64",
        "--layers",
        "2",
        "--hidden",
        "64",
        "--experts",
        "4",
        "--ep",
        "2",
    ]
    torchrun = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = ["-m", "lamella_integration.bench_megatron", "--engine", "lamella", *small]
    subprocess.run([*torchrun, *program, "--data", tmp_path, "--out", out], check=True, timeout=120)
    [row] = map(json.loads, out.read_text().splitlines())
    assert row["layout"] == "EP 2, DP 2"
    assert row["losses"][-1] < row["losses"][0] - 0.3
    subprocess.run([*torchrun, *program, "--data", tmp_path, "--out", out, "--flip-rows"], check=True, timeout=120)
    [_, flipped] = map(json.loads, out.read_text().splitlines())
    assert flipped["engine"] == "lamella, ZeRO-3, rows flipped"
    assert flipped["losses"][0] == pytest.approx(row["losses"][0], abs=1e-3)
    assert flipped["losses"] != row["losses"]
