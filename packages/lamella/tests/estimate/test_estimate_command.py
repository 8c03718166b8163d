"""`lamella estimate` changes nothing on the disk, and chooses options by memory; a run out of memory prints both."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import TINY_LLAMA
from layer_units import shard_layers
from torch import nn

import lamella
from lamella import ConfigError
from lamella._command.estimate import placed
from lamella._command.out_of_memory import with_estimate
from lamella._estimate.host_times import IDLE_HOST
from lamella._estimate.memory_options import MemoryOptions
from lamella._estimate.recorded_options import RecordedOptions
from lamella._estimate.text import lines
from lamella._processes.launch import WorkerError
from lamella._settings.config import resolve
from lamella._settings.sizes import size
from lamella.cli import main


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY_LLAMA))
    return path


def config_of(model: Path, **parallel: object) -> lamella.Config:
    return placed(
        resolve(
            {
                "model": {"name": str(model)},
                "data": {"sequence_length": 512},
                "optim": {"batch_size": 64},
                "parallel": {"ranks": 8, **parallel},
            }
        )
    )


def test_the_command_prints_and_writes_the_files_of_its_options_alone(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    svg = tmp_path / "step.svg"
    assert main(["estimate", str(model), "--ranks", "1024", "--batch-size", "1024", "--svg", str(svg)]) == 0
    text = capsys.readouterr().out
    assert "rank 0 of 1024" in text
    assert "optimizer state" in text
    assert svg.read_text().startswith("<svg")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "step.svg"]


def test_a_rank_past_the_ranks_is_refused(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", str(model), "--rank", "4", "--ranks", "4"]) == 2
    expected = "Expected --rank from 0 to 3, below --ranks 4, got 4. Pass another --rank, or more --ranks."
    assert capsys.readouterr().err == f"lamella: error: {expected}\n"


def test_a_size_below_a_hundredth_of_a_mib_is_in_bytes() -> None:
    assert [size(nbytes) for nbytes in (0, 1024, 20480)] == ["0.00 MiB", "1,024 bytes", "0.02 MiB"]


@pytest.mark.usefixtures("estimated_once")
def test_options_are_refused_where_none_fit_and_else_the_fastest_that_fit(model: Path) -> None:
    config = config_of(model)
    with pytest.raises(ConfigError, match=r"Expected --memory of at least 0.\d\dGiB, which .* got 1.00 MiB") as refused:
        lamella.fit_options(config, "1MiB")
    lamella.fit_options(config, str(refused.value).split(" at least ")[1].split(",")[0])
    options = lamella.fit_options(config, "80GB")
    assert options.memory_nbytes == 80 * 10**9
    assert options.chosen.fields.is_plain and options.chosen.cost <= 1.01
    totals = sorted(alternative.estimate.needed_nbytes for alternative in options.alternatives)
    assert totals[0] < totals[-1]
    budget = (totals[0] + totals[-1]) // 2
    tight = lamella.fit_options(config, f"{budget}")
    fitting = [one for one in tight.alternatives if one.estimate.needed_nbytes <= budget]
    equals = [one for one in fitting if one.cost <= 1.01 * fitting[0].cost]
    assert tight.chosen is min(equals, key=lambda one: one.estimate.needed_nbytes)
    assert any("->" in line for line in tight.lines())


def test_times_follow_the_work_of_the_step(model: Path) -> None:
    """A forward is a third of a step's products; of a wide model, most of the time of a step."""
    values = {**TINY_LLAMA, "hidden_size": 4096, "intermediate_size": 16384, "num_attention_heads": 32}
    model.write_text(json.dumps(values))
    recorded = RecordedOptions(config_of(model), IDLE_HOST)
    none, selective, full = (recorded.seconds(MemoryOptions(recompute=kind)) for kind in ("no", "selective", "full"))
    assert none < selective < full
    assert 1.15 < full / none < 1.4
    half = recorded.seconds(MemoryOptions(recompute="full", num_recomputed=1))
    assert none < half < full
    assert recorded.seconds(MemoryOptions(weights="stage 2")) <= none
    assert recorded.seconds(MemoryOptions(offload_activations=True)) > full


def test_a_long_run_on_gpus_is_estimated_as_compiled(model: Path) -> None:
    config = config_of(model, device="cuda")
    long = replace(config, optim=replace(config.optim, steps=1000))
    compiled, eager = lamella.estimate(long), lamella.estimate(config)
    assert any("--no-compile" in note for note in compiled.notes)
    assert not eager.notes
    assert compiled.allocated_nbytes < eager.allocated_nbytes
    recomputed = replace(long, parallel=replace(long.parallel, recompute="full"))
    assert any("upper bound" in note for note in lamella.estimate(recomputed).notes)


def test_a_run_out_of_memory_prints_the_estimate_and_two_options(model: Path) -> None:
    other = WorkerError(1, "ValueError: no")
    config = config_of(model)
    assert with_estimate(other, config) is other
    error = with_estimate(WorkerError(0, "torch.OutOfMemoryError: CUDA out of memory. 70 GiB is allocated"), config)
    assert "70 GiB is allocated" in str(error)
    assert "estimate:" in str(error)
    assert str(error).count("with --") == 2


def test_a_run_out_of_memory_without_an_estimate_prints_why(model: Path) -> None:
    config = config_of(model)
    config = replace(config, model=replace(config.model, attention="documents"))
    error = with_estimate(WorkerError(0, "torch.OutOfMemoryError: 70 GiB is allocated"), config)
    assert "70 GiB is allocated\nno estimate: Expected an estimate with --attention auto" in str(error)


def test_a_module_is_estimated_by_functions_of_its_own() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))

    estimate = lamella.estimate(
        model,
        shard=shard_layers,
        loss=lambda module: module(torch.zeros(8, 64)).sum(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        mesh=(4,),
    )
    share = 3 * 64 * 64 * 4 // 4
    assert estimate.at_rest == {"main weights": share, "optimizer state": share, "libraries": 64 << 20}
    assert estimate.peak.nbytes > 2 * share
    assert any("rank 0 of 4" in line for line in lines(estimate))
    with pytest.raises(TypeError, match="Expected a Config or an nn.Module to estimate, got int"):
        lamella.estimate(3)
