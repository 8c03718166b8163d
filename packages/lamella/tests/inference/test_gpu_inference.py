"""A trained model on a GPU, in bf16."""

import json
from pathlib import Path

import pytest

from lamella.cli import main


@pytest.mark.gpu1
def test_a_gpu_evaluates_as_the_cpu_does_and_generates(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # By the command, whose workers begin without CUDA; a fork of this process may follow a test that used it.
    assert main([*options, "--device", "cpu", "--ranks", "2"]) == 0
    root, losses = str(tmp_path / "run"), []
    for device in ("cpu", "cuda"):
        capsys.readouterr()
        assert main(["eval", root, "--device", device, "--json", "-"]) == 0
        losses.append(json.loads(capsys.readouterr().out)["nats_per_byte"])
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)
    assert main(["generate", root, "def", "--max-tokens", "5", "--device", "cuda"]) == 0
    assert capsys.readouterr().out.startswith("def")
