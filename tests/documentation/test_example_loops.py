"""The programs of `examples/loops` and the notebook run as their first lines say."""

import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch._dynamo  # Every optimizer imports torch._dynamo: imported once here, instead of once a rank.
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_saver import save

import lamella_checkpoint  # noqa: F401  once in the parent, not in every forked rank.
from lamella_testing import run_ranks
from lamella_testing.forked_writers import forked_writers

EXAMPLES = Path(__file__).parents[2] / "examples"
LOOPS = EXAMPLES / "loops"


def output_of(*command: str | Path) -> str:
    """Return what a command prints."""
    run = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def losses(output: str) -> dict[int, float]:
    """Return the printed losses by step."""
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", output)}


def test_the_plain_loop_example_resumes_at_its_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    program = [str(LOOPS / "plain_loop.py"), "--folder", str(tmp_path), "--steps", "20"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    unbroken = losses(output_of(*torchrun, *program))
    *_, last = sorted(tmp_path.glob("*20"))
    shutil.rmtree(last)

    def resume() -> None:
        monkeypatch.setenv("LOCAL_RANK", str(dist.get_rank()))
        for name in ("init_process_group", "destroy_process_group"):  # A forked rank has a group.
            monkeypatch.setattr(dist, name, lambda: None)
        runpy.run_path(program[0], run_name="__main__")

    monkeypatch.setattr(sys, "argv", program)
    with forked_writers():
        run_ranks(resume, 2)
    assert losses(capfd.readouterr().out) == {20: unbroken[20]}


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
    # A notebook's process goes on. At its end a thread of torch may want the interpreter: an abort (pytorch PR 179291).
    cells.append("import sys; sys.stdout.flush(); os._exit(0)")
    before, after = re.findall(r"loss ([\d.]+) -> ([\d.]+)", output_of("-c", "\n".join(cells)))[0]
    assert float(after) < float(before) / 2
