"""What a unit costs the host, counted in operators: each is microseconds, whatever the sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from engine_models import units
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from lamella_buffers import Done, Payload, Pending, ReduceOp
from lamella_engine import MixedPrecisionPolicy, fully_shard
from lamella_testing import run_ranks

WIDTH, NUM_PARAMETERS = 256, 8
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


class _Still:
    """A transport of two ranks that moves nothing."""

    rank = 0
    num_ranks = 2

    def all_gather(self, payloads: Sequence[Payload]) -> Pending:
        return Done()

    def reduce_scatter(self, payloads: Sequence[Payload], op: ReduceOp) -> Pending:
        return Done()

    def all_reduce(self, tensors: Sequence[torch.Tensor], op: ReduceOp) -> Pending:
        return Done()


class _Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
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


def _num_operators(model: nn.Module, dtype: torch.dtype) -> int:
    """Of the second step: the first has the units learn their order."""
    for _ in range(2):
        counted = _Counted()
        with counted:
            model(torch.ones(1, WIDTH, dtype=dtype)).float().sum().backward()
        model.zero_grad()
    return counted.num


def _num_sharded(num_units: int) -> int:
    mesh = init_device_mesh("cpu", (2,))
    model = _model(num_units)
    for part in (*model, model):
        fully_shard(part, mesh=mesh, mp_policy=BF16)
    for _, state in units(model):
        for group in state.groups:
            group.transport = _Still()
    return _num_operators(model, torch.float32)


def test_a_unit_costs_a_few_operators_and_two_a_parameter() -> None:
    """Two views: of where its gradient is reduced to, and of the shard's gradient in the main weights' dtype."""

    def check() -> int:
        plain = _num_operators(_model(6).bfloat16(), torch.bfloat16) - _num_operators(
            _model(3).bfloat16(), torch.bfloat16
        )
        return (_num_sharded(6) - _num_sharded(3) - plain) // 3

    for num in run_ranks(check, 2):
        assert num <= 2 * NUM_PARAMETERS + 6
