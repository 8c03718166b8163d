"""A Mamba2 model of mamba-ssm with 130 million parameters trains, and resumes, in the smallest units as without."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from lamella_engine import MixedPrecisionPolicy, fully_shard_model, plan_units
from lamella_mamba import declare_direct_reads, keep_fp32
from lamella_testing import run_ranks

pytestmark = [pytest.mark.ssm, pytest.mark.filterwarnings("ignore::Warning")]  # of mamba-ssm and Triton

BATCH, LENGTH, VOCABULARY = 4, 512, 50277
NUM_STEPS = 50
TIMEOUT_S = 480.0  # Triton compiles the kernels of the first step for minutes


def _make() -> nn.Module:
    """The published model of this size, in fp32. Effects: turns deterministic algorithms on, in the rank."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS refuses deterministic mode without it
    torch.use_deterministic_algorithms(True)
    importlib.import_module("mamba_ssm.utils.determinism").set_deterministic_mode(True)
    config = importlib.import_module("mamba_ssm.models.config_mamba").MambaConfig
    model = importlib.import_module("mamba_ssm.models.mixer_seq_simple").MambaLMHeadModel
    torch.manual_seed(0)
    built: nn.Module = model(
        config(d_model=768, n_layer=24, vocab_size=VOCABULARY, ssm_cfg={"layer": "Mamba2"}), device="cuda"
    )
    return built


def _loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1]).logits.float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _losses(step: Callable[[torch.Tensor], torch.Tensor], steps: range) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    batches = torch.randint(VOCABULARY, (2, BATCH, LENGTH + 1), generator=generator).cuda()
    return [step(batches[i % 2]).item() for i in steps]


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-4)


def _without_units(num_steps: int) -> list[float]:
    """Train a bf16 copy of fp32 main weights, which is made anew before each step."""
    model = _make()
    main = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
    dtype_of = keep_fp32(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype_of(parameter) or torch.bfloat16)
    optimizer = _optimizer(main.values())

    def step(tokens: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(main[name])
        loss = _loss(model, tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            main[name].grad = parameter.grad.float()
        optimizer.step()
        return loss.detach()

    return _losses(step, range(num_steps))


def _in_units(steps: range, read: Path | None = None, write: Path | None = None) -> list[float]:
    """Train in the smallest units, in bf16 with fp32 main weights, `A_log`, `D` and `dt_bias`.

    Reads a checkpoint of weights and moments from `read` before the first of `steps`, writes one to `write` after the
    last.
    """
    model = _make()
    declare_direct_reads(model)
    policy = MixedPrecisionPolicy(
        torch.bfloat16, torch.float32, param_dtype_override_fn=keep_fp32(model), cast_forward_inputs=False
    )
    assert len(plan_units(model, units=1).units) > 24  # a unit for each input projection, beside the outermost
    fully_shard_model(model, units=1, mp_policy=policy, verbose=False)
    optimizer = _optimizer(model.parameters())

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = _loss(model, tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    if read is not None:
        state = _state(model, optimizer)
        state_dict_loader.load(state, checkpoint_id=read)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    losses = _losses(step, steps)
    if write is not None:
        state_dict_saver.save(_state(model, optimizer), checkpoint_id=write)
    return losses


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def test_the_smallest_units_train_and_resume_on_the_fused_path_as_no_units_do(tmp_path: Path) -> None:
    [expected] = run_ranks(_without_units, 1, NUM_STEPS, device="cuda", timeout_s=TIMEOUT_S)
    assert expected[-1] < expected[0] - 1.0, f"nothing was learned: {expected}"
    [losses] = run_ranks(_in_units, 1, range(NUM_STEPS), device="cuda", timeout_s=TIMEOUT_S)
    assert losses == expected
    # A run of half the steps, and another process that goes on from its checkpoint.
    half = NUM_STEPS // 2
    [first] = run_ranks(_in_units, 1, range(half), None, tmp_path, device="cuda", timeout_s=TIMEOUT_S)
    [second] = run_ranks(_in_units, 1, range(half, NUM_STEPS), tmp_path, device="cuda", timeout_s=TIMEOUT_S)
    assert first + second == expected


def test_fsdp2_fails_in_the_same_units() -> None:
    def on_one_gpu() -> None:
        model = _make()
        for module in list(model.modules()):
            if next(module.children(), None) is None and next(module.parameters(), None) is not None:
                torch_fully_shard(module)
        torch_fully_shard(model)
        # The kernels get DTensors, whose memory is no address of the GPU.
        with pytest.raises(Exception, match=r"CUDA error|DTensor"):
            _losses(lambda tokens: _loss(model, tokens), range(1))

    run_ranks(on_one_gpu, 1, device="cuda", timeout_s=TIMEOUT_S)
