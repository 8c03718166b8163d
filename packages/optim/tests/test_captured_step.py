"""`capture_step` without a capture: on the CPU the step runs, with the refusals of a GPU."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from engine_models import Net, inputs, shard, twins
from torch import nn

from lamella_optim import CapturedStep, capture_step
from lamella_testing import run_ranks

NUM_STEPS = 6


class Loop:
    """A model, its optimizer and a step over both, with a count of calls."""

    def __init__(self, model: nn.Module, num_eager_steps: int = 2) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.num_calls = 0
        self.captured = capture_step(self.step, self.optimizer, num_eager_steps=num_eager_steps)

    def step(self, x: torch.Tensor, *, scale: float = 1.0) -> dict[str, torch.Tensor]:
        self.num_calls += 1
        loss = self.model(x).square().mean() * scale
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"loss": loss}


def batches() -> Iterator[torch.Tensor]:
    return (inputs(4, seed=seed) for seed in range(NUM_STEPS))


def assert_refused(loop: Loop, error: type[Exception], message: str, x: Any, **options: float) -> None:
    """Before anything has run."""
    weights = [parameter.clone() for parameter in loop.model.parameters()]
    num_calls = loop.num_calls
    with pytest.raises(error, match=re.escape(message)):
        loop.captured(x, **options)
    assert loop.num_calls == num_calls
    assert all(map(torch.equal, weights, loop.model.parameters()))


def test_a_captured_step_of_a_sharded_model_takes_the_steps_of_the_plain_loop() -> None:
    def train() -> None:
        reference, sharded = twins(apply=shard)
        expected, loop = Loop(reference), Loop(sharded)
        for x in batches():
            loss = loop.captured(x)["loss"]
            torch.testing.assert_close(loss, expected.step(x)["loss"].detach())
        assert loop.num_calls == NUM_STEPS
        assert not loop.captured.is_on_cuda
        assert not loop.captured.is_captured

    run_ranks(train, 2)


def test_outputs_of_a_captured_step_are_detached_copies() -> None:
    state = torch.zeros(3)
    captured = capture_step(lambda: (state, "a name"), Loop(Net()).optimizer)
    for _ in range(5):
        tensor, name = captured()
        tensor += 1
        assert name == "a name"
    assert not state.any()
    assert not Loop(Net()).captured(inputs(4))["loss"].requires_grad


def test_no_batch_is_written_to() -> None:
    loop = Loop(Net())
    batch_list = list(batches())
    for x in batch_list:
        loop.captured(x)
    assert all(map(torch.equal, batch_list, batches()))


@pytest.mark.parametrize("num_before", [1, 4])
def test_changed_inputs_are_refused_before_the_captured_step_runs(num_before: int) -> None:
    loop = Loop(Net())
    for _ in range(num_before):
        loop.captured(inputs(4), scale=2.0)
    assert_refused(loop, ValueError, "to be (4, 3) in torch.float32 in each call, got (5, 3)", inputs(5), scale=2.0)
    assert_refused(loop, ValueError, "got (4, 3) in torch.float64. Pad batches", inputs(4).double(), scale=2.0)
    assert_refused(loop, ValueError, "input 1 of a captured step to be 2.0 in each call, got 3.0", inputs(4), scale=3.0)
    assert_refused(loop, ValueError, "to be called as the first time", inputs(4))


class Batch:
    """Tensors hidden from code unaware of the class."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


@dataclass
class Record:
    x: torch.Tensor


@pytest.mark.parametrize("kind", [Batch, Record])
def test_inputs_that_may_hide_tensors_are_refused_before_the_captured_step_runs(kind: type) -> None:
    loop = Loop(Net())
    assert_refused(loop, ValueError, f"got {kind.__name__}, which may hold tensors", kind(inputs(4)))


def test_dataclass_outputs_of_a_captured_step_are_copied_and_opaque_outputs_refused() -> None:
    state = torch.zeros(3)
    optimizer = Loop(Net()).optimizer
    record = capture_step(lambda: Record(state), optimizer)()
    record.x += 1
    assert not state.any()
    with pytest.raises(ValueError, match="what is returned by a captured step .* got Batch"):
        capture_step(lambda: Batch(state), optimizer)()


def test_a_learning_rate_may_change_before_the_capture_and_not_after_it() -> None:
    loop = Loop(Net())
    [group] = loop.optimizer.param_groups
    for lr in (0.1, 0.2, 0.3):
        group["lr"] = lr
        loop.captured(inputs(4))
    group["lr"] = 0.4
    assert_refused(loop, RuntimeError, "'lr' of param group 0 to stay 0.3 in a captured step, got 0.4", inputs(4))
    group["lr"] = 0.3
    group["momentum"] = 0.9
    assert_refused(loop, RuntimeError, "'momentum' of param group 0 to stay 0", inputs(4))


def test_a_learning_rate_that_is_a_tensor_may_change_and_not_be_replaced() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1))
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)

    def step() -> float:
        optimizer.step()
        return float(optimizer.param_groups[0]["lr"])

    captured = capture_step(step, optimizer, num_eager_steps=1)
    rates = []
    for _ in range(4):
        rates.append(captured())
        scheduler.step()
    assert rates == sorted(set(rates))
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    with pytest.raises(RuntimeError, match=r"'lr' of param group 0 to stay the tensor .* got another Tensor"):
        captured()
    captured.reset()
    captured()


def test_a_loaded_state_of_the_optimizer_is_refused_after_the_capture() -> None:
    loop = Loop(Net(), num_eager_steps=1)
    loop.captured(inputs(4))
    loop.optimizer.load_state_dict(loop.optimizer.state_dict())
    loop.captured(inputs(4))
    loop.optimizer.load_state_dict(loop.optimizer.state_dict())
    assert_refused(loop, RuntimeError, "the state of the SGD that was captured, got another one", inputs(4))
    loop.captured.reset()
    loop.captured(inputs(4))
    loop.optimizer.load_state_dict(loop.optimizer.state_dict())  # That call was eager.
    loop.captured(inputs(4))


def test_nan_is_alike_in_each_call() -> None:
    captured = capture_step(lambda number: number, Loop(Net()).optimizer)
    for _ in range(5):
        captured(float("nan"))
    with pytest.raises(ValueError, match="to be nan in each call, got 1.0"):
        captured(1.0)


def test_a_param_group_added_after_the_capture_is_refused() -> None:
    loop = Loop(Net(), num_eager_steps=1)
    for _ in range(2):
        loop.captured(inputs(4))
    loop.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert_refused(loop, RuntimeError, "Expected the 1 param groups that were captured, got 2", inputs(4))


def test_capture_step_refuses_several_devices_no_eager_steps_and_no_step() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, device="meta"))])
    with pytest.raises(ValueError, match=re.escape("on one device, got ['cpu', 'meta']")):
        capture_step(lambda: None, optimizer)
    with pytest.raises(ValueError, match="`num_eager_steps` of at least 1"):
        capture_step(lambda: None, Loop(Net()).optimizer, num_eager_steps=0)
    with pytest.raises(TypeError, match=r"`num_eager_steps` to be an int, got 1\.5"):
        capture_step(lambda: None, Loop(Net()).optimizer, num_eager_steps=1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="`step` to be a callable of a whole training step, got None"):
        capture_step(None, Loop(Net()).optimizer)  # type: ignore[arg-type]
    assert isinstance(capture_step(lambda: None, Loop(Net()).optimizer), CapturedStep)
