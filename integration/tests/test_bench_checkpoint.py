"""The benchmark of checkpoints runs on the host, and prints the measurements."""

from pathlib import Path

import pytest
import torch

from lamella_integration.bench_checkpoint import CheckpointBench, CheckpointRow, TrainedState, main, table
from lamella_testing import run_ranks
from lamella_testing.forked_writers import forked_writers


@pytest.mark.filterwarnings("ignore")
def test_every_way_is_measured_on_the_same_state(tmp_path: Path) -> None:
    def measure() -> list[CheckpointRow]:
        return CheckpointBench(TrainedState.build(1, torch.device("cpu")), tmp_path / "a").rows(1)

    with forked_writers():
        rows = run_ranks(measure, 2)[0]
    assert [row.save_s is None for row in rows] == [False, False, False, True, True]
    assert all((row.save_s or row.complete_s or 0) > 0 for row in rows)
    assert all((row.stall_s is None) == (row.call_s is None) == (row.save_s is not None) for row in rows)
    assert all((row.complete_s or 0) > (row.call_s or 0) > 0 for row in rows[3:])
    assert table(rows).count("\n") == 1 + len(rows)
    assert not (tmp_path / "a").exists()


def test_bad_sizes_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--mib", "0", "--folder", str(tmp_path)])
    assert "Expected sizes of at least 1, got 0 for --mib" in capsys.readouterr().err
