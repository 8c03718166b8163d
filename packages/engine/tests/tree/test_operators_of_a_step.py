"""A unit's cost for the host, counted in operators and calls: each operator is microseconds, at any size."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from lamella_buffers import Done, Payload, Pending, ReduceOp
from lamella_engine import MixedPrecisionPolicy, fully_shard
from lamella_engine.testing import named_units
from lamella_testing import run_ranks

WIDTH, NUM_PARAMETERS = 256, 8
MOST_CALLS = 600
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


class _StillWork:
    """A transport of two ranks that moves nothing."""

    rank = 0
    num_ranks = 2

    def all_gather(self, payloads: Sequence[Payload]) -> Pending:
        return Done()

    def reduce_scatter(self, payloads: Sequence[Payload], op: ReduceOp) -> Pending:
        return Done()

    def all_reduce(self, tensors: Sequence[torch.Tensor], op: ReduceOp) -> Pending:
        return Done()


class _CountedOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += 1
        return func(*args, **(kwargs or {}))


def _model(num_units: int) -> nn.Sequential:
    def layers() -> list[nn.Module]:
        return [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_PARAMETERS)]

    return nn.Sequential(*(nn.Sequential(*layers()) for _ in range(num_units)))


Count = Callable[[Callable[[], None]], int]  # what a step makes


def _num_operators(step: Callable[[], None]) -> int:
    counted = _CountedOperators()
    with counted:
        step()
    return counted.num


def _num_calls(step: Callable[[], None]) -> int:
    num = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal num
        num += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    return num


def _num_in_third_step(count: Count, model: nn.Module, dtype: torch.dtype) -> int:
    """Count in the third step: in the first two, units learn their order."""

    def step() -> None:
        model(torch.ones(1, WIDTH, dtype=dtype)).float().sum().backward()

    for _ in range(2):
        step()
        model.zero_grad()
    return count(step)


def _num_plain(count: Count, num_units: int) -> int:
    return _num_in_third_step(count, _model(num_units).bfloat16(), torch.bfloat16)


def _num_sharded(count: Count, num_units: int) -> int:
    mesh = init_device_mesh("cpu", (2,))
    model = _model(num_units)
    for part in (*model, model):
        fully_shard(part, mesh=mesh, mp_policy=BF16)
    for _, unit in named_units(model):
        for group in unit.parameters.groups:
            group.transports.shard = _StillWork()
    return _num_in_third_step(count, model, torch.float32)


def _num_a_unit(count: Count) -> float:
    """Above the plain model's."""
    plain, sharded = (of(count, 6) - of(count, 3) for of in (_num_plain, _num_sharded))
    return (sharded - plain) / 3


def test_a_unit_costs_a_few_operators_and_two_a_parameter() -> None:
    """Two views: of the reduction's destination, and of the shard's gradient in the main weights' dtype."""
    for num in run_ranks(lambda: _num_a_unit(_num_operators), 2):
        assert num <= 2 * NUM_PARAMETERS + 6


def test_a_unit_makes_few_calls() -> None:
    """Of Python's functions and C's: 600 with Python 3.11, in which comprehensions are calls, and torch 2.13."""
    for num in run_ranks(lambda: _num_a_unit(_num_calls), 2):
        assert num <= MOST_CALLS
