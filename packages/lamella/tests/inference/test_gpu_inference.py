"""A trained model on a GPU, in bf16."""

import json

import pytest
from trained_runs import Run

from lamella.cli import main


@pytest.mark.gpu1
def test_a_gpu_evaluates_as_the_cpu_does_and_generates(trained: Run, capsys: pytest.CaptureFixture[str]) -> None:
    losses = []
    for device in ("cpu", "cuda"):
        capsys.readouterr()
        assert main(["eval", str(trained.directory.root), "--device", device, "--json", "-"]) == 0
        losses.append(json.loads(capsys.readouterr().out)["nats_per_byte"])
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)
    assert main(["generate", str(trained.directory.root), "def", "--max-tokens", "5", "--device", "cuda"]) == 0
    assert capsys.readouterr().out.startswith("def")
