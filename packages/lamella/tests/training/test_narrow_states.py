"""`--states bf16 | int8`: narrow states of AdamW, in checkpoints that go on with any states on any ranks."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from trained_runs import Run, TrainOn

from lamella import Config, OptimConfig
from lamella._training.narrow_states import stored_states, take_states
from lamella._training.optimizer import make_optimizer
from lamella_convert import open_checkpoint
from lamella_engine import fully_shard
from lamella_testing import run_ranks

pytest.importorskip("torchao", reason="an extra of lamella that changes what `import transformers` imports")

NARROW = ("bf16", "int8")


def with_states(config: Config, states: Any, folder: str) -> Config:
    """A run of a model whose embedding and head are long enough for 8-bit states on two ranks."""
    root = Path(str(config.run.directory)).parent
    model = json.loads(Path(config.model.name).read_text(encoding="utf-8")) | {"vocab_size": 512}
    (root / "longer.json").write_text(json.dumps(model), encoding="utf-8")
    return replace(
        config,
        model=replace(config.model, name=str(root / "longer.json")),
        optim=replace(config.optim, states=states),
        run=replace(config.run, directory=str(root / folder), checkpoint_interval=3, log_interval=1),
    )


@pytest.fixture(scope="module")
def wide(shared_config: Config, train: TrainOn) -> Run:
    return train(with_states(shared_config, "fp32", "fp32"), 2)


@pytest.mark.parametrize("states", NARROW)
def test_narrow_adamw_states_train_near_wide_states_and_resume_with_any_states(
    shared_config: Config, wide: Run, train: TrainOn, states: str
) -> None:
    config = with_states(shared_config, states, states)
    run = train(config, 2)
    assert run.losses != wide.losses
    assert run.losses == pytest.approx(wide.losses, rel=1e-3)
    checkpoint = open_checkpoint(run.directory.checkpoints / "step_00000006").raw.tensors
    assert {info.dtype for name, info in checkpoint.items() if "exp_avg" in name} == {torch.float32}

    resumed = train(replace(config, run=replace(config.run, from_step=3)), 2)
    assert resumed.losses == (run.losses if states == "bf16" else pytest.approx(run.losses, rel=1e-4))
    other, num_ranks = {"bf16": ("int8", 4), "int8": ("fp32", 1)}[states]
    config = with_states(shared_config, other, states)
    config = replace(config, run=replace(config.run, from_step=3))
    assert train(config, num_ranks).losses == pytest.approx(run.losses, rel=1e-3)


def _stepped(states: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(64, 256)
    fully_shard(model)
    optimizer = make_optimizer(model, OptimConfig(states=states))
    for _ in range(2):
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def test_states_are_as_narrow_as_asked_and_return_from_fp32() -> None:
    def on_rank() -> None:
        for states in NARROW:
            model, optimizer = _stepped(states)
            state = optimizer.state[model.weight]  # type: ignore[index]
            stored = stored_states(optimizer)
            wide_average = stored.state[model.weight]["exp_avg"].to_local()  # type: ignore[index]
            assert wide_average.dtype == torch.float32 and wide_average.abs().max() > 0
            if states == "bf16":
                assert isinstance(state["exp_avg"], DTensor) and state["exp_avg_sq"].dtype == torch.bfloat16
            else:
                assert state["exp_avg"].codes.dtype == state["exp_avg_sq"].codes.dtype == torch.uint8
                assert state["exp_avg"].scale.numel() == 128 * 64 // 256
            take_states(optimizer, stored)
            again = stored_states(optimizer).state[model.weight]["exp_avg"].to_local()  # type: ignore[index]
            tolerance = 0.0 if states == "bf16" else 0.02 * float(wide_average.abs().max())
            torch.testing.assert_close(again, wide_average, rtol=0.0, atol=tolerance)

    run_ranks(on_rank, 2)


def test_the_state_of_ranks_without_rows_is_empty_and_counts_the_same_steps() -> None:
    def on_rank() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 1), nn.Linear(1, 4))
        fully_shard(model)
        optimizer = make_optimizer(model, OptimConfig(states="bf16"))
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        state = stored_states(optimizer).state
        assert [int(state[parameter]["step"]) for parameter in model.parameters()] == [1] * 4
        numels = [state[parameter]["exp_avg"].to_local().numel() for parameter in model.parameters()]
        assert numels == ([8, 1, 2, 2] if torch.distributed.get_rank() == 0 else [0, 0, 2, 2])

    run_ranks(on_rank, 2)
