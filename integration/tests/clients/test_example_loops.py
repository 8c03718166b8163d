"""The programs of `examples/loops` that train by a client's own loop run, and learn."""

import re
import subprocess
import sys
from pathlib import Path

LOOPS = Path(__file__).parents[3] / "examples" / "loops"


def _losses(*command: str | Path) -> list[float]:
    run = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", run.stdout)]


def test_accelerate_trains_on_lamellas_engine(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    first, last = _losses(*torchrun, LOOPS / "accelerate_loop.py", "--folder", tmp_path)
    assert last < first
    assert any(tmp_path.rglob("*.distcp"))


def test_lightning_trains_a_module_that_shards_itself(tmp_path: Path) -> None:
    [last] = _losses(LOOPS / "lightning_trainer.py", "--folder", tmp_path)
    assert last < 0.1
