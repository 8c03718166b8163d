"""On GPUs Transformer Engine's FusedAdam steps over shards as over plain tensors, in the bytes that are said."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from precision_kinds import AWARE, KINDS, NARROW_MAIN, backward, local_of, make_model, make_optimizer, over_copies
from torch import nn

from lamella_testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::Warning")  # of megatron-core and Transformer Engine

NUM_STEPS = 3
ALL_KINDS = {
    **KINDS,
    "moments in 8 bits": (NARROW_MAIN, {**AWARE, "exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8}),
}


def _steps_are_equal(kind: str) -> None:
    ddp, aware = ALL_KINDS[kind]
    model = make_model(ddp, device="cuda")
    optimizer = make_optimizer(model, **aware)
    alone, copies = over_copies(optimizer)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        backward(model)
        for parameter, plain in copies.items():
            if parameter.grad is not None and plain.numel() > 0:
                plain.decoupled_grad = local_of(parameter.grad).clone()  # type: ignore[attr-defined]
        optimizer.step_with_ready_grads()
        alone.step()
        for parameter, plain in copies.items():
            assert torch.equal(local_of(parameter), plain)


def _bytes_are_known(kind: str) -> None:
    ddp, aware = ALL_KINDS[kind]
    warm = make_model(ddp, device="cuda")  # workspaces of libraries are allocated at their first use, and stay
    backward(warm)
    make_optimizer(warm, **aware).step_with_ready_grads()
    del warm
    gc.collect()
    before = torch.cuda.memory_allocated()
    model = make_model(ddp, device="cuda", hidden_size=1024)
    optimizer = make_optimizer(model, **aware)
    backward(model)
    optimizer.step_with_ready_grads()
    gc.collect()
    buffers = sum(buffer.nbytes for buffer in _buffers(model))
    num_allocated = torch.cuda.memory_allocated() - before - buffers
    assert num_allocated == pytest.approx(sum(optimizer.bytes_at_rest().values()), rel=0.01)


def _scale_is_taken_out() -> None:
    model = make_model(NARROW_MAIN, device="cuda")
    optimizer = make_optimizer(model, **AWARE, loss_scale=8.0)
    backward(model)
    scaled = [local_of(p.grad).clone() for p in optimizer.get_parameters() if p.grad is not None]
    assert optimizer.prepare_grads() is False
    gradients = [local_of(p.grad) for p in optimizer.get_parameters() if p.grad is not None]
    assert all(torch.equal(one * 8, other) for one, other in zip(gradients, scaled, strict=True))


def _buffers(model: nn.Module) -> list[Any]:
    return [buffer for buffer in model.buffers() if buffer.is_cuda]


@pytest.mark.gpu1
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_fused_adam_on_one_gpu_steps_as_over_plain_tensors(kind: str) -> None:
    run_ranks(_steps_are_equal, 1, kind, device="cuda")


@pytest.mark.gpu2
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_fused_adam_on_two_gpus_steps_as_over_plain_tensors(kind: str) -> None:
    run_ranks(_steps_are_equal, 2, kind, device="cuda")


@pytest.mark.gpu1
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_fused_adam_on_one_gpu_holds_the_bytes_of_the_formula(kind: str) -> None:
    run_ranks(_bytes_are_known, 1, kind, device="cuda")


@pytest.mark.gpu1
def test_bf16_gradients_are_divided_by_the_loss_scale_on_one_gpu() -> None:
    run_ranks(_scale_is_taken_out, 1, device="cuda")
