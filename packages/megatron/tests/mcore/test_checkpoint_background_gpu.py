"""On a GPU too, steps during a save in the background leave the files of a blocking save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from background import FORMATS, assert_same_files, save_thrice
from precision_kinds import KINDS, backward, make_model, make_optimizer

from lamella_megatron import fully_shard_model
from lamella_testing import run_ranks
from lamella_testing.megatron_parity import Layout
from lamella_testing.megatron_parity import make_model as make_gpt

pytestmark = pytest.mark.filterwarnings("ignore::Warning")  # of megatron-core and Transformer Engine


def _adamw(layout: Layout, path: Path, written: Any, fused: bool) -> None:
    model = fully_shard_model(make_gpt("gpt", layout, hidden_size=256).to("cuda"))
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)

    def steps() -> None:
        for _ in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.sin(100 * parameter.detach())
            optimizer.step()

    steps()
    save_thrice(path, steps, model=model, optimizer=optimizer, format=written)


def _fused_adam(path: Path, written: Any, kind: str) -> None:
    ddp, aware = KINDS[kind]
    model = make_model(ddp, device="cuda")
    optimizer = make_optimizer(model, **aware)

    def steps() -> None:
        for _ in range(3):
            optimizer.zero_grad()
            backward(model)
            optimizer.step_with_ready_grads()

    steps()
    save_thrice(path, steps, model=model.module, optimizer=optimizer.optimizer, format=written)


@pytest.mark.gpu1
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("written", FORMATS)
def test_steps_on_a_gpu_leave_the_saved_state(tmp_path: Path, written: str, fused: bool) -> None:
    run_ranks(_adamw, 1, Layout(num_ranks=1), tmp_path, written, fused, device="cuda")
    assert_same_files(tmp_path)


@pytest.mark.gpu1
@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_fused_adam_leave_the_saved_state(tmp_path: Path, kind: str) -> None:
    run_ranks(_fused_adam, 1, tmp_path, "fsdp_dtensor", kind, device="cuda")
    assert_same_files(tmp_path)


@pytest.mark.gpu2
@pytest.mark.parametrize("written", FORMATS)
def test_steps_on_two_gpus_leave_the_saved_state(tmp_path: Path, written: str) -> None:
    run_ranks(_adamw, 2, Layout(num_ranks=2, tp=2), tmp_path, written, False, device="cuda")
    assert_same_files(tmp_path)
