"""State of every form, saved by four ranks, then by two, one and three: bit by bit unchanged."""

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lamella_checkpoint import AsyncSaver, load, save
from lamella_testing import run_ranks
from lamella_testing.tiny import Kit, MakeOptimizer


class Elementwise(torch.optim.Optimizer):
    """An optimizer whose subclasses choose the state of a parameter. Steps by the first tensor of the state."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, param.grad, self.state[param], group["lr"])

    def update(self, param: nn.Parameter, grad: torch.Tensor, state: dict[str, Any], lr: float) -> None:
        raise NotImplementedError


class Lion(Elementwise):
    def update(self, param: nn.Parameter, grad: torch.Tensor, state: dict[str, Any], lr: float) -> None:
        if not state:
            state["exp_avg"] = torch.zeros_like(param)
        param.add_(torch.sign(state["exp_avg"] * 0.9 + grad * 0.1), alpha=-lr)
        state["exp_avg"].mul_(0.99).add_(grad, alpha=0.01)


class Scalars(Elementwise):
    """Numbers of every kind, on the host and as tensors, plain data, and None."""

    def update(self, param: nn.Parameter, grad: torch.Tensor, state: dict[str, Any], lr: float) -> None:
        if not state:
            state |= {"count": 0, "scale": 0.5, "is_warm": False, "name": "a", "betas": (0.9, 0.99), "buffer": None}
            state |= {"step": torch.tensor(0.0), "seen": torch.tensor(0)}
        state["count"] += 1
        state["scale"] *= 1.01
        state["is_warm"] = state["count"] > 1
        state["step"] += 1
        state["seen"] += param.numel()
        param.add_(grad, alpha=-lr * state["scale"])


class Uneven(Elementwise):
    """Keeps more of some parameters than of others, and nothing of some."""

    def update(self, param: nn.Parameter, grad: torch.Tensor, state: dict[str, Any], lr: float) -> None:
        if param.ndim > 1:
            state.setdefault("moment", torch.zeros_like(param)).add_(grad)
        if param.shape[0] > 3:
            state.setdefault("second", torch.zeros_like(param, dtype=torch.float64)).add_(grad.square())
        param.add_(grad, alpha=-lr)


class Factored(Elementwise):
    def update(self, param: nn.Parameter, grad: torch.Tensor, state: dict[str, Any], lr: float) -> None:
        if not state:
            state["columns"] = grad.new_zeros(param.shape[1:]) if param.ndim > 1 else None
            state["rows"] = grad.new_zeros(param.shape[:1])
        if param.ndim > 1:
            state["columns"] += grad.square().sum(0)
        state["rows"] += grad.square().sum(1) if param.ndim > 1 else grad.square()
        param.add_(grad, alpha=-lr)


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "Adam": lambda params: torch.optim.Adam(params, lr=0.05, amsgrad=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05),
    "SGD, momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "Lion": Lion,
    "Scalars": Scalars,
    "Uneven": Uneven,
    "Factored": Factored,
}
CHAIN = [4, 2, 1, 3]


def unsharded(kit: Kit, value: object) -> object:
    return kit.full_copy(value) if isinstance(value, torch.Tensor) else value


def slots(kit: Kit, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        f"{name}/{slot}": unsharded(kit, value)
        for name, param in model.named_parameters()
        for slot, value in optimizer.state.get(param, {}).items()
    }


def are_equal(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and one == other


def test_every_form_of_state_is_resharded_again_and_again(kit: Kit, tmp_path: Path) -> None:
    def pass_on(previous: int | None, num_ranks: int) -> dict[str, dict[str, Any]]:
        states = {}
        for name, make in OPTIMIZERS.items():
            model, optimizer = kit.build(sharded=num_ranks > 1, seed=num_ranks, optimizer=make)
            if previous is None:
                kit.train(model, optimizer)
            else:
                load(tmp_path / f"{name} {previous}", model=model, optimizer=optimizer)
            states[name] = kit.weights(model) | slots(kit, model, optimizer)
            save(tmp_path / f"{name} {num_ranks}", model=model, optimizer=optimizer)
        return states

    expected = run_ranks(pass_on, 4, None, 4)[0]
    assert expected["Factored"]["hidden.weight/columns"].shape == (3,)
    assert expected["Factored"]["head.bias/columns"] is expected["Scalars"]["head.bias/buffer"] is None
    assert "hidden.weight/second" in expected["Uneven"] and "head.bias/moment" not in expected["Uneven"]
    for previous, num_ranks in pairwise(CHAIN):
        for states in run_ranks(pass_on, num_ranks, previous, num_ranks):
            for name, state in states.items():
                assert state.keys() == expected[name].keys()
                different = [key for key in state if not are_equal(state[key], expected[name][key])]
                assert not different, (name, num_ranks, different)


class Nested(Elementwise):
    def update(self, param: nn.Parameter, grad: torch.Tensor, state: dict[str, Any], lr: float) -> None:
        state["inner"] = {"moment": torch.zeros_like(param)}


class Listed(Elementwise):
    def update(self, param: nn.Parameter, grad: torch.Tensor, state: dict[str, Any], lr: float) -> None:
        state["history"] = [torch.zeros_like(param)]


@pytest.mark.parametrize(
    ("make", "text"), [(Nested, "got dict for slot 'inner'"), (Listed, "got list for slot 'history'")]
)
def test_state_in_containers_is_refused_by_name(tmp_path: Path, make: MakeOptimizer, text: str) -> None:
    model = nn.Linear(2, 1)
    optimizer = make(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(NotImplementedError, match=f"{text} of 'weight'"):
        save(tmp_path / "a", model=model, optimizer=optimizer)
    assert list(tmp_path.iterdir()) == []


def test_every_form_of_state_is_saved_in_the_background_too(kit: Kit, tmp_path: Path) -> None:
    with AsyncSaver() as saver:
        for name, make in OPTIMIZERS.items():
            model, optimizer = kit.build(sharded=False, optimizer=make)
            kit.train(model, optimizer)
            expected = slots(kit, model, optimizer)
            saver.save(tmp_path / name, model=model, optimizer=optimizer)
            kit.train(model, optimizer)
            saver.wait()
            load(tmp_path / name, model=model, optimizer=optimizer)
            got = slots(kit, model, optimizer)
            assert got.keys() == expected.keys() and all(are_equal(got[key], expected[key]) for key in got), name
