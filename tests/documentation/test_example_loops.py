"""The programs of `examples/loops` and the notebook run as their first lines say."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_saver import save

EXAMPLES = Path(__file__).parents[2] / "examples"
LOOPS = EXAMPLES / "loops"


def output_of(*command: str | Path) -> str:
    """Return what a command prints."""
    run = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def losses(num_ranks: int, folder: Path, num_steps: int) -> dict[int, float]:
    """Return the printed losses of the plain loop by step."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    output = output_of(*torchrun, LOOPS / "plain_loop.py", "--folder", folder, "--steps", str(num_steps))
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", output)}


def test_the_plain_loop_goes_on_where_it_stopped(tmp_path: Path) -> None:
    unbroken = losses(2, tmp_path, 20)
    *_, last = sorted(tmp_path.glob("*20"))
    shutil.rmtree(last)
    assert losses(2, tmp_path, 20) == {20: unbroken[20]}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_torch_becomes_a_published_folder(tmp_path: Path) -> None:
    weights = {"model.embed_tokens.weight": torch.randn(8, 4), "model.norm.weight": torch.randn(4)}
    save({"model": weights}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "llama"}')
    program = LOOPS / "dcp_to_hugging_face.py"
    assert output_of(program, tmp_path / "dcp", config, tmp_path / "published").startswith("2 tensors")
    published = load_file(tmp_path / "published" / "model.safetensors")
    assert {name: tensor.float() for name, tensor in published.items()}.keys() == weights.keys()
    torch.testing.assert_close(published, {name: weight.bfloat16() for name, weight in weights.items()})
    assert (tmp_path / "published" / "config.json").read_text() == config.read_text()


def test_the_notebooks_cells_run_one_after_another() -> None:
    notebook = json.loads((EXAMPLES / "one_gpu.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell.get("outputs") for cell in notebook["cells"]), "a notebook is committed without outputs"
    before, after = re.findall(r"loss ([\d.]+) -> ([\d.]+)", output_of("-c", "\n".join(cells)))[0]
    assert float(after) < float(before) / 2
