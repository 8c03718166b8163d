"""The programs of `examples/loops` that train by a client's own loop run, and learn."""

import re
import subprocess
import sys
from pathlib import Path

LOOPS = Path(__file__).parents[3] / "examples" / "loops"
# Without GPUs Accelerate replicates the model, and no test of this session has GPUs.
ON_CPUS = """
import runpy, sys
from torch.distributed import init_process_group
from lamella_integration.tool_models import let_accelerate_shard_on_cpus
init_process_group("gloo")
let_accelerate_shard_on_cpus()
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def _run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)


def _losses(*command: str | Path) -> list[float]:
    run = _run(*command)
    assert run.returncode == 0, run.stdout + run.stderr
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", run.stdout)]


def test_accelerate_trains_on_lamellas_engine(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python", sys.executable]
    first, last = _losses(*torchrun, "-c", ON_CPUS, LOOPS / "accelerate_loop.py", "--folder", tmp_path)
    assert last < first
    assert any(tmp_path.rglob("*.distcp"))


def test_accelerates_program_refuses_ranks_that_accelerate_replicates_on(tmp_path: Path) -> None:
    run = _run(LOOPS / "accelerate_loop.py", "--folder", tmp_path)
    assert run.returncode == 2
    assert "Expected ranks that Accelerate shards over, started by torchrun on GPUs, got 1 of kind NO" in run.stderr


def test_lightning_trains_a_module_that_shards_itself(tmp_path: Path) -> None:
    [last] = _losses(LOOPS / "lightning_trainer.py", "--folder", tmp_path)
    assert last < 0.1
