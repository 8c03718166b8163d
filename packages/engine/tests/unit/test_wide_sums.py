"""Gradients travel in backward's dtype, and are added up in a wider dtype: the numbers of a wide wire."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from engine_models import Net, case, fsdp, local, mesh_of, no_gradient_sync, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lamella_buffers import GlooTransport
from lamella_engine import DDP, HFSDP, HSDP, ZERO1, ZERO2, ZERO3, MixedPrecisionPolicy, ShardingOptions, fully_shard
from lamella_engine.testing import assert_at_rest, named_units, record, reductions_in
from lamella_layout import Rows
from lamella_testing import run_ranks

pytestmark = pytest.mark.usefixtures("steps_on_shards")

BF16, FP32 = torch.bfloat16, torch.float32
POLICY = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)


class _Scaled(nn.Module):
    """The weight's gradient is the input: numbers of the test's choice. No number of ranks here divides the rows."""

    def __init__(self, num_rows: int = 7) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_rows, 4))
        self.bias = nn.Parameter(torch.ones(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x[:-12].view_as(self.weight)).sum() + (self.bias * x[-12:]).sum()


def _flat(parameter: nn.Parameter) -> Rows:
    return Rows(1)


def _by_column(parameter: nn.Parameter) -> Any:
    return torch.distributed.tensor.Shard(1) if parameter.ndim == 2 else None


LAYOUTS: dict[str, dict[str, Any]] = {
    "even": {},
    "flat": {"options": ShardingOptions(keep_together=_flat)},
    "by_column": {"shard_placement_fn": _by_column},
    "ZERO1": {"options": ShardingOptions(placements=ZERO1)},
    "ZERO2": {"options": ShardingOptions(placements=ZERO2)},
}


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return whole(parameter.grad)


def _drawn(rank: int) -> torch.Tensor:
    """Numbers whose bf16 sums lose most of the fp32 sums."""
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(4 * 7 + 12, generator=generator) * torch.rand(1, generator=generator) * 100).bfloat16()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_gradient_is_the_mean_of_all_ranks_bf16_gradients_taken_in_fp32_in_the_order_of_the_ranks(
    num_ranks: int, layout: str
) -> None:

    def check() -> None:
        model = fully_shard(_Scaled(), mp_policy=POLICY, **LAYOUTS[layout])
        model(_drawn(dist.get_rank())).backward()
        total = torch.zeros(4 * 7 + 12)
        for rank in range(num_ranks):
            total += _drawn(rank)
        expected = total / num_ranks
        gradient = torch.cat([_gradient(parameter).flatten() for parameter in model.parameters()])
        assert torch.equal(gradient, expected)
        exact = torch.stack([_drawn(rank) for rank in range(num_ranks)]).double().mean(0)
        torch.testing.assert_close(gradient.double(), exact, rtol=2**-20, atol=1e-4)

    run_ranks(check, num_ranks)


@pytest.mark.parametrize("reduce_dtype", [BF16, FP32])
def test_gradients_of_1_beside_256_are_lost_in_bf16_sums_and_not_in_fp32_sums(reduce_dtype: torch.dtype) -> None:
    """In bf16 256 + 1 is 256; three ranks' ones beside a 256 are a percent of the sum."""

    def check() -> None:
        model = fully_shard(_Scaled(), mp_policy=MixedPrecisionPolicy(BF16, reduce_dtype))
        model(torch.full((40,), 256.0 if dist.get_rank() == 0 else 1.0)).backward()
        gradient = _gradient(model.weight)
        is_exact = bool((gradient == (256 + 3) / 4).all())
        assert is_exact == (reduce_dtype is FP32)

    run_ranks(check, 4)


def test_a_narrow_reduction_is_added_up_in_the_main_dtype_where_copy_engines_push() -> None:
    """Unless another axis, or a hook, is given the sum. gloo's exchange stands in for theirs."""

    def is_exact(model: Any) -> bool:
        for is_last in (False, True):
            model.set_is_last_backward(is_last)
            model(torch.full((40,), 256.0 if dist.get_rank() == 0 else 1.0)).backward()
        assert model.weight.grad.dtype is FP32
        return bool((whole(model.weight.grad) == 2 * (256 + 3) / 4).all())

    def check() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16)
        shown: list[torch.dtype] = []
        hooked = fully_shard(_Scaled(), mp_policy=policy)
        fsdp(hooked).set_all_reduce_hook(lambda reduced: shown.append(reduced.dtype))
        with patch("lamella_engine._parameters.reduction.CopyEngineTransport", GlooTransport):
            assert is_exact(fully_shard(_Scaled(), mp_policy=policy))
            assert is_exact(fully_shard(_Scaled(), mp_policy=policy, options=ShardingOptions(keep_together=_flat)))
            assert not is_exact(fully_shard(_Scaled(), mesh=mesh, mp_policy=policy))
            assert not is_exact(hooked)
        assert set(shown) == {BF16}
        assert not is_exact(fully_shard(_Scaled(), mp_policy=policy))

    run_ranks(check, 4)


def _step(model: nn.Module, step: int, microbatch: int) -> float:
    generator = torch.Generator().manual_seed(100 * step + 10 * microbatch + dist.get_rank())
    loss = model(torch.randn(3, 3, generator=generator)).float().square().mean()
    loss.backward()
    return float(loss.detach())


def _train(model: Any, reduces_each: bool) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        for microbatch in range(2):
            fsdp(model).set_is_last_backward(microbatch == 1)
            fsdp(model).set_requires_gradient_sync(reduces_each or microbatch == 1)
            losses.append(_step(model, step, microbatch))
        optimizer.step()
        optimizer.zero_grad()
        assert_at_rest(model)
    return losses


SETTINGS: dict[str, tuple[tuple[int, ...], dict[str, Any], Callable[[Any], object]]] = {
    "ZERO3": ((2,), {}, lambda model: None),
    "ZERO1": ((2,), {"options": ShardingOptions(placements=ZERO1)}, lambda model: None),
    "DDP": ((2,), {"options": ShardingOptions(placements=DDP)}, lambda model: None),
    "flat": ((2,), {"options": ShardingOptions(keep_together=_flat)}, lambda model: None),
    "HSDP": ((2, 2), {"options": ShardingOptions(placements=(HSDP, ZERO3))}, lambda model: None),
    "HFSDP": ((2, 2), {"options": ShardingOptions(placements=(HFSDP, ZERO3))}, lambda model: None),
    "sums": ((2,), {}, lambda model: model.set_force_sum_reduction_for_comms(True)),
    "divisor": ((2,), {}, lambda model: model.set_gradient_divide_factor(3.0)),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_training_takes_the_steps_of_a_wide_wire(setting: str) -> None:
    """Bit by bit: sums over two ranks have one order."""
    shape, options, prepare = SETTINGS[setting]

    def check() -> None:
        mesh = mesh_of(shape)

        def trained(reduces_each: bool) -> tuple[list[float], list[torch.Tensor]]:
            torch.manual_seed(0)
            model = Net()
            for module in (*model.layers, model):
                fully_shard(module, mesh=mesh, mp_policy=POLICY, **options)
            prepare(model)
            return _train(model, reduces_each), [local(parameter) for parameter in model.parameters()]

        for reduces_each in (True, False):
            losses, weights = trained(reduces_each)
            with reductions_in(FP32):
                expected_losses, expected_weights = trained(reduces_each)
            with case(f"reduces_each={reduces_each}"):
                assert losses == expected_losses
                for weight, expected in zip(weights, expected_weights, strict=True):
                    assert torch.equal(weight, expected)

    run_ranks(check, math.prod(shape))


def test_bf16_gradients_travel_in_half_the_bytes_and_sums_of_microbatches_in_all() -> None:
    def check() -> None:
        def nbytes(model: Any, *, num_kept: int) -> int:
            log = record(model)
            with no_gradient_sync(model):
                for microbatch in range(num_kept):
                    _step(model, 0, microbatch)
            _step(model, 1, 0)
            return log.nbytes_of("reduce")

        models = [Net(), Net()]
        for model in models:
            for module in (*model.layers, model):
                fully_shard(module, mp_policy=POLICY if model is models[0] else None)
        full = nbytes(models[1], num_kept=0)
        assert nbytes(models[0], num_kept=0) == full // 2
        assert nbytes(models[0], num_kept=1) == full
        assert nbytes(models[0], num_kept=0) == full // 2  # the next step, without sums

    run_ranks(check, 2)


def test_gradients_that_were_dropped_leave_no_sums() -> None:
    def check() -> None:
        model = fully_shard(_Scaled(), mp_policy=POLICY)
        with no_gradient_sync(model):
            model(_drawn(0)).backward()
        model.zero_grad()
        log = record(model)
        model(_drawn(0)).backward()
        assert log.events[-1].dtypes == {BF16}

    run_ranks(check, 2)


def test_ranks_agree_on_the_wire_dtype_where_only_one_rank_has_unreduced_sums() -> None:
    """With copies of the parameters a rank may leave a unit out: no communication follows."""

    def check() -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for module in (*model, model):
            fully_shard(module, mp_policy=POLICY, options=ShardingOptions(placements=ZERO2))
        x = torch.ones(2, 4)
        with torch.no_grad():
            model(x)  # every copy is gathered
        log = record(model)
        with no_gradient_sync(model):
            y = model[0](x)
            (model[1](y) if dist.get_rank() == 0 else y).square().sum().backward()
        model(x).square().sum().backward()
        assert {event.dtypes for event in log.events if event.kind == "reduce"} == {frozenset({FP32})}
        assert_at_rest(model)

    run_ranks(check, 2)  # disagreeing ranks wait for each other


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch has no gradients of other dtypes yet")
def test_gradients_that_autograd_makes_in_fp32_travel_in_fp32() -> None:
    def check() -> None:
        model = fully_shard(_Scaled(), mp_policy=POLICY)
        ((_, unit),) = named_units(model)
        for parameter in unit.parameters.groups[0].parameters:
            parameter.unsharded.grad_dtype = FP32
        log = record(model)
        model(_drawn(0)).backward()
        assert log.events[-1].dtypes == {FP32}

    run_ranks(check, 2)
