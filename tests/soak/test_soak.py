"""Properties that only time shows: memory that creeps, and runs that are interrupted again and again."""

import gc
import json
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch._dynamo  # Imported once in the parent: every optimizer imports torch._dynamo, in each forked rank.
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lamella_engine import fully_shard
from lamella_testing import run_ranks

pytestmark = pytest.mark.slow

NUM_STEPS = 60
TRAIN = [
    *(sys.executable, "-m", "lamella", "train", "--device", "cpu", "--ranks", "2", "--steps", str(NUM_STEPS)),
    *("--sequence-length", "64", "--batch-size", "4", "--checkpoint-interval", "5", "--validation-interval", "20"),
    *("--log-interval", "1"),
]


def _resident_nbytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _num_live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(candidate), torch.Tensor) for candidate in gc.get_objects())


def _train_and_measure(num_steps: int) -> tuple[int, int]:
    """Train `num_steps` twice; how many more bytes and tensors are alive after the second time."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))  # The default mesh takes the machine's GPUs, if any.
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    measured = []
    for _ in range(2):
        for _ in range(num_steps):
            model(torch.randn(8, 64)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        measured.append((_resident_nbytes(), _num_live_tensors()))
    (nbytes, num_tensors), (later_nbytes, later_num_tensors) = measured
    return later_nbytes - nbytes, later_num_tensors - num_tensors


def test_thousands_of_steps_leave_memory_unchanged() -> None:
    for grown_nbytes, num_new_tensors in run_ranks(_train_and_measure, 2, 1500, timeout_s=1800):
        assert num_new_tensors == 0
        # One leaked gradient of 16 KiB a step would be 23 MiB.
        assert grown_nbytes < 4 << 20


def _losses(run: Path) -> dict[int, float]:
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def _text(folder: Path) -> Path:
    """A few hundred kilobytes of text, equal on every machine."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(400)]
    for index in range(20):
        (folder / f"{index}.txt").write_text(" ".join(draw.choices(words, k=3000)))
    return folder


def test_a_run_that_is_killed_again_and_again_ends_where_an_undisturbed_one_does(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    command = [*TRAIN, "--data", str(_text(tmp_path / "text")), "--run-dir"]
    calm, disturbed = tmp_path / "calm", tmp_path / "disturbed"
    subprocess.run([*command, str(calm)], check=True, stdin=subprocess.DEVNULL)

    draw = random.Random(0)
    targets = [draw.randrange(step, step + 8) for step in range(6, NUM_STEPS - 10, 12)]
    for step in targets:
        run = subprocess.Popen([*command, str(disturbed)], stdin=subprocess.DEVNULL)
        _kill_at(step, run, disturbed)
    subprocess.run([*command, str(disturbed)], check=True, stdin=subprocess.DEVNULL)
    assert _losses(disturbed) == pytest.approx(_losses(calm), rel=1e-6)


def _kill_at(step: int, run: "subprocess.Popen[bytes]", folder: Path) -> None:
    while run.poll() is None and step not in _losses(folder):
        time.sleep(0.01)
    assert run.poll() is None, f"the run ended before step {step}, with exit code {run.returncode}"
    run.send_signal(signal.SIGKILL)
    run.wait()
