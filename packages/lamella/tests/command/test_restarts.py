"""torchrun restarts a run whose rank was killed, and the run ends as if nothing had happened."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from trained_runs import TrainOn

from lamella import Config, ConfigError
from lamella._processes.placement import place
from lamella._record.metrics import StepRecord, read

# Rank 1 is killed in its fifth step, once; without a restart the run would end there.
PROGRAM = """
    import os, signal, sys
    from lamella._training.trainer import Trainer
    step = Trainer._step
    def killed(trainer, number):
        if number == 4 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        return step(trainer, number)
    Trainer._step = killed
    from lamella.__main__ import main
    sys.exit(main())
"""


@pytest.mark.slow
def test_torchrun_restarts_a_run_whose_rank_was_killed_and_losses_are_bit_equal(
    options: list[str], config: Config, train: TrainOn, tmp_path: Path
) -> None:
    unbroken = train(replace(config, run=replace(config.run, directory=str(tmp_path / "unbroken"))), 2)
    program = tmp_path / "program.py"
    program.write_text("\n".join(line[4:] for line in PROGRAM.splitlines()), encoding="utf-8")
    launcher = ["-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    result = subprocess.run(
        [sys.executable, *launcher, str(program), *options, "--checkpoint-interval", "2"],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    assert "resuming: step 4 of 6" in result.stdout
    records = read(tmp_path / "run" / "metrics.jsonl")
    losses = {record.step: record.loss for record in records if isinstance(record, StepRecord)}
    assert losses == unbroken.losses


@pytest.mark.parametrize(("option", "setting"), [("--no-resume", {"resume": False}), ("--from-step", {"from_step": 3})])
def test_options_that_would_count_again_at_each_restart_are_refused(
    config: Config, monkeypatch: pytest.MonkeyPatch, option: str, setting: dict[str, object]
) -> None:
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, text in (variables | {"TORCHELASTIC_MAX_RESTARTS": "3"}).items():
        monkeypatch.setenv(name, text)
    changed = replace(config, run=replace(config.run, **setting))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"Expected no {option} under torchrun --max-restarts, got it"):
        place(changed)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    place(changed)
