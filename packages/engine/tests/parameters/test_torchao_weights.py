"""Layers of torchao train by recipes as by their weights' own methods, to the bit, in fewer operators."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lamella_engine import ZERO1, FSDPModule, MixedPrecisionPolicy, ShardingOptions, fully_shard
from lamella_engine.testing import record
from lamella_precision.torchao import replace_quantized_weights
from lamella_testing import run_ranks
from lamella_testing import torchao_weights as torchao

pytestmark = pytest.mark.usefixtures("steps_on_shards")

WIDTH = 12  # rows that 1, 2 and 3 ranks share evenly: torchao's methods know no padding


class _Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += 1
        return func(*args, **(kwargs or {}))


def _sharded(*, replaces: bool, width: int = WIDTH, **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(*[torchao.Float8Linear(width, width) for _ in range(4)]) for _ in range(2)])
    recipe = replace_quantized_weights(model, compute_dtype=torch.float32) if replaces else None
    for module in (*model, model):
        fully_shard(module, mp_policy=MixedPrecisionPolicy(recipe=recipe), **options)
    return model


def _loss(model: nn.Module, step: int, width: int = WIDTH) -> torch.Tensor:
    x = torch.randn(6, width, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    loss: torch.Tensor = model(x).square().mean()
    return loss


def _train(model: nn.Module) -> tuple[list[float], list[tuple[torch.Tensor, torch.Tensor]]]:
    """The losses of five steps, and the gathered data and scales of the last."""
    payloads: list[tuple[torch.Tensor, torch.Tensor]] = []

    def note(module: Any, _: object) -> None:
        weight = module.weight
        assert weight.dtype == torch.float32
        payloads.append((weight._data.view(torch.uint8).clone(), weight._scale.clone()))

    for module in model.modules():
        if isinstance(module, torchao.Float8Linear):
            module.register_forward_pre_hook(note)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for step in range(5):
        payloads.clear()
        loss = _loss(model, step)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, payloads


@pytest.mark.parametrize("options", [{}, {"options": ShardingOptions(placements=ZERO1)}], ids=["zero3", "zero1"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_layers_train_to_the_bit_as_by_their_own_methods(num_ranks: int, options: dict[str, Any]) -> None:
    def check() -> None:
        expected_losses, expected = _train(_sharded(replaces=False))
        losses, payloads = _train(_sharded(replaces=True, **options))
        assert losses == expected_losses and len(set(losses)) == 5
        assert len(payloads) == len(expected) == 8
        for (data, scale), (expected_data, expected_scale) in zip(payloads, expected, strict=True):
            assert torch.equal(data, expected_data) and torch.equal(scale, expected_scale)

    run_ranks(check, num_ranks)


def test_rows_that_ranks_share_unevenly_are_gathered_whole() -> None:
    def check() -> None:
        model = _sharded(replaces=True, width=7)
        weights = [
            torchao.WeightWithDynamicFloat8CastTensor(cast(DTensor, p).full_tensor(), (), torch.float8_e4m3fn)
            for p in model[0].parameters()
        ]
        cast(FSDPModule, model[0]).unshard()
        for gathered, weight in zip(model[0].parameters(), weights, strict=True):
            (data,), (scale,) = weight.fsdp_pre_all_gather(None)
            gathered_weight: Any = gathered
            assert torch.equal(gathered_weight._data.view(torch.uint8), data.view(torch.uint8))
            assert torch.equal(gathered_weight._scale, scale)

    run_ranks(check, 3)


def test_a_unit_takes_fewer_operators_and_all_units_one_reduction() -> None:
    def check() -> None:
        counts = []
        for replaces in (False, True):
            model = _sharded(replaces=replaces)
            for step in range(2):
                _loss(model, step).backward()  # type: ignore[no-untyped-call]
            log = record(model)
            with _Count() as count:
                _loss(model, 2).backward()  # type: ignore[no-untyped-call]
            counts.append(count.num)
        assert [event.kind for event in log.events].count("all-reduce") == 1
        assert counts[1] < 0.8 * counts[0]

    run_ranks(check, 2)
