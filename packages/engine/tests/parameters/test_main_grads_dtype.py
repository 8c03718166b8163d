"""Sharded gradients in another dtype than the main weights' (`MixedPrecisionPolicy.main_grads_dtype`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_models import Net, fsdp, inputs, mesh_of, rows_of_this_rank, twins, whole
from torch import nn
from torch.distributed.tensor import DTensor

from lamella_engine import (
    DDP,
    HSDP,
    ZERO1,
    ZERO2,
    ZERO3,
    AxisPlacement,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    Rows,
    ShardingOptions,
    fully_shard,
    parameter_norms,
)
from lamella_testing import run_ranks

BF16, FP32 = torch.bfloat16, torch.float32
POLICY = MixedPrecisionPolicy(BF16, FP32, main_grads_dtype=BF16)
Options = dict[str, Any]

STAGES: dict[str, tuple[tuple[int, ...], Any]] = {
    "DDP": ((2,), DDP),
    "ZeRO-1": ((2,), ZERO1),
    "ZeRO-2": ((2,), ZERO2),
    "ZeRO-3": ((2,), ZERO3),
    "HSDP": ((2, 2), (HSDP, ZERO3)),
}


def _shard(model: Net, policy: MixedPrecisionPolicy, **options: Any) -> Net:
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy, **options)
    return fully_shard(model, mp_policy=policy, **options)


def _pair(**options: Any) -> tuple[nn.Module, nn.Module]:
    """The same model with gradients in fp32, and in bf16."""
    (_, wide), (_, narrow) = (
        twins(Net, lambda model, policy=policy: _shard(model, policy, **options))
        for policy in (MixedPrecisionPolicy(BF16, FP32), POLICY)
    )
    return wide, narrow


def _backward(model: nn.Module, *, num_microbatches: int = 1) -> None:
    for i, rows in enumerate(inputs().chunk(num_microbatches)):
        fsdp(model).set_is_last_backward(i == num_microbatches - 1)
        model(rows_of_this_rank(rows)).float().square().mean().backward()


def _gradients(model: nn.Module) -> dict[str, DTensor]:
    gradients = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor), name
        gradients[name] = parameter.grad
    return gradients


def _assert_rounded(wide: nn.Module, narrow: nn.Module) -> None:
    expected = _gradients(wide)
    for name, gradient in _gradients(narrow).items():
        assert gradient.dtype == gradient.to_local().dtype == BF16, name
        assert torch.equal(whole(gradient), whole(expected[name]).to(BF16)), name
    assert all(parameter.dtype == FP32 for parameter in narrow.parameters())


@pytest.mark.parametrize("stage", STAGES)
def test_a_sum_of_ranks_is_rounded_once(stage: str) -> None:
    shape, placements = STAGES[stage]

    def check() -> None:
        options = {"mesh": mesh_of(shape), "options": ShardingOptions(placements=placements)}
        wide, narrow = _pair(**options)
        for model in (wide, narrow):
            _backward(model)
        _assert_rounded(wide, narrow)

    run_ranks(check, 4 if len(shape) == 2 else 2)


def test_a_flat_layout_rounds_once() -> None:
    def check() -> None:
        wide, narrow = _pair(options=ShardingOptions(keep_together=Rows(1)))
        for model in (wide, narrow):
            _backward(model)
        _assert_rounded(wide, narrow)

    run_ranks(check, 2)


def test_gradients_of_offloaded_shards_are_rounded_on_the_device() -> None:
    def check() -> None:
        wide, narrow = _pair(offload_policy=CPUOffloadPolicy(pin_memory=False))
        for model in (wide, narrow):
            _backward(model)
        _assert_rounded(wide, narrow)

    run_ranks(check, 2)


@pytest.mark.parametrize(("stage", "num_roundings"), [(ZERO1, 1), (ZERO3, 3)], ids=["ZeRO-1", "ZeRO-3"])
def test_gradients_are_rounded_to_main_grads_dtype_at_each_reduction(stage: AxisPlacement, num_roundings: int) -> None:
    """ZeRO-1 reduces the fp32 sum of microbatches once; ZeRO-3 adds each reduction to a sharded gradient in bf16."""

    def check() -> None:
        model = fully_shard(nn.Linear(2, 2, bias=False), mp_policy=POLICY, options=ShardingOptions(placements=stage))
        for i, size in enumerate((1.0, 2**-8, 2**-8)):  # half of the distance to the next number after 1 in bf16
            fsdp(model).set_is_last_backward(i == 2)
            model(torch.full((1, 2), size)).sum().backward()
        total = 1 + 2**-7 if num_roundings == 1 else 1.0
        assert model.weight.grad is not None
        assert torch.equal(whole(model.weight.grad), torch.full((2, 2), total, dtype=BF16))

    run_ranks(check, 2)


def test_a_step_holds_half_the_gradient_bytes() -> None:
    def check() -> None:
        wide, narrow = _pair()
        gradient_nbytes = []
        for model in (wide, narrow):
            _backward(model)
            storages = {g.to_local().untyped_storage().data_ptr(): g.to_local() for g in _gradients(model).values()}
            gradient_nbytes.append(sum(local.untyped_storage().nbytes() for local in storages.values()))
        assert 0 < gradient_nbytes[1] <= gradient_nbytes[0] / 2 + 256  # alignment

    run_ranks(check, 2)


def test_norms_are_taken_in_a_wide_dtype() -> None:
    def check() -> None:
        wide, narrow = _pair()
        for model in (wide, narrow):
            _backward(model)
            for gradient in _gradients(model).values():
                gradient.to_local().fill_(1.0)
        assert parameter_norms(wide) == parameter_norms(narrow)

    run_ranks(check, 2)


def test_sgd_steps_on_gradients_of_another_dtype() -> None:
    def check() -> None:
        wide, narrow = _pair()
        for model in (wide, narrow):
            _backward(model)
        for parameter in wide.parameters():
            assert parameter.grad is not None
            parameter.grad.copy_(parameter.grad.to(BF16))
        for model in (wide, narrow):
            torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9).step()
        for (name, expected), got in zip(wide.named_parameters(), narrow.parameters(), strict=True):
            torch.testing.assert_close(whole(got), whole(expected), msg=name)

    run_ranks(check, 2)


def test_a_model_that_is_cast_keeps_the_dtype_of_its_gradients() -> None:
    def check() -> None:
        model = _shard(Net(), MixedPrecisionPolicy(BF16, FP32, main_grads_dtype=BF16))
        _backward(model.double())
        assert {g.dtype for g in _gradients(model).values()} == {BF16}

    run_ranks(check, 2)
